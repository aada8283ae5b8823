"""Router: everything after the logits in one kernel, or written out.

Shape legend: T tokens, H hidden, E experts, G groups, K chosen experts per token.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lumina_ft.bench.kernels.contest import Contest, Outputs, Side, Work
from lumina_ft.kernels import Routing, route
from lumina_ft.kernels.launch import unavailable_reason
from lumina_ft.kernels.router.fused import fused_route, router_unsupported_reason

_SCALING = 2.5


class RouterSizes(NamedTuple):
    """T, H, E, G, groups that stay, K."""

    tokens: int
    hidden: int
    experts: int
    groups: int
    kept_groups: int
    top_k: int


SIZES = {
    "real": RouterSizes(8192, 2048, 256, 8, 4, 8),
    "small": RouterSizes(2048, 256, 256, 8, 4, 8),
    "tiny": RouterSizes(24, 32, 16, 4, 2, 4),
}


def contests(sizes: RouterSizes, device: torch.device, dtype: torch.dtype) -> Iterator[Contest]:
    """One. The reference is the written-out router: in another precision near ties would choose other experts.

    Args:
        dtype: of the hidden states and the weight; the router computes in float32.
    """
    gen = torch.Generator(device=device).manual_seed(0)
    hidden = torch.randn(sizes.tokens, sizes.hidden, generator=gen, device=device).to(dtype).requires_grad_()
    weight = torch.randn(sizes.experts, sizes.hidden, generator=gen, device=device) * sizes.hidden**-0.5
    weight = weight.to(dtype).requires_grad_()
    bias = 0.1 * torch.randn(sizes.experts, generator=gen, device=device)
    back = {
        "topk_weight": torch.randn(sizes.tokens, sizes.top_k, generator=gen, device=device),
        "logits": torch.randn(sizes.tokens, sizes.experts, generator=gen, device=device),
        "topk_idx": None,
    }

    def routed(function: Callable[..., Routing]) -> Outputs:
        out = function(
            hidden,
            weight,
            bias,
            num_groups=sizes.groups,
            kept_groups=sizes.kept_groups,
            top_k=sizes.top_k,
            scaling=_SCALING,
        )
        return out.topk_weight, out.logits, out.topk_idx

    def reference() -> dict[str, Tensor]:
        outputs = routed(route)
        gradients = torch.autograd.grad(outputs[:2], [hidden, weight], [back["topk_weight"], back["logits"]])
        names = (*back, "grad hidden", "grad weight")
        return {name: x.detach() for name, x in zip(names, (*outputs, *gradients), strict=True)}

    sides = {"torch": Side(lambda: routed(route)), "triton": Side(lambda: routed(fused_route))}
    reason = unavailable_reason(device, torch.float32)
    reason = reason or router_unsupported_reason(sizes.experts)
    unavailable = {}
    if reason is not None:
        unavailable["triton"] = reason
        del sides["triton"]
    products = 2.0 * sizes.tokens * sizes.hidden * sizes.experts
    read = (sizes.tokens + sizes.experts) * sizes.hidden * dtype.itemsize
    logits = 4.0 * sizes.tokens * sizes.experts
    yield Contest(
        operation="router",
        case="with groups",
        dtype=dtype,
        sizes=sizes._asdict(),
        inputs={"hidden": hidden, "weight": weight},
        outputs=back,
        reference=reference,
        sides=sides,
        unavailable=unavailable,
        forward=Work(products, read + logits),
        backward=Work(2 * products, 2 * read + 2 * logits),
    )
