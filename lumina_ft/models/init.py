"""Random initial weights, drawn per tensor from (seed, name): independent of order, ranks and partitioning."""

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor


def initial_value(name: str, shape: torch.Size, *, std: float, seed: int) -> Tensor:
    """Initial value of one parameter.

    Biases and the modulation layers of the codebook head start at zero, norm weights at one, the rest is normal.

    Args:
        name: full parameter name. shape: of the whole parameter.
        std: of the normal distribution.

    Returns:
        float32 on the CPU.
    """
    if name.endswith("bias") or "adaLN_modulation" in name:
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    # One 32-bit hash of both: torch's CPU generator ignores the higher bits of a seed.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(shape, generator=generator) * std


def initial_values(
    shapes: Iterable[tuple[str, torch.Size]], *, std: float, seed: int, pad_row: tuple[str, int] | None
) -> Iterable[tuple[str, Tensor]]:
    """`initial_value` of each parameter; `pad_row` (name, row) is zero, as padding has no meaning to learn."""
    for name, shape in shapes:
        value = initial_value(name, shape, std=std, seed=seed)
        if pad_row is not None and name == pad_row[0]:
            value[pad_row[1]] = 0.0
        yield name, value
