"""Routed experts as grouped matrix products over rows sorted by expert (M5).

Shape legend: T tokens, H hidden, I expert width, E experts, K chosen experts per token, N = T * K sorted rows.

No step here reads a size on the host (torch's CPU kernel does, where that is free). Sums run in a fixed order, so
results don't change from run to run.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lumina_ft.kernels.moe.products import grouped_projection
from lumina_ft.kernels.moe.weights import Experts


class ExpertPlan(NamedTuple):
    """Where each (token, slot) pair goes when rows are sorted by expert.

    Attributes:
        token: [N] int64, token of each sorted row.
        order: [N] int64, flat (token, slot) index of each sorted row.
        inverse: [N] int64, sorted row of each flat (token, slot) index.
        counts: [E] int64, rows of each expert.
        offsets: [E] int32, end of each expert's rows.
    """

    token: Tensor
    order: Tensor
    inverse: Tensor
    counts: Tensor
    offsets: Tensor


def plan_experts(topk_idx: Tensor, num_experts: int) -> ExpertPlan:
    """Sort (token, slot) pairs by expert; pairs of one expert keep their order.

    Args:
        topk_idx: [T, K] int64.
        num_experts: E, below 2^15.
    """
    flat = topk_idx.reshape(-1)
    # A radix sort of int16 takes a quarter of the passes that int64 takes.
    order = flat.to(torch.int16).argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(
        0, flat, torch.ones_like(flat)
    )
    return ExpertPlan(order // topk_idx.shape[1], order, inverse, counts, counts.cumsum(0).to(torch.int32))


class _Dispatch(torch.autograd.Function):
    """Sorted rows of their tokens. The adjoint sums each token's K rows; an index_add would not be deterministic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: ExpertPlan) -> Tensor:
        ctx.plan = plan
        ctx.tokens = x.shape[0]
        return x.index_select(0, plan.token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_slots(grad, ctx.plan, ctx.tokens), None


class _Combine(torch.autograd.Function):
    """Sum of each token's K sorted rows: the adjoint of `_Dispatch`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, plan: ExpertPlan, tokens: int) -> Tensor:
        ctx.plan = plan
        return _sum_slots(y, plan, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.plan.token), None, None


def _sum_slots(rows: Tensor, plan: ExpertPlan, tokens: int) -> Tensor:
    """Gather and sum in one pass: [N, H] -> [T, H]."""
    return F.embedding_bag(plan.inverse.view(tokens, -1), rows, mode="sum")


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.inverse), None, None


def dispatch(x: Tensor, plan: ExpertPlan) -> Tensor:
    """[T, H] -> [N, H], rows sorted by expert."""
    return _Dispatch.apply(x, plan)  # pyright: ignore[reportReturnType]


def combine(y: Tensor, plan: ExpertPlan, tokens: int) -> Tensor:
    """[N, H] sorted rows -> [T, H] sums over each token's slots."""
    return _Combine.apply(y, plan, tokens)  # pyright: ignore[reportReturnType]


def sort_slots(values: Tensor, plan: ExpertPlan) -> Tensor:
    """[T, K] values of (token, slot) pairs -> [N, 1], sorted by expert."""
    return values.reshape(-1, 1).gather(0, plan.order.unsqueeze(1))


def permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """`rows[order]` of [N, ...], where `inverse` [N] undoes `order` [N]."""
    return _Permute.apply(rows, order, inverse)  # pyright: ignore[reportReturnType]


def grouped_mlp(
    rows: Tensor, experts: Experts, row_weight: Tensor, offsets: Tensor, keys: Tensor | None = None
) -> Tensor:
    """Weighted output of each row's expert. The weight multiplies the hidden layer, which is narrower than the output.

    Args:
        rows: [N, H] float, sorted by expert.
        row_weight: [N, 1] float32.
        offsets: [E] int32 ends of the experts' rows.
        keys: [N, 1] int64, see `moe.dropout`; None: no dropout.

    Returns:
        [N, H] in the dtype of `rows`.
    """
    gate = grouped_projection(rows, experts.gate, offsets, keys)
    hidden = F.silu(gate) * grouped_projection(rows, experts.up, offsets, keys)
    return grouped_projection((hidden * row_weight).to(rows.dtype), experts.down, offsets, keys)


def grouped_experts(
    x: Tensor, experts: Experts, topk_idx: Tensor, topk_weight: Tensor, keys: Tensor | None = None
) -> Tensor:
    """Weighted sum over each token's experts, all experts at once.

    Args:
        x: [T, H] float.
        topk_idx: [T, K] int64. topk_weight: [T, K] float32.
        keys: [T, K] int64, see `moe.dropout`; None: no dropout.

    Returns:
        [T, H] in the dtype of `x`.
    """
    plan = plan_experts(topk_idx, experts.gate.weight.shape[0])
    row_keys = None if keys is None else sort_slots(keys, plan)
    out = grouped_mlp(dispatch(x, plan), experts, sort_slots(topk_weight, plan), plan.offsets, row_keys)
    return combine(out, plan, x.shape[0])
