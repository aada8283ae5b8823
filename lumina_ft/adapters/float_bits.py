"""Floats as numpy sees them: exact float64 values, bit patterns, and rounding from the definition of a format.

Verification recomputes merges with this and nothing of `delta.py`, so that a mistake there can't hide here.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bits = NDArray[Any]
Doubles = NDArray[np.float64]

_BFLOAT16_PRECISION = 8
_BFLOAT16_LOWEST_EXPONENT = -133
"""Of the last bit of the smallest numbers."""

_BIT_TYPES = {torch.bfloat16: np.uint16, torch.float16: np.uint16, torch.float32: np.uint32, torch.float64: np.uint64}
_EXPONENT_BITS = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}


def bits_of(x: Tensor) -> Bits:
    """The bit patterns of a contiguous float tensor, as a view."""
    return x.detach().view(torch.uint8).numpy().reshape(-1).view(_BIT_TYPES[x.dtype]).reshape(x.shape)


def values_of(x: Tensor) -> Doubles:
    """The values of a contiguous float tensor in float64, exactly."""
    bits = bits_of(x)
    if x.dtype == torch.bfloat16:
        # bfloat16 is the upper half of a float32.
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    formats = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}
    return bits.view(formats[x.dtype]).astype(np.float64)


def rounded_bits(x: Doubles, dtype: torch.dtype) -> Bits:
    """Bit patterns of float64 values rounded to `dtype`: to nearest, ties to even, overflow to infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == torch.float64:
            return x.view(np.uint64)
        if dtype == torch.float32:
            return x.astype(np.float32).view(np.uint32)
        if dtype == torch.float16:
            # numpy converts in one rounding, without a stop at float32.
            return x.astype(np.float16).view(np.uint16)
        assert dtype == torch.bfloat16, dtype
        # x = m * 2^e with 0.5 <= |m| < 1: the last of 8 significant bits is worth 2^(e - 8).
        last = np.maximum(np.frexp(x)[1] - _BFLOAT16_PRECISION, _BFLOAT16_LOWEST_EXPONENT)
        exact = np.ldexp(np.rint(np.ldexp(x, -last)), last).astype(np.float32)
        return (exact.view(np.uint32) >> 16).astype(np.uint16)


def values_of_bits(bits: Bits, dtype: torch.dtype) -> Doubles:
    """Values of bit patterns in float64."""
    if dtype == torch.bfloat16:
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    formats = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}
    return bits.view(formats[dtype]).astype(np.float64)


def all_finite(x: Tensor) -> bool:
    """Whether no entry is infinite or NaN: none has all exponent bits set."""
    mask = _BIT_TYPES[x.dtype](_EXPONENT_BITS[x.dtype])
    return x.numel() == 0 or bool(np.bitwise_and(bits_of(x), mask).max() != mask)


def converted_bits(x: Tensor, dtype: torch.dtype) -> Bits:
    """Bit patterns of a tensor after a conversion to `dtype`."""
    if x.dtype == dtype:
        return bits_of(x)
    if (x.dtype, dtype) == (torch.bfloat16, torch.float32):
        return np.left_shift(bits_of(x), 16, dtype=np.uint32)
    return rounded_bits(values_of(x), dtype)
