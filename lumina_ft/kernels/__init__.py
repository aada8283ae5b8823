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
from lumina_ft.kernels.moe.dropout import draw_key, row_keys
from lumina_ft.kernels.moe.grouped import (
    combine,
    dispatch,
    grouped_experts,
    grouped_mlp,
    permute,
    plan_experts,
    sort_slots,
)
from lumina_ft.kernels.moe.products import unsupported_reason
from lumina_ft.kernels.moe.ref import expert_buckets, expert_loop
from lumina_ft.kernels.moe.weights import Experts, Lora, Projection
from lumina_ft.kernels.router.ref import Routing, route

__all__ = [
    "AttentionPlan",
    "DensePlan",
    "Experts",
    "Lora",
    "Projection",
    "Routing",
    "SegmentedPlan",
    "allowed_mask",
    "attend",
    "choose_experts",
    "combine",
    "dispatch",
    "draw_key",
    "grouped_mlp",
    "permute",
    "plan_experts",
    "plan_segments",
    "route",
    "row_keys",
    "sort_slots",
]

logger = logging.getLogger(__name__)

AttentionPlan = SegmentedPlan | DensePlan
ExpertsFunction = Callable[[Tensor, Experts, Tensor, Tensor, Tensor | None], Tensor]
"""(x [T, H], experts, topk_idx [T, K], topk_weight [T, K], dropout keys [T, K] or None) -> [T, H]."""


def attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
    """Attention under a plan. q: [T, Hq, D]; k, v: [T, Hk, D]. Returns [T, Hq, D], 0 for padding."""
    if isinstance(plan, SegmentedPlan):
        return segmented_attention(q, k, v, plan)
    return dense_attention(q, k, v, plan)


def eager_experts(
    x: Tensor, experts: Experts, topk_idx: Tensor, topk_weight: Tensor, keys: Tensor | None = None
) -> Tensor:
    """The reference on stacked weights: the loop when gradients are recorded, buckets otherwise."""
    run = expert_loop if torch.is_grad_enabled() else expert_buckets
    return run(x, experts.unbind(), topk_idx, topk_weight, keys)


EXPERTS: dict[str, ExpertsFunction] = {"torch": grouped_experts, "eager": eager_experts}


@lru_cache(maxsize=16)
def choose_experts(
    impl: str, hidden_size: int, expert_size: int, dtype: torch.dtype, *, shared: bool = False
) -> ExpertsFunction:
    """The function behind `model.experts_impl`.

    Args:
        impl: `auto`, `torch` (grouped products) or `eager` (one expert at a time).
        hidden_size: H. expert_size: I.
        dtype: of the weights.
        shared: the experts are spread over ranks, which the reference can't follow.

    Raises:
        ConfigError: unknown name, `torch` with sizes it can't run, or `eager` with experts spread over ranks.
    """
    reason = unsupported_reason(hidden_size, expert_size, dtype)
    if impl not in ("auto", *EXPERTS):
        raise ConfigError(f"model.experts_impl — {impl!r} — must be one of auto, {', '.join(EXPERTS)} — use auto")
    if impl == "torch" and reason is not None:
        raise ConfigError(f"model.experts_impl — torch — {reason} — use eager, or sizes that fit")
    chosen = impl if impl != "auto" else "torch" if reason is None else "eager"
    if shared and chosen == "eager":
        why = f" (auto chose it: {reason})" if impl == "auto" else ""
        raise ConfigError(
            f"model.experts_impl — eager{why} — runs experts of its own rank only — set "
            f"{'model.experts_impl: torch' if reason is None else 'parallel.expert_parallel_size: 1'}"
        )
    if impl == "auto":
        logger.info("experts_impl=auto chose %s%s", chosen, "" if reason is None else f": {reason}")
    return EXPERTS[chosen]
