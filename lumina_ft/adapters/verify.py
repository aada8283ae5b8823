"""Proof that a merged model directory is what it should be: read again from disk, computed again by other code.

Nothing here comes from `delta.py` or `combine.py`: adapters are parsed and scaled (`raw_adapter`), sums formed and
rounded on their own, in numpy. Stacked experts are proved one by one.

Shape legend: E experts, O outputs, I inputs, r rank.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lumina_ft.adapters.float_bits import (
    Bits,
    Doubles,
    all_finite,
    bits_of,
    converted_bits,
    rounded_bits,
    values_of,
    values_of_bits,
)
from lumina_ft.adapters.raw_adapter import Factors, RawAdapter
from lumina_ft.errors import CheckpointError, RunError
from lumina_ft.models.hf_keys import CHANNEL_MASK
from lumina_ft.models.native import NativeReader, for_each_tensor

LOW_COSINE = 0.99
"""Below this a matrix's update lost a noticeable part of its direction to rounding."""

_UNIT = 2.0**-53
"""Relative error of one float64 operation."""

_BUFFER = ".mlp.gate.expert_bias"
"""Suffix of buffers, which keep their dtype."""

_LISTED = 5


@dataclass(frozen=True)
class ExpertCheck:
    """What was found in an adapted tensor of stacked experts [E, O, I].

    Attributes:
        trained: experts whose update isn't zero. untrained: the others; no token may have reached them.
        low: trained ones whose update has a cosine under `LOW_COSINE`.
        lowest: expert with the lowest cosine among the trained ones; lowest_cosine: 1 if there is none.
    """

    trained: int
    untrained: int
    low: int
    lowest: int
    lowest_cosine: float

    @classmethod
    def of(cls, experts: "Sequence[_Sums]") -> "ExpertCheck":
        """Count over the experts of a tensor, in their order."""
        cosines = {i: sums.cosine for i, sums in enumerate(experts) if sums.wanted_square > 0.0}
        lowest = min(cosines, key=lambda expert: cosines[expert], default=0)
        low = sum(cosine < LOW_COSINE for cosine in cosines.values())
        return cls(len(cosines), len(experts) - len(cosines), low, lowest, cosines.get(lowest, 1.0))


@dataclass(frozen=True)
class MergeCheck:
    """What verification found; a merge with an error raises instead.

    Attributes:
        tensors: native tensors compared.
        adapted: with a low-rank update. replaced: taken whole from an adapter. copied: bitwise those of the base.
        boundary_values: values so close to the middle between two floats that the error of float64 leaves both right.
        cosines: adapted tensor -> cosine between its update in the file and in float64, lowest first.
        experts: adapted tensor of stacked experts -> what was found expert by expert.
        warnings: for the user.
    """

    tensors: int
    adapted: int
    replaced: int
    copied: int
    boundary_values: int
    cosines: dict[str, float]
    experts: dict[str, ExpertCheck] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def lowest_cosine(self) -> float:
        """Of all adapted tensors."""
        return min(self.cosines.values(), default=1.0)


class _Found(NamedTuple):
    """Of one tensor: `kind` is adapted, replaced or copied."""

    kind: str
    cosine: float = 1.0
    boundary_values: int = 0
    experts: ExpertCheck | None = None


def verify_merge(
    base: Path,
    adapters: Sequence[tuple[Path, float]],
    merged: Path,
    *,
    dtype: torch.dtype | None = None,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> MergeCheck:
    """Compare a merged directory with its base and adapters, tensor by tensor and value by value.

    Args:
        base: model directory. adapters: directories and weights.
        merged: model directory to prove.
        dtype: that weights were asked in; default: that of the base.
        advance: called with the bytes of the output that have been checked.

    Raises:
        CheckpointError: an adapted tensor equals the base's; a value is infinite or NaN.
        RunError: a tensor is missing, misshapen, or isn't bitwise what it should be.
    """
    raw = [RawAdapter(Path(directory), weight) for directory, weight in adapters]
    with NativeReader(base) as before, NativeReader(merged) as after:
        _check_names(before, after)

        def work(name: str) -> _Found:
            found = _check_tensor(name, before, after, raw, dtype)
            advance(after.tensors[name].spec.num_bytes)
            return found

        names = list(before.tensors)
        found = dict(zip(names, for_each_tensor(work, names), strict=True))
    touched = {name for adapter in raw for name in adapter.names}
    if lost := sorted(touched - {name for name, value in found.items() if value.kind != "copied"}):
        raise _wrong(lost[0], "is in the adapter and not in the merged model")
    cosines = {name: value.cosine for name, value in found.items() if value.kind == "adapted"}
    cosines = dict(sorted(cosines.items(), key=lambda item: item[1]))
    experts = {name: value.experts for name, value in found.items() if value.experts is not None}
    kinds = [value.kind for value in found.values()]
    return MergeCheck(
        tensors=len(found),
        adapted=kinds.count("adapted"),
        replaced=kinds.count("replaced"),
        copied=kinds.count("copied"),
        boundary_values=sum(value.boundary_values for value in found.values()),
        cosines=cosines,
        experts=experts,
        warnings=_cosine_warnings(cosines, experts, {name: after.tensors[name].spec.dtype for name in cosines}),
    )


def _check_names(before: NativeReader, after: NativeReader) -> None:
    for name in before.tensors:
        if name not in after.tensors:
            raise _wrong(name, "is missing")
    for name in after.tensors:
        if name not in before.tensors and not (name == CHANNEL_MASK and _is_causal(after)):
            raise _wrong(name, "isn't in the base")


def _is_causal(after: NativeReader) -> bool:
    """Whether a channel mask that the base leaves out is 0 on and below the diagonal and -inf above."""
    mask = values_of(after.reader.read(CHANNEL_MASK))
    return bool((mask == np.where(np.tri(*mask.shape, dtype=bool), 0.0, -np.inf)).all())


def _check_tensor(
    name: str, before: NativeReader, after: NativeReader, adapters: Sequence[RawAdapter], dtype: torch.dtype | None
) -> _Found:
    """Everything about one tensor; see `verify_merge`."""
    old, new = before.tensors[name].spec, after.tensors[name].spec
    if new.shape != old.shape or new.num_bytes == 0:
        raise _wrong(name, f"has shape {list(new.shape)}, the base has {list(old.shape)}")
    wanted_dtype = old.dtype if dtype is None or name == CHANNEL_MASK or name.endswith(_BUFFER) else dtype
    if new.dtype != wanted_dtype:
        raise _wrong(name, f"is {new.dtype}, not {wanted_dtype}")
    adapting = [adapter for adapter in adapters if adapter.adapts(name)]
    if adapting:
        return _check_adapted(name, before, after, adapting)
    whole = [adapter for adapter in adapters if name in adapter.whole]
    for rows, w, got in _pieces(name, before, after):
        source = whole[0].whole_tensor(name)[rows] if whole else w
        wanted = converted_bits(source.contiguous(), got.dtype)
        if not np.array_equal(wanted, bits_of(got)):
            raise _differs(name, rows, bits_of(got), wanted, got.dtype, "the adapter's" if whole else "the base's")
    return _Found("replaced" if whole else "copied")


def _pieces(name: str, before: NativeReader, after: NativeReader) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows of a tensor in the base and in the merged model, whose values must be finite."""
    for rows, w in before.pieces(name):
        got = after.rows(name, rows)
        if name != CHANNEL_MASK and not all_finite(got):
            raise _not_finite(name, all_finite(w))
        yield rows, w, got


def _check_adapted(name: str, before: NativeReader, after: NativeReader, adapters: Sequence[RawAdapter]) -> _Found:
    """Compare a tensor with base and updates: a matrix in pieces of its rows, stacked experts one at a time."""
    spec = after.tensors[name].spec
    stacked = len(spec.shape) == 3
    expected = None if stacked else _Expected.of([adapter.factors(name) for adapter in adapters])
    parts: list[_Sums] = []
    for rows, w, got in _pieces(name, before, after):
        if expected is not None:
            parts.append(_check_rows(name, rows, w, got, expected))
            continue
        expert = rows.start
        own = _Expected.of([adapter.expert_factors(name, expert, spec.shape[0]) for adapter in adapters])
        parts.append(_check_rows(f"{name}, expert {expert},", slice(0, spec.shape[1]), w[0], got[0], own))
    sums = _Sums.of(parts)
    if sums.kept_square == 0.0:
        raise _identical(name, sums.wanted_square == 0.0, spec.dtype)
    return _Found("adapted", sums.cosine, sums.boundary_values, ExpertCheck.of(parts) if stacked else None)


def _check_rows(name: str, rows: slice, w: Tensor, got: Tensor, expected: "_Expected") -> "_Sums":
    """Compare some rows of an adapted tensor with W + scale B A, or DoRA's rows."""
    base = values_of(w)
    value = expected.value(base, rows)
    wanted, found = rounded_bits(value, got.dtype), bits_of(got)
    off = wanted != found
    boundary = 0
    if off.any():
        # Two float64 evaluations differ by at most twice the error of one; every float that lies between the rounded
        # ends of that interval is right, which is more than one only around the middle between two floats.
        lines = np.flatnonzero(off.any(axis=1))
        here = slice(None) if lines.size == off.shape[0] else lines
        error = 2.0 * expected.error(base[here], rows, here)
        low = rounded_bits(value[here] - error, got.dtype)
        high = rounded_bits(value[here] + error, got.dtype)
        actual = values_of_bits(found[here], got.dtype)
        between = (values_of_bits(low, got.dtype) <= actual) & (actual <= values_of_bits(high, got.dtype))
        if not (~off[here] | ((low != high) & between)).all():
            raise _differs(name, rows, found, wanted, got.dtype, "W + scale * B A, rounded")
        boundary = int(off.sum())
    kept = values_of(got) - base
    update = value - base
    return _Sums(float(np.vdot(kept, update)), float(np.vdot(kept, kept)), float(np.vdot(update, update)), boundary)


@dataclass(frozen=True)
class _Sums:
    """Over some rows of a tensor: products of the kept and the wanted update."""

    dot: float
    kept_square: float
    wanted_square: float
    boundary_values: int

    @classmethod
    def of(cls, parts: "Sequence[_Sums]") -> "_Sums":
        """Over all rows of these."""
        return cls(
            sum(part.dot for part in parts),
            sum(part.kept_square for part in parts),
            sum(part.wanted_square for part in parts),
            sum(part.boundary_values for part in parts),
        )

    @property
    def cosine(self) -> float:
        lengths = math.sqrt(self.kept_square) * math.sqrt(self.wanted_square)
        return 0.0 if lengths == 0.0 else max(-1.0, min(1.0, self.dot / lengths))


@dataclass(frozen=True)
class _Expected:
    """The value of an adapted matrix, and how far a float64 evaluation of it can be off."""

    sb: Doubles
    a: Doubles
    magnitude: Doubles | None

    @classmethod
    def of(cls, factors: Sequence[Factors]) -> "_Expected":
        """Several adapters are one of the sum of their ranks."""
        sb = np.concatenate([part.sb for part in factors], axis=1)
        return cls(sb, np.concatenate([part.a for part in factors], axis=0), factors[0].magnitude)

    def value(self, base: Doubles, rows: slice) -> Doubles:
        """[n, I] for rows of the base [n, I]."""
        total = self.sb[rows] @ self.a
        total += base
        if self.magnitude is None:
            return total
        return total * (self.magnitude[rows] / np.linalg.norm(total, axis=1))[:, None]

    def error(self, base: Doubles, rows: slice, here: Any) -> Doubles:
        """Bound of the error of `value` (Higham, Accuracy and Stability, ch. 3), at the lines `here` of these rows."""
        sb, rank, inputs = self.sb[rows][here], self.sb.shape[1], base.shape[1]
        bound = (np.abs(sb) @ np.abs(self.a) + np.abs(base)) * ((rank + 8) * _UNIT)
        if self.magnitude is None:
            return bound
        total = sb @ self.a + base
        norm = np.linalg.norm(total, axis=1)[:, None]
        scale = np.abs(self.magnitude[rows][here])[:, None] / norm
        return scale * (bound + np.abs(total) * (np.linalg.norm(bound, axis=1)[:, None] / norm + (inputs + 8) * _UNIT))


def _cosine_warnings(
    cosines: Mapping[str, float], experts: Mapping[str, ExpertCheck], dtypes: Mapping[str, torch.dtype]
) -> tuple[str, ...]:
    """About matrices (of experts: single ones) whose update was damaged."""
    low = {name: (name, value, 1) for name, value in cosines.items() if name not in experts and value < LOW_COSINE}
    for name, check in experts.items():
        if check.low:
            low[name] = (f"{name} expert {check.lowest}", check.lowest_cosine, check.low)
    if not low:
        return ()
    order = sorted(low, key=lambda name: low[name][1])
    worst = ", ".join("{} {:.4f}".format(*low[name][:2]) for name in order[:_LISTED])
    dtype = dtypes[order[0]]
    matrices = len(cosines) - len(experts) + sum(check.trained for check in experts.values())
    return (
        f"{sum(count for *_, count in low.values())} of {matrices} adapted matrices have a delta cosine under "
        f"{LOW_COSINE} (worst: {worst}): the update is small beside the rounding of "
        f"{str(dtype).removeprefix('torch.')} weights, and part of it is lost"
        f"{'' if dtype == torch.float32 else '; --dtype float32 keeps it'}",
    )


def _wrong(name: str, what: str) -> RunError:
    return RunError(
        f"verification — {name} {what} — the merged model must be exactly base and adapter — nothing is kept; "
        "check the disk and report this as a defect"
    )


def _differs(name: str, rows: slice, got: Bits, wanted: Bits, dtype: torch.dtype, what: str) -> RunError:
    off = np.argwhere(got != wanted)
    first = tuple(off[0])
    where = [int(first[0]) + rows.start, *(int(i) for i in first[1:])]
    values = [float(values_of_bits(x[first].reshape(1), dtype)[0]) for x in (got, wanted)]
    beside = f"{len(off)} of {got.size} values in these rows differ"
    return _wrong(name, f"at {where} is {values[0]!r} instead of {values[1]!r} ({what}); {beside}")


def _not_finite(name: str, base_is: bool) -> CheckpointError:
    culprit = "the adapter's tensors or their sum" if base_is else "the base's tensor"
    return CheckpointError(
        f"verification — {name} holds infinite or NaN values — all weights must be finite, and {culprit} isn't — "
        "nothing is kept; use an earlier checkpoint"
    )


def _identical(name: str, never_trained: bool, dtype: torch.dtype) -> CheckpointError:
    if never_trained:
        why, fix = "its update in the adapter is zero", "check that the adapter was trained"
    else:
        why = f"its whole update is smaller than the rounding of {str(dtype).removeprefix('torch.')}"
        fix = "train it further" if dtype == torch.float32 else "merge with --dtype float32"
    return CheckpointError(
        f"verification — {name} is identical to the base's although the adapter adapts it: {why} — a merge must change "
        f"every adapted tensor — nothing is kept; {fix}, or accept it with --no-verify"
    )
