"""The device of these tests, and what it computes."""

import os
from typing import TypeVar

import torch

Size = TypeVar("Size")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REHEARSED = DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float32,) if REHEARSED else (torch.float32, torch.bfloat16)
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
"""Largest relative L2 difference of a kernel's output or gradient from a more exact reference."""


def on_gpu(size: Size, rehearsed: Size) -> Size:
    """The first on a GPU; interpreted, it would take hours."""
    return rehearsed if REHEARSED else size
