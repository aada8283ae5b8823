"""The one door to implementations of heavy operations: a model names a choice, `choice.Kernels` finds the functions.

A named implementation that can't run is an error, never replaced by another; see `choice`. Nothing here imports Triton
before one of its kernels runs.
"""

from torch import Tensor

from lumina_ft.kernels.attention.ref import DensePlan, allowed_mask, dense_attention
from lumina_ft.kernels.attention.segmented import SegmentedPlan, plan_segments, segmented_attention
from lumina_ft.kernels.attention.tile_plan import TilePlan, plan_tiles
from lumina_ft.kernels.attention.tiled import tiled_attention
from lumina_ft.kernels.choice import CHOICES, Kernels, Operations, RowsFunction, eager_experts, log_choice
from lumina_ft.kernels.cross_entropy.choice import linear_cross_entropy
from lumina_ft.kernels.cross_entropy.chunked import CHUNK_BYTES, chunk_rows
from lumina_ft.kernels.cross_entropy.ref import LinearLoss, all_finite, loss_of_logits
from lumina_ft.kernels.moe.dropout import draw_key, row_keys
from lumina_ft.kernels.moe.grouped import combine, dispatch, permute, plan_experts, sort_slots
from lumina_ft.kernels.moe.weights import Experts, Lora, Projection
from lumina_ft.kernels.router.ref import Routing, route

__all__ = [
    "CHOICES",
    "CHUNK_BYTES",
    "AttentionPlan",
    "DensePlan",
    "Experts",
    "Kernels",
    "LinearLoss",
    "Lora",
    "Operations",
    "Projection",
    "Routing",
    "RowsFunction",
    "SegmentedPlan",
    "TilePlan",
    "all_finite",
    "allowed_mask",
    "attend",
    "chunk_rows",
    "combine",
    "dispatch",
    "draw_key",
    "eager_experts",
    "linear_cross_entropy",
    "log_choice",
    "loss_of_logits",
    "permute",
    "plan_experts",
    "plan_segments",
    "plan_tiles",
    "route",
    "row_keys",
    "sort_slots",
]

AttentionPlan = TilePlan | SegmentedPlan | DensePlan


def attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
    """Attention under a plan. q: [T, Hq, D]; k, v: [T, Hk, D]. Returns [T, Hq, D], 0 for padding."""
    if isinstance(plan, TilePlan):
        return tiled_attention(q, k, v, plan)
    if isinstance(plan, SegmentedPlan):
        return segmented_attention(q, k, v, plan)
    return dense_attention(q, k, v, plan)
