"""Attention over the tiles of a plan: operators that torch can trace, checkpoint and differentiate (T6, T7).

Shape legend: T tokens, Hq query heads, Hk key heads, D head dim.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lumina_ft.kernels.attention.tile_plan import TilePlan, padded_dim, variant_of
from lumina_ft.kernels.launch import launch, tile_for

MAX_HEAD_DIM = 128
SUPPORTED_DTYPES = (torch.float32, torch.bfloat16)
LOG2_E = math.log2(math.e)


def tiled_unsupported_reason(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why `tiled_attention` can't run, or None."""
    if dtype not in SUPPORTED_DTYPES:
        return f"attention kernels compute float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        return f"attention kernels serve head dims up to {MAX_HEAD_DIM}, not {head_dim}"
    return None


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, plan: TilePlan) -> Tensor:
    """Attention under a plan. A query without any allowed key, invalid or outside samples gets 0 and gives none.

    Args:
        q: [T, Hq, D]. k, v: [T, Hk, D]; each key head serves Hq / Hk consecutive query heads. Tokens may have any
            stride.

    Returns:
        [T, Hq, D].
    """
    assert q.shape[0] == plan.meta.shape[1] and plan.variant == variant_of(q.dtype, q.shape[2]), (q.shape, plan.variant)
    assert k.dtype == v.dtype == q.dtype, (q.dtype, k.dtype, v.dtype)
    assert q.shape[1] // k.shape[1] % plan.pack == 0, (q.shape, k.shape, plan.pack)
    lists = [x for tiles in (plan.forward, plan.dq, plan.dkv) for x in (tiles.programs, tiles.entries)]
    return _attention(q, k, v, plan.meta, *lists, plan.pack)[0]


def _dense_heads(x: Tensor) -> Tensor:
    """x [T, heads, D] itself if only its token stride is special, else a copy."""
    dense = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if dense else x.contiguous()


def _constants(q: Tensor, k: Tensor) -> dict[str, Any]:
    head_dim = q.shape[2]
    return {
        "HEADS": q.shape[1],
        "KEY_HEADS": k.shape[1],
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim(head_dim),
    }


@torch.library.custom_op("lumina_ft::tiled_attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    meta: Tensor,
    programs: Tensor,
    entries: Tensor,
    dq_programs: Tensor,
    dq_entries: Tensor,
    dkv_programs: Tensor,
    dkv_entries: Tensor,
    pack: int,
) -> tuple[Tensor, Tensor]:
    """(out [T, Hq, D], log-sum-exp [Hq, T] float32); the last four lists wait for backward."""
    from lumina_ft.kernels.attention import kernel

    q, k, v = map(_dense_heads, (q, k, v))
    tokens, heads, head_dim = q.shape
    out = q.new_empty(tokens, heads, head_dim)
    lse = q.new_empty(heads, tokens, dtype=torch.float32)
    variant = variant_of(q.dtype, head_dim)
    tile = tile_for("attention_forward", variant, q.device)
    args = (
        *(q, k, v, out, lse, meta, programs, entries),
        *(q.stride(0), k.stride(0), v.stride(0), tokens, head_dim**-0.5 * LOG2_E),
    )
    grid = (programs.shape[0] * (heads // pack),)
    launch("attention_forward", variant, kernel.forward, grid, tile, args, {**_constants(q, k), "PACK": pack})
    return out, lse


@_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    meta: Tensor,
    programs: Tensor,
    entries: Tensor,
    dq_programs: Tensor,
    dq_entries: Tensor,
    dkv_programs: Tensor,
    dkv_entries: Tensor,
    pack: int,
) -> tuple[Tensor, Tensor]:
    tokens, heads, head_dim = q.shape
    return q.new_empty(tokens, heads, head_dim), q.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("lumina_ft::tiled_attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    meta: Tensor,
    dq_programs: Tensor,
    dq_entries: Tensor,
    dkv_programs: Tensor,
    dkv_entries: Tensor,
    pack: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, dense."""
    from lumina_ft.kernels.attention import kernel

    q, k, v = map(_dense_heads, (q, k, v))
    grad, out = grad.contiguous(), out.contiguous()
    tokens, heads, head_dim = q.shape
    grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
    delta = torch.empty_like(lse)
    variant = variant_of(q.dtype, head_dim)
    constants = _constants(q, k)
    numbers = (q.stride(0), k.stride(0), v.stride(0), tokens, head_dim**-0.5 * LOG2_E, head_dim**-0.5)
    args = (q, k, v, out, grad, lse, grad_q, delta, meta, dq_programs, dq_entries, *numbers)
    grid = (dq_programs.shape[0] * (heads // pack),)
    # First: it leaves the row sums that the second kernel reads.
    tile = tile_for("attention_dq", variant, q.device)
    launch("attention_dq", variant, kernel.query_gradient, grid, tile, args, {**constants, "PACK": pack})
    args = (q, k, v, grad, lse, delta, grad_k, grad_v, meta, dkv_programs, dkv_entries, *numbers)
    grid = (dkv_programs.shape[0] * k.shape[1],)
    tile = tile_for("attention_dkv", variant, q.device)
    launch("attention_dkv", variant, kernel.key_gradients, grid, tile, args, constants)
    return grad_q, grad_k, grad_v


@_attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    meta: Tensor,
    dq_programs: Tensor,
    dq_entries: Tensor,
    dkv_programs: Tensor,
    dkv_entries: Tensor,
    pack: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, meta, _, _, *lists, ctx.pack = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, meta, *lists)


def _gradients(ctx: Any, grad: Tensor | None, grad_lse: None) -> tuple[Tensor | None, ...]:
    grads = (None,) * 3 if grad is None else _attention_backward(grad, *ctx.saved_tensors, ctx.pack)
    return *grads, *(None,) * 8


_attention.register_autograd(_gradients, setup_context=_save_for_backward)
