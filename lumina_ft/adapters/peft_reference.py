"""PEFT's own way to run adapters of routed experts, to compare with.

Its wrappers replace each stacked parameter by a copy with B A folded into it, in every forward pass: all experts of a
layer, however few rows there are. Here adapters run beside the weights (`kernels.moe`), and PEFT's form is what they
are stored in.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lumina_ft.adapters.expert_layout import stack_a, stack_b, unstack_a, unstack_b
from lumina_ft.adapters.live import ADAPTER_NAME
from lumina_ft.models.experts import PROJECTIONS, PackedExperts


class _Block(nn.Module):
    """PEFT replaces children of a module, never the module that it is given."""

    def __init__(self, experts: PackedExperts) -> None:
        super().__init__()
        self.experts = experts


class PeftExperts(NamedTuple):
    """Routed experts under PEFT's wrappers.

    Attributes:
        layer: to call as `PackedExperts`.
        num_experts: E.
        wrappers: PEFT's wrapper of each projection.
    """

    layer: nn.Module
    num_experts: int
    wrappers: dict[str, Any]

    @torch.no_grad()
    def write(self, projection: str, a: Tensor, b: Tensor) -> None:
        """Fill an adapter. a: [E, r, I]. b: [E, O, r]."""
        wrapper = self.wrappers[projection]
        wrapper.lora_A[ADAPTER_NAME].weight.copy_(stack_a(a))
        wrapper.lora_B[ADAPTER_NAME].weight.copy_(stack_b(b))

    def gradients(self, projection: str) -> tuple[Tensor, Tensor]:
        """Gradients of an adapter's A [E, r, I] and B [E, O, r] after a backward pass."""
        wrapper = self.wrappers[projection]
        a, b = wrapper.lora_A[ADAPTER_NAME].weight.grad, wrapper.lora_B[ADAPTER_NAME].weight.grad
        return unstack_a(a, self.num_experts), unstack_b(b, self.num_experts)


def with_peft_adapters(experts: PackedExperts, *, rank: int, scale: float) -> PeftExperts:
    """Wrap a layer without adapters: PEFT's on all its projections, whose values are arbitrary, and frozen weights.

    Args:
        rank: r. scale: factor of B A.
    """
    from peft import LoraConfig, inject_adapter_in_model

    block = _Block(experts)
    config = LoraConfig(
        r=rank,
        lora_alpha=scale * rank,  # pyright: ignore[reportArgumentType]
        target_modules=[],
        target_parameters=[f"experts.{projection}" for projection in PROJECTIONS],
    )
    inject_adapter_in_model(config, block, adapter_name=ADAPTER_NAME)
    wrappers: dict[str, Any] = {}
    inner: Any = block.experts
    while inner is not experts:
        wrappers[inner.parameter_name] = inner
        inner = inner.base_layer
    assert set(wrappers) == set(PROJECTIONS)
    return PeftExperts(block.experts, experts.num_experts, wrappers)
