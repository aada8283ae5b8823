"""The router with everything after its matrix product in one Triton kernel, forward and backward.

Shape legend: T tokens, H hidden, E experts, K chosen experts per token, G expert groups.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lumina_ft.kernels.launch import launch, tile_for
from lumina_ft.kernels.router.ref import Routing

MAX_EXPERTS = 512
"""The scores of a token stay in registers."""


def router_unsupported_reason(num_experts: int) -> str | None:
    """Why the kernel can't route to this many experts, or None."""
    return None if num_experts <= MAX_EXPERTS else f"num_experts={num_experts} exceeds {MAX_EXPERTS}"


def fused_route(
    hidden: Tensor,
    weight: Tensor,
    expert_bias: Tensor | None,
    *,
    num_groups: int,
    kept_groups: int,
    top_k: int,
    scaling: float,
) -> Routing:
    """As `ref.route`. Of equal scores the lowest index wins; a NaN is chosen first and makes the weights NaN.

    Args:
        hidden: [T, H] float. weight: [E, H] float.
        expert_bias: [E] float32, added for the selection only.
        num_groups: G. kept_groups: that stay eligible. top_k: K.
        scaling: factor on the normalised weights.
    """
    logits = F.linear(hidden.float(), weight.float())
    topk_weight, topk_idx = _route_experts(logits, expert_bias, num_groups, kept_groups, top_k, scaling)
    return Routing(topk_idx, topk_weight, logits)


@torch.library.custom_op("lumina_ft::route_experts", mutates_args=())
def _route_experts(
    logits: Tensor, expert_bias: Tensor | None, num_groups: int, kept_groups: int, top_k: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """logits: [T, E] float32. Returns topk_weight [T, K] float32 and topk_idx [T, K] int64."""
    from lumina_ft.kernels.router.kernel import route_kernel

    tokens, experts = logits.shape
    logits = logits.contiguous()
    index = logits.new_empty((tokens, top_k), dtype=torch.int64)
    weight = logits.new_empty((tokens, top_k))
    tile = tile_for("route", "float32", logits.device)
    launch(
        "route",
        "float32",
        route_kernel,
        (-(-tokens // tile.blocks["BLOCK_M"]),),
        tile,
        (logits, expert_bias, index, weight, tokens, scaling),
        {
            "HAS_BIAS": expert_bias is not None,
            "GROUPS": num_groups,
            "SIZE": experts // num_groups,
            "KEPT": kept_groups,
            "TOP_K": top_k,
            "PADDED_GROUPS": _power_of_two(num_groups),
            "PADDED_SIZE": _power_of_two(experts // num_groups),
            "PADDED_K": _power_of_two(top_k),
        },
    )
    return weight, index


@_route_experts.register_fake
def _(
    logits: Tensor, expert_bias: Tensor | None, num_groups: int, kept_groups: int, top_k: int, scaling: float
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op("lumina_ft::route_experts_backward", mutates_args=())
def _route_experts_backward(grad: Tensor, logits: Tensor, index: Tensor, scaling: float) -> Tensor:
    """grad: [T, K] float32 of the weights. Returns the gradient of the logits, [T, E]."""
    from lumina_ft.kernels.router.kernel import route_backward_kernel

    tokens, top_k = index.shape
    logits = logits.contiguous()
    out = torch.zeros_like(logits)
    tile = tile_for("route_backward", "float32", logits.device)
    launch(
        "route_backward",
        "float32",
        route_backward_kernel,
        (-(-tokens // tile.blocks["BLOCK_M"]),),
        tile,
        (grad.contiguous(), logits, index, out, tokens, scaling),
        {"EXPERTS": logits.shape[1], "TOP_K": top_k, "PADDED_K": _power_of_two(top_k)},
    )
    return out


@_route_experts_backward.register_fake
def _(grad: Tensor, logits: Tensor, index: Tensor, scaling: float) -> Tensor:
    return logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.scaling = inputs[5]


def _backward(ctx: Any, grad: Tensor, _index: None) -> tuple[Tensor | None, ...]:
    logits, index = ctx.saved_tensors
    return _route_experts_backward(grad, logits, index, ctx.scaling), None, None, None, None, None


_route_experts.register_autograd(_backward, setup_context=_save)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
