"""What several weighted adapters together do to each tensor of a base."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lumina_ft.adapters.delta import converted, lora_delta, merge_weight
from lumina_ft.adapters.files import LoraFile, LoraPair, read_adapter
from lumina_ft.errors import CheckpointError, ConfigError
from lumina_ft.models.hf_keys import CHANNEL_MASK
from lumina_ft.models.matching import is_causal_mask
from lumina_ft.models.tensor_files import TensorSpec


class WeightedAdapter(NamedTuple):
    """An adapter directory and its factor in the sum."""

    directory: Path
    weight: float = 1.0


@dataclass(frozen=True)
class Update:
    """What happens to one tensor: pairs are added to it, or it is replaced.

    Attributes:
        pairs: with the adapter's weight already in the scale.
        replacement: takes the tensor's place; there are no pairs then.
        sources: adapter directories, for messages.
    """

    pairs: tuple[LoraPair, ...] = ()
    replacement: Tensor | None = None
    sources: tuple[Path, ...] = ()

    def new_rows(self, w: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
        """New values of some rows of a tensor. w: these rows of the base's. dtype: of the result."""
        if self.replacement is not None:
            return converted(self.replacement[rows], dtype)
        deltas = [_delta(pair, rows) for pair in self.pairs]
        magnitude = self.pairs[0].magnitude
        return merge_weight(w, deltas, magnitude=None if magnitude is None else magnitude[rows], dtype=dtype)


def open_adapters(adapters: Sequence[WeightedAdapter]) -> list[tuple[LoraFile, float]]:
    """Read the adapter directories and refuse sums that mean nothing.

    Raises:
        CheckpointError: see `read_adapter`.
        ConfigError: no adapter, a weight of 0 or that isn't finite; DoRA in a sum; whole modules with a weight.
    """
    if not adapters:
        raise ConfigError("--adapter — none given — a merge takes one or more adapter directories — name one")
    files: list[tuple[LoraFile, float]] = []
    for directory, weight in adapters:
        if weight == 0 or weight != weight or abs(weight) == float("inf"):
            raise ConfigError(f"--adapter — {directory}={weight} — a weight is a number other than 0 — leave it out")
        file = read_adapter(directory)
        alone = len(adapters) == 1 and weight == 1.0
        if file.use_dora and not alone:
            raise ConfigError(
                f"--adapter — {directory} (weight {weight}) — is a DoRA adapter, which rescales whole rows of the "
                "weight and so has no sum with others and no weight — merge it alone, with weight 1"
            )
        if file.modules and weight != 1.0:
            raise ConfigError(
                f"--adapter — {directory}={weight} — holds whole modules ({', '.join(file.modules_to_save)}), which "
                "replace the base's and so have no weight — use weight 1"
            )
        files.append((file, weight))
    return files


def combine(files: Sequence[tuple[LoraFile, float]], base: dict[str, TensorSpec], where: Path) -> dict[str, Update]:
    """Updates by native name.

    Args:
        files: adapters and weights. base: tensors of the base. where: its directory, for messages.

    Raises:
        CheckpointError: an adapter that doesn't fit the base's names or shapes, or two that exclude each other.
    """
    updates: dict[str, Update] = {}
    for file, weight in files:
        for module, info in file.targets.items():
            name = info.weight
            _check_fit(file, name, info.shape, base, where)
            pair = file.pair(module)
            before = updates.get(name, Update())
            if before.replacement is not None:
                raise _exclusive(name, before, file)
            pair = pair._replace(scale=pair.scale * weight)
            updates[name] = Update((*before.pairs, pair), None, (*before.sources, file.path))
        for name, shape in file.modules.items():
            if name == CHANNEL_MASK:
                # PEFT stores buffers with the modules; this one is constant, and a base may leave it out.
                _check_mask(file)
                continue
            _check_fit(file, name, shape, base, where)
            if name in updates:
                raise _exclusive(name, updates[name], file)
            updates[name] = Update((), file.module_tensor(name), (file.path,))
    return updates


def _delta(pair: LoraPair, rows: slice) -> Tensor:
    """What a pair adds to these rows of a tensor; rows of stacked experts are experts, each with a pair of its own."""
    a = pair.a if pair.a.dim() == 2 else pair.a[rows]
    return lora_delta(a, pair.b[rows], pair.scale)


def _check_fit(file: LoraFile, name: str, shape: tuple[int, ...], base: dict[str, TensorSpec], where: Path) -> None:
    if name not in base or base[name].shape != shape:
        found = f"{list(base[name].shape)} there" if name in base else "not in it"
        raise CheckpointError(
            f"{file.path} — {name} {list(shape)} — must be a tensor of the base {where}, is {found} — "
            "give the base that the adapter was trained on"
        )


def _check_mask(file: LoraFile) -> None:
    if not is_causal_mask(file.module_tensor(CHANNEL_MASK)):
        raise CheckpointError(
            f"{file.path} — {CHANNEL_MASK} — must be 0 on and below the diagonal and -inf above — the adapter is "
            "damaged or of another model: export it again"
        )


def _exclusive(name: str, before: Update, file: LoraFile) -> CheckpointError:
    return CheckpointError(
        f"{file.path} — {name} — {before.sources[-1]} changes it too, and one of the two replaces it whole, which has "
        "no sum — merge one of them, or one after the other"
    )
