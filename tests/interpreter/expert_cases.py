"""Inputs of the expert kernels' tests, and both sides of the comparison as functions of named tensors."""

from collections.abc import Callable

import torch
from parity import Inputs, guarded
from torch import Tensor

from lumina_ft.kernels import Experts, Lora, Projection, eager_experts, row_keys
from lumina_ft.kernels.moe.fused import fused_experts, fused_mlp

NAMES = ("gate", "up", "down")
SCALE = 0.7


def expert_inputs(
    *,
    tokens: int = 19,
    hidden: int = 48,
    width: int = 32,
    experts: int = 4,
    top_k: int = 2,
    ranks: tuple[int, int, int] = (0, 0, 0),
    dtype: torch.dtype = torch.float32,
    busy: int | None = None,
) -> Inputs:
    """Random inputs, each lying between NaNs; the last expert has no rows.

    Args:
        ranks: of the adapters of gate, up and down; 0 is none.
        busy: experts that get all rows; None: all but the last.
    """
    gen = torch.Generator().manual_seed(5)

    def normal(*shape: int, factor: float = 1.0) -> Tensor:
        return guarded((torch.randn(*shape, generator=gen) * factor).to(dtype))

    weight, chosen = torch.rand(tokens, experts - 1 if busy is None else busy, generator=gen).topk(top_k, dim=-1)
    inputs: Inputs = {
        "x": normal(tokens, hidden),
        "topk_weight": guarded(weight),
        "topk_idx": chosen,
        "keys": guarded(row_keys(2**61 + 12345, tokens, top_k, torch.device("cpu"))),
    }
    for name, rank in zip(NAMES, ranks, strict=True):
        outputs, features = (hidden, width) if name == "down" else (width, hidden)
        inputs[name] = normal(experts, outputs, features, factor=features**-0.5)
        inputs[f"{name}_a"] = normal(experts, rank, features, factor=features**-0.5) if rank else None
        inputs[f"{name}_b"] = normal(experts, outputs, rank, factor=max(rank, 1) ** -0.5) if rank else None
    return inputs


def floating(inputs: Inputs) -> tuple[str, ...]:
    """Names of everything that can have a gradient."""
    return tuple(name for name, value in inputs.items() if value is not None and value.is_floating_point())


def experts_of(tensors: Inputs, dropout: float) -> Experts:
    """The experts among named tensors."""
    parts = []
    for stream, name in enumerate(NAMES):
        weight, a, b = tensors[name], tensors[f"{name}_a"], tensors[f"{name}_b"]
        assert weight is not None
        parts.append(Projection(weight, None if a is None or b is None else Lora(a, b, SCALE, dropout, stream)))
    return Experts(*parts)


def called(function: Callable[..., Tensor], dropout: float = 0.0) -> Callable[..., Tensor]:
    """`function(x, experts, topk_idx, topk_weight, keys)` of the tensors of `expert_inputs`."""

    def call(**tensors: Tensor | None) -> Tensor:
        names = ("topk_idx", "topk_weight", "keys")
        return function(tensors["x"], experts_of(tensors, dropout), *(tensors[name] for name in names))

    return call


def kernel(dropout: float = 0.0) -> Callable[..., Tensor]:
    """The Triton kernels."""
    return called(fused_experts, dropout)


def reference(dropout: float = 0.0) -> Callable[..., Tensor]:
    """One expert at a time."""
    return called(eager_experts, dropout)


def sorted_rows(dropout: float = 0.0) -> Callable[..., Tensor]:
    """The Triton kernels on rows that are sorted by expert already, as they arrive from other ranks; one slot."""

    def call(x: Tensor, experts: Experts, topk_idx: Tensor, topk_weight: Tensor, keys: Tensor | None) -> Tensor:
        held = experts.gate.weight.shape[0]
        offsets = torch.bincount(topk_idx.view(-1), minlength=held).cumsum(0).to(torch.int32)
        return fused_mlp(x, experts, topk_weight.view(-1, 1), offsets, None if keys is None else keys.view(-1, 1))

    return called(call, dropout)
