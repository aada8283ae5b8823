"""What an adapter adds to a weight: W + sum of w s B A, or DoRA's rescaled rows, in float64 and rounded once.

Shape legend: O outputs, I inputs, r rank; stacked experts have an axis in front.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lumina_ft.models.native import row_pieces


def lora_delta(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale * B A.

    Args:
        a: [r, I] or [E, r, I]. b: [O, r], or some of its rows, or [E, O, r].
        scale: alpha / r or alpha / sqrt(r), times the adapter's weight in the merge.

    Returns:
        [O, I] or [E, O, I] float64.
    """
    return (b.double() @ a.double()).mul_(scale)


def merge_weight(
    w: Tensor, deltas: Sequence[Tensor], *, magnitude: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """W plus its deltas, in float64 and rounded once.

    DoRA (arXiv:2402.09353, as PEFT merges it): row o becomes magnitude[o] * V[o] / ||V[o]||, V = W + delta.

    Args:
        w: [O, I] of any float dtype, or some of its rows, or [E, O, I].
        deltas: float64 of that shape each.
        magnitude: [O], for DoRA.
        dtype: of the result; default: of `w`.

    Returns:
        As `w`.
    """
    total = w.double()
    for delta in deltas:
        total = total + delta
    if magnitude is not None:
        norm = total.square().sum(dim=1, keepdim=True).sqrt_()
        total = total * (magnitude.double().reshape(-1, 1) / norm)
    return round_to(total, dtype or w.dtype)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 to `dtype`, to nearest with ties to even, in one rounding.

    A plain cast to a 16-bit type rounds to float32 first, which moves values just beside a tie onto it and from there
    to the wrong neighbour. Rounding to float32 "to odd" instead keeps them on their side.
    """
    if dtype in (torch.float64, torch.float32):
        return x.to(dtype)
    single = x.float()
    inexact = (single.double() != x) & x.isfinite()
    bits = single.view(torch.int32)
    # Float bits are sign and magnitude: one less is one step towards zero.
    bits -= (inexact & (single.double().abs() > x.abs())).int()
    bits |= inexact.int()
    return single.to(dtype)


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of any float dtype in another one, in one rounding."""
    return round_to(x, dtype) if x.dtype == torch.float64 else x.to(dtype)


def delta_cosine(before: Tensor, after: Tensor, delta: Tensor) -> float:
    """How much of an update survived rounding: cosine between `after - before` and `delta`, 1 if nothing was lost.

    Args:
        before, after: [O, I] of any float dtypes.
        delta: [O, I] float64, the update in full precision.

    Returns:
        In [-1, 1]; 0 if `after` equals `before` although `delta` isn't zero; 1 if both are unchanged.
    """
    return cosine_of(*change_sums(before, after, delta))


def change_sums(before: Tensor, after: Tensor, delta: Tensor) -> tuple[float, float, float]:
    """What `cosine_of` needs; the sums of several weights add up to those of their stack.

    Args:
        before, after, delta: as in `delta_cosine`.

    Returns:
        (after - before) . delta, |after - before|^2, |delta|^2.
    """
    dot = kept_square = delta_square = 0.0
    for rows in row_pieces(before.shape):
        wanted = delta[rows].double()
        kept = after[rows].double() - before[rows].double()
        dot += float((kept * wanted).sum())
        kept_square += float(kept.square().sum())
        delta_square += float(wanted.square().sum())
    return dot, kept_square, delta_square


def cosine_of(dot: float, kept_square: float, delta_square: float) -> float:
    """The cosine from its sums; see `delta_cosine`."""
    if kept_square == 0.0 or delta_square == 0.0:
        return 1.0 if kept_square == delta_square else 0.0
    return max(-1.0, min(1.0, dot / (kept_square**0.5 * delta_square**0.5)))
