"""Balancing by the routers' selection bias (M4): experts with little load get chosen more easily, busy ones less."""

import torch
from torch import Tensor, nn

from lumina_ft.models.moe import Router


def selection_biases(model: nn.Module) -> list[Tensor]:
    """The `expert_bias` [E] fp32 of each MoE layer, in the order of the layers. Asked for anew in every step: a module
    that moves or is cast gets a new tensor."""
    return [module.expert_bias for module in model.modules() if isinstance(module, Router)]


@torch.no_grad()
def shift_biases(biases: list[Tensor], counts: Tensor, rate: float) -> None:
    """bias += rate * sign(mean load - load), in place.

    Loads are compared as integers, so ranks that pass equal counts end up with equal bits.

    Args:
        biases: [E] fp32 of each of L layers.
        counts: [L, E] int64 slots of valid tokens routed to each expert in one optimizer step, over all ranks.
        rate: bias that a step adds or takes.
    """
    directions = (counts.sum(dim=1, keepdim=True) - counts.shape[1] * counts).sign()
    for bias, direction in zip(biases, directions, strict=True):
        bias.add_(direction.to(bias), alpha=rate)


def largest_bias(biases: list[Tensor]) -> float:
    """Largest magnitude of any expert's bias."""
    return max((float(bias.abs().max()) for bias in biases), default=0.0)
