"""Which experts a checkpoint holds: said by every rank before it is saved, stored as global ids, checked when read.

With experts spread over ranks a checkpoint that lacks one rank's experts looks like any other: its tensors are only
shorter. So their ids are written down, in `state.json` and in the header of every tensor file.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch.distributed as torch_dist
from safetensors import SafetensorError, safe_open
from torch import nn

from lumina_ft.checkpoint.directory import MODEL_DIR, OPTIMIZER_DIR, STATE_FILE, Checkpoint
from lumina_ft.errors import CheckpointError, RunError
from lumina_ft.models.experts import PackedExperts
from lumina_ft.models.u2_config import U2Config
from lumina_ft.parallel.dist import World
from lumina_ft.parallel.zero3 import local_shape

METADATA_KEY = "experts"
"""In the header of a safetensors file: ids of the experts that the rows of its expert tensors stand for."""

_PACKED = ".mlp.experts."
_STACKED_DIMS = 3


class Holding(NamedTuple):
    """What a rank has of a layer's experts.

    Attributes:
        layer: name of the module.
        members: ranks whose experts are put together, in the order in which they are.
        ids: global ids of the rows that this rank has.
        total: experts of the layer.
    """

    layer: str
    members: tuple[int, ...]
    ids: tuple[int, ...]
    total: int


def ids_text(ids: Iterable[int]) -> str:
    """Ids in ranges, in their order: `0-7,12`."""
    listed = list(ids)
    starts = [0, *(i + 1 for i, (one, next_one) in enumerate(pairwise(listed)) if next_one != one + 1), len(listed)]
    runs = [listed[a:b] for a, b in pairwise(starts) if a < b]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def read_ids(text: str) -> tuple[int, ...]:
    """The ids that `ids_text` wrote.

    Raises:
        ValueError: something else.
    """
    ids: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        ids += range(int(first), int(last or first) + 1)
    return tuple(ids)


def holdings(model: nn.Module, rank: int) -> list[Holding]:
    """What this rank has of each layer's experts.

    Args:
        rank: of this process among all.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, PackedExperts):
            shared, total = module.expert_parallel, module.num_experts
            members = (rank,) if shared is None else tuple(torch_dist.get_process_group_ranks(shared.group))
            ids = tuple(range(total)) if shared is None else tuple(range(total))[shared.local(total)]
            rows = min(local_shape(param)[0] for param in module.parameters(recurse=False))
            found.append(Holding(name, members, ids[:rows], total))
    return found


def agree_on_experts(model: nn.Module, world: World) -> str:
    """Make sure that the ranks together hold every expert of every layer once, in order. Collective.

    Returns:
        The ids, for `state.json` and the tensor files; empty for a model without routed experts.

    Raises:
        RunError: an expert is held by no rank or twice; on every rank, naming them.
    """
    by_rank: list[list[Holding]] = world.gather_objects(holdings(model, world.rank))
    problems = dict.fromkeys(problem for held in by_rank for problem in _problems(held, by_rank))
    if problems:
        raise RunError("\n".join(problems))
    totals = {holding.total for held in by_rank for holding in held}
    assert len(totals) <= 1, f"layers with different numbers of experts: {totals}"
    return ids_text(range(max(totals, default=0)))


def _problems(held: Sequence[Holding], by_rank: Sequence[Sequence[Holding]]) -> Iterator[str]:
    """What is wrong with the layers of one rank's exchange group."""
    for index, (layer, members, _, total) in enumerate(held):
        parts = {rank: by_rank[rank][index].ids for rank in members}
        ids = [i for part in parts.values() for i in part]
        if ids == list(range(total)):
            continue
        wrong = {
            "on no rank": sorted(set(range(total)) - set(ids)),
            "on two ranks": sorted({i for i in ids if ids.count(i) > 1}),
        }
        found = "; ".join(f"experts {ids_text(bad)} are {how}" for how, bad in wrong.items() if bad)
        each = ", ".join(f"rank {rank} has {ids_text(part) or 'none'}" for rank, part in parts.items())
        yield (
            f"{layer} — {found or 'experts are out of order'} ({each}) — a checkpoint holds each of the {total} once, "
            "nothing of it was written — continue from the checkpoint before, with parallel.expert_parallel_size: 1"
        )


def check_experts(config: U2Config, checkpoint: Checkpoint | None, weights: Path | None) -> None:
    """Make sure that all experts of the model are there, before anything is loaded. Reads headers only.

    Args:
        checkpoint: to resume from.
        weights: model directory to load, that of the checkpoint or another one; one of elsewhere needn't state ids.

    Raises:
        CheckpointError: some are missing, naming them.
    """
    total = config.num_experts if config.num_moe_layers else 0
    if checkpoint is not None:
        state_file, stated = checkpoint.path / STATE_FILE, checkpoint.state.experts
        if total and not stated:
            raise CheckpointError(
                f"{state_file} — no `experts` — must state which of the {total} the checkpoint holds — it is of an "
                "older version: resume with that one"
            )
        _check_stated(state_file, stated, total)
        _check_files(checkpoint.path / OPTIMIZER_DIR, OPTIMIZER_DIR, total, must_state=True)
    if weights is not None:
        own = checkpoint is not None and weights == checkpoint.path / MODEL_DIR
        _check_files(weights, MODEL_DIR, total, must_state=own)


def _check_files(folder: Path, stem: str, total: int, *, must_state: bool) -> None:
    for file in sorted(folder.glob(f"{stem}*.safetensors")):
        stated, rows = _read_header(file)
        if stated is None and not must_state:
            continue
        _check_stated(file, stated or "", total)
        for name, count in rows.items():
            if count < total:
                raise _incomplete(file, f"{name} has {count} rows", range(count, total), total)


def _check_stated(file: Path, stated: str, total: int) -> None:
    try:
        ids = read_ids(stated)
    except ValueError as error:
        raise CheckpointError(
            f"{file} — experts {stated!r} — must be ids like 0-{total - 1} — resume from another checkpoint"
        ) from error
    missing = sorted(set(range(total)) - set(ids))
    if missing:
        raise _incomplete(file, f"it holds experts {stated or 'none'}", missing, total)
    if len(ids) != total:
        raise CheckpointError(
            f"{file} — experts {stated} — the model has {total} — the checkpoint is of another model: check config.json"
        )


def _incomplete(file: Path, found: str, missing: Iterable[int], total: int) -> CheckpointError:
    return CheckpointError(
        f"{file} — {found} — all {total} experts of a layer must be there; missing: {ids_text(missing)} — "
        "the experts of a rank were lost: resume from another checkpoint"
    )


def _read_header(file: Path) -> tuple[str | None, dict[str, int]]:
    """The ids that a file states, None if it states none, and the rows of each tensor of stacked experts in it."""
    try:
        with safe_open(file, framework="pt") as tensors:
            shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys() if _PACKED in name}
            stated = (tensors.metadata() or {}).get(METADATA_KEY)
            return stated, {name: shape[0] for name, shape in shapes.items() if len(shape) == _STACKED_DIMS}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} — {error} — must be a complete safetensors file ({file.stat().st_size} bytes on disk) — "
            "resume from another checkpoint, or copy the file again"
        ) from error
