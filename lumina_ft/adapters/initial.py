"""Initial values of a new adapter.

Shape legend: E experts, O outputs, I inputs, r rank.
"""

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lumina_ft.adapters.delta import lora_delta, round_to
from lumina_ft.adapters.live import ADAPTER_NAME, live_pair
from lumina_ft.adapters.targets import Target
from lumina_ft.config.lora_schema import LoraConfig
from lumina_ft.errors import ConfigError
from lumina_ft.parallel.zero3 import gathered, write_tensor


def initialise(
    model: nn.Module,
    targets: tuple[Target, ...],
    cfg: LoraConfig,
    *,
    seed: int,
    dtype: torch.dtype,
    on_layer: Callable[[], object] | None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Give a new adapter its initial values, as `lora.attach_adapter` says.

    Returns:
        See `lora.Adapter.start`.
    """
    start: dict[str, tuple[Tensor, Tensor]] = {}
    for target in targets:
        live = live_pair(model, target)
        # One 32-bit hash of both: torch's CPU generator ignores the higher bits of a seed.
        own_seed = zlib.crc32(f"{seed} lora {target.module}".encode())
        if cfg.init.startswith("pissa"):
            with torch.no_grad(), gathered([live.weight]):
                a, b = _principal_pair(live.weight.detach().to(dtype), target, cfg.init, own_seed)
            start[target.module] = (a.cpu(), b.cpu())
            subtract_start(live.weight, target, start[target.module], dtype)
        else:
            a, b = _zero_update(target, cfg.init, own_seed)
        write_tensor(live.a, a)
        write_tensor(live.b, b)
        if target.use_dora:
            _measure_rows(model.get_submodule(target.module), target, dtype)
        if on_layer is not None:
            on_layer()
    return start


def _zero_update(target: Target, init: str, seed: int) -> tuple[Tensor, Tensor]:
    """A of chance and B of zeros; all experts are drawn, so that an expert's values don't depend on who holds it."""
    stack = (target.num_experts,) if target.num_experts else ()
    generator = torch.Generator().manual_seed(seed)
    shape = (*stack, target.rank, target.in_features)
    if init == "gaussian":
        a = torch.randn(shape, generator=generator) / target.rank
    else:
        # Kaiming-uniform with a = sqrt(5), as nn.Linear and PEFT begin.
        a = (2 * torch.rand(shape, generator=generator) - 1) / target.in_features**0.5
    return a, torch.zeros(*stack, target.out_features, target.rank)


def _measure_rows(layer: Any, target: Target, dtype: torch.dtype) -> None:
    """Initial magnitudes: the norm of each row of W + scale B A, as PEFT's forward computes it.

    Raises:
        ConfigError: a row of zeros, which has no direction: DoRA would divide 0 by 0.
    """
    magnitude = layer.lora_magnitude_vector[ADAPTER_NAME]
    with torch.no_grad(), gathered([layer.base_layer.weight]):
        update = layer.lora_B[ADAPTER_NAME].weight.to(dtype) @ layer.lora_A[ADAPTER_NAME].weight.to(dtype)
        weight = layer.base_layer.weight.detach().to(dtype)
        norms = magnitude.get_weight_norm(weight, update, target.scale)
    if not bool(norms.all()):
        raise ConfigError(
            f"lora.use_dora — {target.module} — has rows of zeros, whose direction DoRA can't train (fresh modulation "
            "layers of the codebook head start so) — take it out of lora.targets, or set use_dora: false"
        )
    write_tensor(magnitude.weight, norms)


def _principal_pair(weight: Tensor, target: Target, init: str, seed: int) -> tuple[Tensor, Tensor]:
    """PiSSA (arXiv:2404.02948): A0 = sqrt(S / scale) V^T, B0 = U sqrt(S / scale) of the r largest singular values.

    Then scale B0 A0 is the best approximation of W that has rank r. Decompositions may differ in their last bits
    between machines. Rank 0's count: the engine gives every rank its adapter and base, and it writes the adapter.

    Args:
        weight: [O, I] in the dtype of the forward pass, which A0 and B0 get too.
    """
    if init == "pissa":
        u, s, vh = torch.linalg.svd(weight.float(), full_matrices=False)
    else:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            u, s, v = torch.svd_lowrank(weight.float(), target.rank, niter=int(init.rpartition("_")[2]))
        vh = v.T
    root = (s[: target.rank] / target.scale).sqrt()
    return (root.unsqueeze(1) * vh[: target.rank]).to(weight.dtype), (u[:, : target.rank] * root).to(weight.dtype)


def subtract_start(weight: Tensor, target: Target, start: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    """Make the base weight the residual W - scale B0 A0, rounded once from float64: the same bits every time."""
    with torch.no_grad(), gathered([weight]):
        whole = weight.detach().to(dtype).double()
        a0, b0 = (tensor.to(whole.device) for tensor in start)
        residual = round_to(whole - lora_delta(a0, b0, target.scale), dtype)
    write_tensor(weight, residual)
