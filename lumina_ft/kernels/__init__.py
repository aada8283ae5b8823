"""The one door to implementations of heavy operations: callers name a choice, this module picks the function.

`auto` logs its pick once; a named implementation that can't run is an error, never replaced by another.
"""

import logging
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from lumina_ft.errors import ConfigError
from lumina_ft.kernels.attention.ref import DensePlan, allowed_mask, dense_attention
from lumina_ft.kernels.attention.segmented import SegmentedPlan, plan_segments, segmented_attention
from lumina_ft.kernels.moe.grouped import grouped_experts, unsupported_reason
from lumina_ft.kernels.moe.ref import expert_buckets, expert_loop
from lumina_ft.kernels.router.ref import Routing, route

__all__ = [
    "AttentionPlan",
    "DensePlan",
    "Routing",
    "SegmentedPlan",
    "allowed_mask",
    "attend",
    "choose_experts",
    "plan_segments",
    "route",
]

logger = logging.getLogger(__name__)

AttentionPlan = SegmentedPlan | DensePlan
ExpertsFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(x [T, H], gate [E, I, H], up [E, I, H], down [E, H, I], topk_idx [T, K], topk_weight [T, K]) -> [T, H]."""


def attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
    """Attention under a plan. q: [T, Hq, D]; k, v: [T, Hk, D]. Returns [T, Hq, D], 0 for padding."""
    if isinstance(plan, SegmentedPlan):
        return segmented_attention(q, k, v, plan)
    return dense_attention(q, k, v, plan)


def eager_experts(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, topk_idx: Tensor, topk_weight: Tensor) -> Tensor:
    """The reference on stacked weights: the loop when gradients are recorded, buckets otherwise."""
    run = expert_loop if torch.is_grad_enabled() else expert_buckets
    return run(x, gate.unbind(0), up.unbind(0), down.unbind(0), topk_idx, topk_weight)


EXPERTS: dict[str, ExpertsFunction] = {"torch": grouped_experts, "eager": eager_experts}


@lru_cache(maxsize=16)
def choose_experts(impl: str, hidden_size: int, expert_size: int, dtype: torch.dtype) -> ExpertsFunction:
    """The function behind `model.experts_impl`.

    Args:
        impl: `auto`, `torch` (grouped products) or `eager` (one expert at a time).
        hidden_size: H. expert_size: I.
        dtype: of the weights.

    Raises:
        ConfigError: unknown name, or `torch` with sizes it can't run.
    """
    reason = unsupported_reason(hidden_size, expert_size, dtype)
    if impl == "auto":
        impl = "torch" if reason is None else "eager"
        logger.info("experts_impl=auto chose %s%s", impl, "" if reason is None else f": {reason}")
    elif impl == "torch" and reason is not None:
        raise ConfigError(f"model.experts_impl — torch — {reason} — use eager, or sizes that fit")
    if impl not in EXPERTS:
        raise ConfigError(f"model.experts_impl — {impl!r} — must be one of auto, {', '.join(EXPERTS)} — use auto")
    return EXPERTS[impl]
