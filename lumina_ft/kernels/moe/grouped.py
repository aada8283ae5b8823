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

ALIGNMENT_BYTES = 16
"""Row strides that `torch._grouped_mm` accepts are multiples of this."""


SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Rows of `a` grouped by `offsets`, times one matrix of `b` each; or, for two 2-D tensors, one product a group."""
    return torch._grouped_mm(a, b, offs=offsets)  # pyright: ignore[reportPrivateImportUsage]


class ExpertPlan(NamedTuple):
    """Where each (token, slot) pair goes when rows are sorted by expert.

    Attributes:
        token: [N] int64, token of each sorted row.
        order: [N] int64, flat (token, slot) index of each sorted row.
        inverse: [N] int64, sorted row of each flat (token, slot) index.
        offsets: [E] int32, end of each expert's rows.
    """

    token: Tensor
    order: Tensor
    inverse: Tensor
    offsets: Tensor


def plan_experts(topk_idx: Tensor, num_experts: int) -> ExpertPlan:
    """Sort (token, slot) pairs by expert; pairs of one expert keep their order.

    Args:
        topk_idx: [T, K] int64.
        num_experts: E.
    """
    flat = topk_idx.reshape(-1)
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(
        0, flat, torch.ones_like(flat)
    )
    return ExpertPlan(order // topk_idx.shape[1], order, inverse, counts.cumsum(0).to(torch.int32))


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


class _GroupedLinear(torch.autograd.Function):
    """y[row] = weight[expert of row] @ x[row].

    The weight is saved itself, never a transposed view of it: a sharded parameter swaps its storage between forward and
    backward, and a saved view would keep the old one alive.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        return _grouped_mm(x, weight.transpose(1, 2), offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, offsets = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = _grouped_mm(grad, weight, offsets) if ctx.needs_input_grad[0] else None
        grad_weight = _grouped_mm(grad.t(), x, offsets) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def dispatch(x: Tensor, plan: ExpertPlan) -> Tensor:
    """[T, H] -> [N, H], rows sorted by expert."""
    return _Dispatch.apply(x, plan)  # pyright: ignore[reportReturnType]


def combine(y: Tensor, plan: ExpertPlan, tokens: int) -> Tensor:
    """[N, H] sorted rows -> [T, H] sums over each token's slots."""
    return _Combine.apply(y, plan, tokens)  # pyright: ignore[reportReturnType]


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """One linear layer per expert.

    Args:
        x: [N, in] rows sorted by expert.
        weight: [E, out, in].
        offsets: [E] int32 ends of the experts' rows; an expert may have none and then gets a zero gradient.

    Returns:
        [N, out].
    """
    return _GroupedLinear.apply(x, weight, offsets)  # pyright: ignore[reportReturnType]


def grouped_experts(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, topk_idx: Tensor, topk_weight: Tensor) -> Tensor:
    """Weighted sum over each token's experts, all experts at once.

    The routing weight multiplies the hidden layer, which is narrower than the output.

    Args:
        x: [T, H] float. gate, up: [E, I, H]. down: [E, H, I].
        topk_idx: [T, K] int64. topk_weight: [T, K] float32.

    Returns:
        [T, H] in the dtype of `x`.
    """
    plan = plan_experts(topk_idx, gate.shape[0])
    rows = dispatch(x, plan)
    hidden = F.silu(grouped_linear(rows, gate, plan.offsets)) * grouped_linear(rows, up, plan.offsets)
    row_weight = topk_weight.reshape(-1, 1).gather(0, plan.order.unsqueeze(1))
    out = grouped_linear((hidden * row_weight).to(x.dtype), down, plan.offsets)
    return combine(out, plan, x.shape[0])


def unsupported_reason(hidden_size: int, expert_size: int, dtype: torch.dtype) -> str | None:
    """Why the grouped product can't run with these sizes, or None.

    Args:
        hidden_size: H. expert_size: I.
        dtype: of the weights.
    """
    if not hasattr(torch, "_grouped_mm"):
        return f"torch {torch.__version__} has no grouped matrix product"
    if dtype not in SUPPORTED_DTYPES:
        return f"the grouped matrix product has no {dtype}"
    per_row = ALIGNMENT_BYTES // dtype.itemsize
    for name, size in (("hidden_size", hidden_size), ("moe_intermediate_size", expert_size)):
        if size % per_row:
            return f"{name}={size} is not a multiple of {per_row}, as {dtype} rows need"
    return None
