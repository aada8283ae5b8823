"""Where an attached adapter's parameters are in the model.

Shape legend: E experts, O outputs, I inputs, r rank.
"""

from typing import Any, NamedTuple

from torch import nn
from torch.nn import Parameter

from lumina_ft.adapters.targets import Target

ADAPTER_NAME = "default"
"""PEFT's name of the one adapter of a model; not part of keys in files."""


class LivePair(NamedTuple):
    """Parameters of one target, which may be partitioned or spread over ranks; their whole shapes are

    a [r, I], b [O, r] and, for DoRA, magnitude [O]; of routed experts a [E, r, I], b [E, O, r].
    """

    weight: Parameter
    a: Parameter
    b: Parameter
    magnitude: Parameter | None


def live_pair(model: nn.Module, target: Target) -> LivePair:
    """The adapted weight and the adapter's parameters on it."""
    if target.num_experts:
        block, _, projection = target.module.rpartition(".")
        experts: Any = model.get_submodule(block)
        a, b = (getattr(experts, f"{projection}_lora_{part}") for part in "AB")
        return LivePair(getattr(experts, projection), a, b, None)
    layer: Any = model.get_submodule(target.module)
    magnitude = layer.lora_magnitude_vector[ADAPTER_NAME].weight if target.use_dora else None
    a, b = layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight
    return LivePair(layer.base_layer.weight, a, b, magnitude)
