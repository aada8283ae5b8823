"""Cross-entropy of a linear layer over a large vocabulary: in chunks of rows, with Liger, or with all logits at once.

Shape legend: m rows, H hidden, V words.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lumina_ft.bench.kernels.contest import Contest, Side, Work
from lumina_ft.kernels.cross_entropy.chunked import chunked_cross_entropy
from lumina_ft.kernels.cross_entropy.liger import liger_cross_entropy, liger_unavailable_reason
from lumina_ft.kernels.cross_entropy.ref import LinearLoss, linear_cross_entropy_ref


class LossSizes(NamedTuple):
    """m, H, V."""

    rows: int
    hidden: int
    words: int


SIZES = {
    "real": LossSizes(8192, 2048, 157184),
    "small": LossSizes(256, 256, 16384),
    "tiny": LossSizes(24, 32, 300),
}
CASES = ("frozen head", "trained head")


def contests(sizes: LossSizes, device: torch.device, dtype: torch.dtype) -> Iterator[Contest]:
    """One per case, built when asked for."""
    for case in CASES:
        yield _contest(case, sizes, device, dtype)


def _contest(case: str, sizes: LossSizes, device: torch.device, dtype: torch.dtype) -> Contest:
    gen = torch.Generator(device=device).manual_seed(0)
    hidden = torch.randn(sizes.rows, sizes.hidden, generator=gen, device=device).to(dtype).requires_grad_()
    weight = torch.randn(sizes.words, sizes.hidden, generator=gen, device=device) * sizes.hidden**-0.5
    weight = weight.to(dtype).requires_grad_(case == "trained head")
    targets = torch.randint(sizes.words, (sizes.rows,), generator=gen, device=device)
    inputs = {"hidden": hidden, "weight": weight} if weight.requires_grad else {"hidden": hidden}
    back = torch.tensor(1.0 / sizes.rows, device=device)

    def reference() -> dict[str, Tensor]:
        exact = torch.float64 if dtype == torch.float32 else torch.float32
        copies = {"hidden": hidden, "weight": weight}
        copies = {name: x.detach().to(exact).requires_grad_(name in inputs) for name, x in copies.items()}
        total = F.cross_entropy(F.linear(copies["hidden"], copies["weight"]), targets, reduction="sum")
        gradients = torch.autograd.grad(total, [copies[name] for name in inputs], back.to(exact))
        return {"total": total.detach()} | {f"grad {name}": g for name, g in zip(inputs, gradients, strict=True)}

    functions: dict[str, Callable[..., LinearLoss]] = {
        "torch": chunked_cross_entropy,
        "eager": linear_cross_entropy_ref,
        "liger": liger_cross_entropy,
    }
    sides = {name: Side(lambda run=run: (run(hidden, weight, targets).total,)) for name, run in functions.items()}
    unavailable = {}
    reason = liger_unavailable_reason(device)
    if reason is not None:
        unavailable["liger"] = reason
        del sides["liger"]
    product = 2.0 * sizes.rows * sizes.hidden * sizes.words
    read = (sizes.rows + sizes.words) * sizes.hidden * dtype.itemsize
    return Contest(
        operation="cross-entropy",
        case=case,
        dtype=dtype,
        sizes=sizes._asdict(),
        inputs=inputs,
        outputs={"total": back},
        reference=reference,
        sides=sides,
        unavailable=unavailable,
        forward=Work(product, read),
        backward=Work(len(inputs) * product, (1 + len(inputs)) * read),
    )
