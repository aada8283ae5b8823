"""One linear layer per expert as a single grouped product, with a low-rank term if it has one.

Shape legend: N rows sorted by expert, E experts, O outputs, I inputs, r rank.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lumina_ft.kernels.moe.dropout import drop_
from lumina_ft.kernels.moe.weights import Projection

ALIGNMENT_BYTES = 16
"""Row strides that `torch._grouped_mm` accepts are multiples of this."""

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Rows of `a` grouped by `offsets`, times one matrix of `b` each; or, for two 2-D tensors, one product a group."""
    if b.shape[0] == 0 or a.shape[0] == 0:
        # Strides of tensors without rows are arbitrary, and the product refuses some.
        return a.new_zeros((0, b.shape[2]) if b.dim() == 3 else (offsets.shape[0], a.shape[0], b.shape[1]))
    return torch._grouped_mm(a, b, offs=offsets)  # pyright: ignore[reportPrivateImportUsage]


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """y[row] = weight[expert of row] @ x[row].

    Args:
        x: [N, I].
        weight: [E, O, I].
        offsets: [E] int32 ends of the experts' rows; an expert may have none and then gets a zero gradient.

    Returns:
        [N, O].
    """
    return _GroupedLinear.apply(x, weight, offsets)  # pyright: ignore[reportReturnType]


def grouped_projection(x: Tensor, projection: Projection, offsets: Tensor, keys: Tensor | None) -> Tensor:
    """`grouped_linear`, plus the projection's low-rank term.

    Args:
        x: [N, I]. offsets: see `grouped_linear`.
        keys: [N, 1] int64, see `moe.dropout`; None: nothing is dropped.

    Returns:
        [N, O].
    """
    lora = projection.lora
    if lora is None:
        return grouped_linear(x, projection.weight, offsets)
    return _AdaptedLinear.apply(  # pyright: ignore[reportReturnType]
        x, projection.weight, lora.a, lora.b, offsets, keys, (lora.scale, lora.dropout, lora.stream)
    )


class _GroupedLinear(torch.autograd.Function):
    """The weight is saved itself, never a transposed view of it: a sharded parameter swaps its storage between forward
    and backward, and a saved view would keep the old one alive.
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


class _AdaptedLinear(torch.autograd.Function):
    """y = W x + s B (A drop(x)), where s includes dropout's factor.

    What backward needs of the low-rank term is A x, of r columns; dropped inputs are found again from the keys.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        a: Tensor,
        b: Tensor,
        offsets: Tensor,
        keys: Tensor | None,
        settings: tuple[float, float, int],
    ) -> Tensor:
        scale, dropout, stream = settings
        if dropout == 0.0:
            keys = None
        ctx.scale = scale if keys is None else scale / (1.0 - dropout)
        ctx.dropout, ctx.stream = dropout, stream
        y = _grouped_mm(x, weight.transpose(1, 2), offsets)
        kept = x if keys is None else drop_(x.clone(), keys, dropout, stream)
        hidden = _grouped_mm(kept, _pad_rank(a, 1).transpose(1, 2), offsets).mul_(ctx.scale)
        y += _grouped_mm(hidden, _pad_rank(b, 2).transpose(1, 2), offsets)
        ctx.save_for_backward(x, weight, a, b, offsets, keys, hidden)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, offsets, keys, hidden = ctx.saved_tensors
        need_x, need_weight, need_a, need_b = ctx.needs_input_grad[:4]
        grad, rank = grad.contiguous(), a.shape[1]
        grad_x = grad_weight = grad_a = grad_b = None
        if need_weight:
            grad_weight = _grouped_mm(grad.t(), x, offsets)
        if need_b:
            grad_b = _grouped_mm(grad.t(), hidden, offsets)[:, :, :rank].contiguous()
        if need_a or need_x:
            grad_hidden = _grouped_mm(grad, _pad_rank(b, 2), offsets).mul_(ctx.scale)
            if need_a:
                kept = x if keys is None else drop_(x.clone(), keys, ctx.dropout, ctx.stream)
                grad_a = _grouped_mm(grad_hidden.t(), kept, offsets)[:, :rank].contiguous()
            if need_x:
                grad_x = _grouped_mm(grad_hidden, _pad_rank(a, 1), offsets)
                if keys is not None:
                    drop_(grad_x, keys, ctx.dropout, ctx.stream)
                grad_x += _grouped_mm(grad, weight, offsets)
        return grad_x, grad_weight, grad_a, grad_b, None, None, None


def _pad_rank(matrix: Tensor, dim: int) -> Tensor:
    """Zeros up to a rank whose rows are aligned; a matrix that needs none is passed on, not copied."""
    missing = -matrix.shape[dim] % (ALIGNMENT_BYTES // matrix.dtype.itemsize)
    if not missing:
        return matrix
    return F.pad(matrix, (0, missing) if dim == 2 else (0, 0, 0, missing))


def unsupported_reason(hidden_size: int, expert_size: int, dtype: torch.dtype) -> str | None:
    """Why the grouped product can't run with these sizes, or None. The rank of a low-rank term is free.

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
