"""Which cross-entropy runs behind a value of `model.kernels`.

Shape legend: m rows, H hidden, V classes, r rank of an adapter.
"""

import logging
from functools import lru_cache

import torch
from torch import Tensor

from lumina_ft.kernels.cross_entropy.chunked import chunked_cross_entropy
from lumina_ft.kernels.cross_entropy.liger import liger_cross_entropy, liger_unavailable_reason
from lumina_ft.kernels.cross_entropy.ref import LinearLoss, linear_cross_entropy_ref

logger = logging.getLogger(__name__)


@lru_cache(maxsize=16)
def cross_entropy_impl(kernels: str, device: torch.device) -> str:
    """`liger`, `chunked` or `reference`.

    `eager` is the reference and `torch` the chunked operation. `auto` and `triton` are Liger where it is installed for
    this device, and otherwise the chunked operation, which is made of large matrix products too.
    """
    if kernels in ("eager", "torch"):
        return "reference" if kernels == "eager" else "chunked"
    reason = liger_unavailable_reason(device)
    chosen = "liger" if reason is None else "chunked"
    logger.info("kernels=%s chose %s cross-entropy%s", kernels, chosen, "" if reason is None else f": {reason}")
    return chosen


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, low_rank: tuple[Tensor, Tensor] | None = None, *, impl: str
) -> LinearLoss:
    """Sum of the cross-entropies of `hidden @ weight.T`, without a tensor [m, V] unless `impl` is `eager`.

    Args:
        hidden: [m, H] float, m >= 1. weight: [V, H] float. targets: [m] int64 in 0..V-1.
        low_rank: z [m, r] and b [V, r] of an adapter, for which `z @ b.T` is added to the logits. Liger has no such
            term: then the chunked operation takes its place.
        impl: value of `model.kernels`.
    """
    chosen = cross_entropy_impl(impl, hidden.device)
    if chosen == "reference":
        return linear_cross_entropy_ref(hidden, weight, targets, low_rank)
    if chosen == "liger" and low_rank is None:
        return liger_cross_entropy(hidden, weight, targets)
    return chunked_cross_entropy(hidden, weight, targets, low_rank)
