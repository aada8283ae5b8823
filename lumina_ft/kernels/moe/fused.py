"""Routed experts by Triton kernels: custom operators, so that compilation and checkpointing see one operation (M5).

Shape legend: T tokens, H hidden, I expert width, E experts, K chosen experts per token, N = T * K sorted rows, r rank.

Same contracts as `moe.grouped`. Triton is imported when a kernel first runs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lumina_ft.kernels.moe.fused_backward import Needs, backward_pass
from lumina_ft.kernels.moe.fused_forward import ForwardResult, RoutedRows, forward_pass, rank_sizes
from lumina_ft.kernels.moe.grouped import plan_experts
from lumina_ft.kernels.moe.weights import Experts, Lora, Projection

MULTIPLE = 16
"""Sizes are multiples of this: rows are then aligned, and divide into the least that a matrix unit takes."""
MAX_EXPERTS = 512
SUPPORTED_DTYPES = (torch.float32, torch.bfloat16)


def fused_unsupported_reason(hidden: int, width: int, dtype: torch.dtype, experts: int) -> str | None:
    """Why the kernels can't run with these sizes, or None. The rank of a low-rank term is free.

    Args:
        hidden: H. width: I.
        dtype: of the weights.
        experts: held by this rank.
    """
    if dtype not in SUPPORTED_DTYPES:
        return f"the experts' Triton kernels have no {dtype}"
    for name, size in (("hidden_size", hidden), ("moe_intermediate_size", width)):
        if size % MULTIPLE:
            return f"{name}={size} is not a multiple of {MULTIPLE}, as the experts' Triton kernels need"
    if experts > MAX_EXPERTS:
        return f"{experts} experts are more than the {MAX_EXPERTS} of the Triton kernels"
    return None


def fused_experts(
    x: Tensor, experts: Experts, topk_idx: Tensor, topk_weight: Tensor, keys: Tensor | None = None
) -> Tensor:
    """Weighted sum over each token's experts, all experts at once.

    Args:
        x: [T, H] float32 or bfloat16, as the weights are.
        topk_idx: [T, K] int64. topk_weight: [T, K] float32.
        keys: [T, K] int64, see `moe.dropout`; None: no dropout.

    Returns:
        [T, H] in the dtype of `x`.
    """
    plan = plan_experts(topk_idx, experts.gate.weight.shape[0])
    flat_keys = None if keys is None else keys.reshape(-1)
    inverse = plan.inverse.view(topk_idx.shape)
    return _run(x, experts, RoutedRows(plan.offsets, topk_weight.reshape(-1), flat_keys, plan.order, inverse))


def fused_mlp(
    rows: Tensor, experts: Experts, row_weight: Tensor, offsets: Tensor, keys: Tensor | None = None
) -> Tensor:
    """Weighted output of each row's expert.

    Args:
        rows: [N, H] float32 or bfloat16, sorted by expert.
        row_weight: [N, 1] float32.
        offsets: [E] int32 ends of the experts' rows.
        keys: [N, 1] int64, see `moe.dropout`; None: no dropout.

    Returns:
        [N, H] in the dtype of `rows`.
    """
    flat_keys = None if keys is None else keys.reshape(-1)
    return _run(rows, experts, RoutedRows(offsets, row_weight.reshape(-1), flat_keys, None, None))


def _run(x: Tensor, experts: Experts, rows: RoutedRows) -> Tensor:
    loras = [projection.lora for projection in experts]
    pairs = [(None, None) if lora is None else (lora.a, lora.b) for lora in loras]
    if not any(lora is not None and lora.dropout for lora in loras):
        rows = rows._replace(keys=None)
    tensors = (x, rows.weight, *(projection.weight for projection in experts), *(t for pair in pairs for t in pair))
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    out, *_ = torch.ops.lumina_ft.moe_ffn(
        *tensors,
        *(rows.offsets, rows.keys, rows.order, rows.inverse),
        [1.0 if lora is None else lora.scale for lora in loras],
        [0.0 if lora is None else lora.dropout for lora in loras],
        [0 if lora is None else lora.stream for lora in loras],
        save,
    )
    return out


def _experts(
    matrices: Sequence[Tensor],
    pairs: Sequence[Tensor | None],
    scales: Sequence[float],
    dropouts: Sequence[float],
    streams: Sequence[int],
) -> Experts:
    """The operators' flat arguments put together again. pairs: A and B of gate, up and down."""
    parts = []
    for number, weight in enumerate(matrices):
        a, b = pairs[2 * number : 2 * number + 2]
        lora = None
        if a is not None and b is not None:
            lora = Lora(a.contiguous(), b.contiguous(), scales[number], dropouts[number], streams[number])
        parts.append(Projection(weight.contiguous(), lora))
    return Experts(*parts)


@torch.library.custom_op("lumina_ft::moe_ffn", mutates_args=())
def _moe_ffn(
    x: Tensor,
    weight: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_a: Tensor | None,
    gate_b: Tensor | None,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    offsets: Tensor,
    keys: Tensor | None,
    order: Tensor | None,
    inverse: Tensor | None,
    scales: Sequence[float],
    dropouts: Sequence[float],
    streams: Sequence[int],
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`fused_forward.forward_pass` with the fields of its arguments one by one. Returns the fields of its result."""
    pairs = (gate_a, gate_b, up_a, up_b, down_a, down_b)
    experts = _experts((gate, up, down), pairs, scales, dropouts, streams)
    rows = RoutedRows(offsets, weight.contiguous(), keys, order, inverse)
    result = forward_pass(x.contiguous(), rows, experts, save=save)
    return result.out, result.gate, result.up, result.gate_shrunk, result.up_shrunk, result.down_shrunk


@_moe_ffn.register_fake
def _moe_ffn_fake(
    x: Tensor,
    weight: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_a: Tensor | None,
    gate_b: Tensor | None,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    offsets: Tensor,
    keys: Tensor | None,
    order: Tensor | None,
    inverse: Tensor | None,
    scales: Sequence[float],
    dropouts: Sequence[float],
    streams: Sequence[int],
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    count = weight.numel()

    def saved() -> Tensor:
        return x.new_empty(count if save else 0, gate.shape[1])

    def shrunk(a: Tensor | None) -> Tensor:
        return x.new_empty(0) if a is None else x.new_empty(count, rank_sizes(a.shape[1])[0])

    return x.new_empty(x.shape), saved(), saved(), shrunk(gate_a), shrunk(up_a), shrunk(down_a)


@torch.library.custom_op("lumina_ft::moe_ffn_backward", mutates_args=())
def _moe_ffn_backward(
    grad: Tensor,
    saved: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_a: Tensor | None,
    gate_b: Tensor | None,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    offsets: Tensor,
    keys: Tensor | None,
    order: Tensor | None,
    inverse: Tensor | None,
    scales: Sequence[float],
    dropouts: Sequence[float],
    streams: Sequence[int],
    needs: Sequence[bool],
) -> list[Tensor]:
    """`fused_backward.backward_pass`, flat as `moe_ffn` is.

    Args:
        saved: what `moe_ffn` returned but for its output.

    Returns:
        The fields of `Gradients`.
    """
    pairs = (gate_a, gate_b, up_a, up_b, down_a, down_b)
    experts = _experts((gate, up, down), pairs, scales, dropouts, streams)
    rows = RoutedRows(offsets, weight.contiguous(), keys, order, inverse)
    forward = ForwardResult(grad, *saved)
    return list(backward_pass(grad.contiguous(), x.contiguous(), rows, experts, forward, Needs(*needs)))


@_moe_ffn_backward.register_fake
def _moe_ffn_backward_fake(
    grad: Tensor,
    saved: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_a: Tensor | None,
    gate_b: Tensor | None,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    offsets: Tensor,
    keys: Tensor | None,
    order: Tensor | None,
    inverse: Tensor | None,
    scales: Sequence[float],
    dropouts: Sequence[float],
    streams: Sequence[int],
    needs: Sequence[bool],
) -> list[Tensor]:
    of = (x, weight, gate, up, down, gate_a, gate_b, up_a, up_b, down_a, down_b)
    return [
        tensor.new_empty(tensor.shape) if tensor is not None and needed else x.new_empty(0)
        for tensor, needed in zip(of, needs, strict=True)
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # Weights are saved themselves, never views of them: a sharded parameter swaps its storage before backward.
    tensors, settings = inputs[:15], inputs[15:18]
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.settings = settings
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 19
    # Read once: a checkpoint gives each saved tensor out only once.
    kept = ctx.saved_tensors
    tensors, saved = kept[:15], kept[15:]
    needs = [bool(needed) for needed in ctx.needs_input_grad[:11]]
    grads = torch.ops.lumina_ft.moe_ffn_backward(grad, saved, *tensors, *ctx.settings, needs)
    return *(g if needed else None for g, needed in zip(grads, needs, strict=True)), *(None,) * 8


_moe_ffn.register_autograd(_backward, setup_context=_setup_context)
