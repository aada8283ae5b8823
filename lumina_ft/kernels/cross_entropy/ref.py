"""Reference cross-entropy of a linear layer's outputs: all logits at once.

Shape legend: m rows, H hidden, V classes.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class LinearLoss(NamedTuple):
    """Loss of the rows of one head.

    Attributes:
        total: float32, 0-dim; sum of the rows' cross-entropies in nats.
        finite: bool, 0-dim; whether all logits are finite. Found without a host read.
    """

    total: Tensor
    finite: Tensor


def linear_cross_entropy_ref(
    hidden: Tensor, weight: Tensor, targets: Tensor, low_rank: tuple[Tensor, Tensor] | None = None
) -> LinearLoss:
    """Logits [m, V] in the dtype of the weight, and everything after them in float32.

    Args:
        hidden: [m, H] float. weight: [V, H] float. targets: [m] int64 in 0..V-1.
        low_rank: z [m, r] and b [V, r] of an adapter, for which `z @ b.T` is added to the logits.
    """
    logits = F.linear(hidden, weight)
    return loss_of_logits(logits if low_rank is None else logits + F.linear(*low_rank), targets)


def loss_of_logits(logits: Tensor, targets: Tensor) -> LinearLoss:
    """logits: [..., V] float. targets: [...] int64 in 0..V-1."""
    total = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="sum")
    return LinearLoss(total, all_finite(logits))


def all_finite(x: Tensor) -> Tensor:
    """0-dim bool, without a host read. A sum is non-finite if any entry is; it can't overflow from sane values."""
    return x.detach().sum(dtype=torch.float32).isfinite()
