"""Cross-entropy of a linear layer's outputs by Liger-Kernel, an optional dependency for CUDA.

Its gradients are computed in forward, from logits that are overwritten in place.

Shape legend: m rows, H hidden, V classes.
"""

import importlib.metadata
import re

import torch
from torch import Tensor

from lumina_ft.kernels.cross_entropy.chunked import CHUNK_BYTES
from lumina_ft.kernels.cross_entropy.ref import LinearLoss, all_finite

OLDEST = (0, 8, 5)
"""First version whose chunks can be enlarged: the older ones cut 8192 rows over 157,184 words into pieces of 128, and
read and write the gradient of the weight for each of them."""


def liger_unavailable_reason(device: torch.device) -> str | None:
    """Why Liger can't run here, or None."""
    try:
        version = importlib.metadata.version("liger-kernel")
    except importlib.metadata.PackageNotFoundError:
        return "liger-kernel is not installed"
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < OLDEST:
        return f"liger-kernel {version} is older than {'.'.join(map(str, OLDEST))}"
    if device.type != "cuda":
        return f"liger-kernel needs a CUDA device, this is {device.type}"
    return None


def liger_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> LinearLoss:
    """As `ref.linear_cross_entropy_ref`; the gradient of the weight is summed in float32.

    Args:
        hidden: [m, H] float, m >= 1. weight: [V, H] float. targets: [m] int64 in 0..V-1.
    """
    from liger_kernel.transformers import functional  # pyright: ignore[reportMissingImports]

    classes, hidden_size = weight.shape
    rows = hidden
    if torch.is_grad_enabled() and weight.requires_grad and not hidden.requires_grad:
        # Liger gives the weight no gradient at all, without a word, if the rows need none.
        rows = hidden.detach().requires_grad_()
    total = functional.liger_fused_linear_cross_entropy(
        rows,
        weight,
        targets,
        reduction="sum",
        accum_dtype=torch.float32,
        chunk_mem_const=chunk_factor(hidden.shape[0], hidden_size, classes, weight.dtype.itemsize),
    )
    assert isinstance(total, Tensor)  # it is more than that if told to return accuracies
    # The logits are gone. A NaN or +inf among them shows in the loss; -inf comes from a factor that isn't finite.
    return LinearLoss(total, total.detach().isfinite() & all_finite(hidden) & all_finite(weight))


def chunk_factor(m: int, hidden_size: int, classes: int, itemsize: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Liger's `chunk_mem_const`: the largest whose logits fit into `chunk_bytes`, at least 1.

    Liger cuts m rows into ceil(V / (factor H)) parts and rounds their length up to a power of two.

    Args:
        itemsize: bytes of a logit.
    """
    most = max(1, chunk_bytes // (classes * itemsize))
    parts = -(-m // (1 << most.bit_length() - 1))
    if parts == 1:
        return -(-classes // hidden_size)
    return max(1, (classes - 1) // (parts - 1) // hidden_size)
