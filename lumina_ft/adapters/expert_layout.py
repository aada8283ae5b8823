"""Adapters of routed experts as PEFT stores them, its `target_parameters` (read in PEFT 0.21's `ParamWrapper`).

PEFT wraps the module that holds the stacked parameters once for each adapted one, in the order in which the module
registers them; the first is innermost. So the keys of one layer with all three projections adapted are

    experts.base_layer.base_layer.lora_A.weight    gate_proj
    experts.base_layer.lora_A.weight               up_proj
    experts.lora_A.weight                          down_proj

and with fewer of them the nesting is shallower. A is [E r, I], expert by expert: rows e r to (e + 1) r are expert e's.
B is [O, r E], rank by rank: columns e, E + e, 2 E + e, … are expert e's. Neither order shows in a shape. Ranks and
alphas follow `rank_pattern` and `alpha_pattern`, which match the full name of the parameter, so each projection can
have its own; the scale is alpha / r (or alpha / sqrt(r)) with the r of one expert.

Shape legend: E experts, O outputs, I inputs of one expert, r rank.
"""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from torch import Tensor

from lumina_ft.errors import CheckpointError
from lumina_ft.models.experts import PROJECTIONS
from lumina_ft.models.hf_keys import is_stacked_experts

_WRAPPED = ".base_layer"


def stack_a(a: Tensor) -> Tensor:
    """[E, r, I] -> [E r, I]."""
    return a.reshape(-1, a.shape[2])


def stack_b(b: Tensor) -> Tensor:
    """[E, O, r] -> [O, r E]."""
    return b.permute(1, 2, 0).reshape(b.shape[1], -1)


def unstack_a(a: Tensor, num_experts: int) -> Tensor:
    """[E r, I] -> [E, r, I]."""
    return a.reshape(num_experts, -1, a.shape[1])


def unstack_b(b: Tensor, num_experts: int) -> Tensor:
    """[O, r E] -> [E, O, r], a view whose experts aren't contiguous."""
    return b.reshape(b.shape[0], -1, num_experts).permute(2, 0, 1)


def wrapper_names(targets: Iterable[str]) -> dict[str, str]:
    """Name under which each adapted parameter's tensors are stored.

    Args:
        targets: every adapted stacked parameter of the model, `….mlp.experts.gate_proj`.
    """
    blocks: dict[str, set[str]] = {}
    for target in targets:
        block, _, projection = target.rpartition(".")
        blocks.setdefault(block, set()).add(projection)
    return {
        f"{block}.{projection}": name
        for block, adapted in blocks.items()
        for projection, name in _nested(block, [p for p in PROJECTIONS if p in adapted])
    }


def _nested(block: str, adapted: Sequence[str]) -> list[tuple[str, str]]:
    return [(part, block + _WRAPPED * (len(adapted) - 1 - place)) for place, part in enumerate(adapted)]


def is_wrapper(name: str) -> bool:
    """Whether tensors under this name are those of an adapted parameter, not of a linear layer."""
    return is_stacked_experts(f"{_block_of(name)}.{PROJECTIONS[0]}")


def _block_of(name: str) -> str:
    while name.endswith(_WRAPPED):
        name = name.removesuffix(_WRAPPED)
    return name


def expert_targets(path: Path, wrappers: Collection[str], parameters: Sequence[str]) -> dict[str, str]:
    """Which stacked parameter the tensors under each name belong to.

    Args:
        path: of the file, for messages.
        wrappers: names for which `is_wrapper` holds.
        parameters: `target_parameters`: full names or dotted suffixes.

    Returns:
        Name in `wrappers` -> full name of the parameter.

    Raises:
        CheckpointError: nesting and `target_parameters` don't agree, or name a parameter that isn't known here.
    """
    found: dict[str, str] = {}
    used: set[str] = set()
    for block in dict.fromkeys(_block_of(name) for name in wrappers):
        adapted = []
        for projection in PROJECTIONS:
            hits = {entry for entry in parameters if f".{block}.{projection}".endswith(f".{entry}")}
            used |= hits
            adapted += [projection] if hits else []
        wanted = {name: f"{block}.{projection}" for projection, name in _nested(block, adapted)}
        stored = {name for name in wrappers if _block_of(name) == block}
        if stored != wanted.keys():
            raise CheckpointError(
                f"{path} — {block}: {len(stored)} adapted parameter(s), nested as {', '.join(sorted(stored))} — "
                f"target_parameters ({', '.join(parameters) or 'none'}) names {', '.join(adapted) or 'none'} of "
                f"{', '.join(PROJECTIONS)} there — tensors and configuration are of different exports, or of another "
                "kind of experts: copy them again"
            )
        found |= wanted
    unused = [entry for entry in parameters if entry not in used]
    if unused:
        raise CheckpointError(
            f"{path} — target_parameters: {unused[0]!r} — has no tensor in the file; parameters that can be adapted "
            f"here are experts.{', experts.'.join(PROJECTIONS)} — remove the entry, or export the adapter again"
        )
    return found
