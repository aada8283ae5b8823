"""Routed experts as grouped products against a loop over per-expert weights: processor time."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lumina_ft.bench.kernels.measure import one_thread
from lumina_ft.errors import RunError
from lumina_ft.kernels.moe.grouped import grouped_experts
from lumina_ft.kernels.moe.ref import expert_loop
from lumina_ft.kernels.moe.weights import Experts, Projection

_AGREEMENT = 1e-4
"""Largest relative L2 difference of outputs and gradients in float32 before timing makes sense."""


def bench_moe(
    *,
    tokens: int = 512,
    hidden: int = 256,
    width: int = 64,
    experts: int = 256,
    top_k: int = 8,
    repeats: int = 11,
    seed: int = 0,
) -> dict[str, Any]:
    """Grouped routed experts against the loop with one parameter per expert, on the CPU in float32.

    One thread and its processor time: on a shared machine, wall time and thread teams measure the other processes. Both
    are timed in turn within each round.

    Args:
        tokens, hidden, width, experts, top_k: sizes; width is that of one expert.
        repeats: timed rounds; medians are reported.

    Returns:
        `forward_ratio`, `backward_ratio` (loop time / grouped time), medians in ms, sizes.

    Raises:
        RunError: the results disagree.
    """
    case = _MoECase.draw(tokens, hidden, width, experts, top_k, seed)
    with one_thread():
        case.check_agreement()
        ms = case.median_ms(repeats)
    return {
        "forward_ratio": ms["loop_forward_ms"] / ms["grouped_forward_ms"],
        "backward_ratio": ms["loop_backward_ms"] / ms["grouped_backward_ms"],
        **ms,
        "tokens": tokens,
        "hidden": hidden,
        "width": width,
        "experts": experts,
        "top_k": top_k,
        "repeats": repeats,
        "threads": 1,
        "clock": "processor time",
    }


@dataclass(frozen=True)
class _MoECase:
    """One problem in both forms.

    Attributes:
        x: [T, H]. topk_idx: [T, K]. topk_weight: [T, K]. upstream: [T, H], gradient sent back.
        packed: gate, up [E, I, H] and down [E, H, I]. single: the same as one leaf tensor per expert.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weight: Tensor
    upstream: Tensor
    packed: list[Tensor]
    single: list[list[Tensor]]

    @classmethod
    def draw(cls, tokens: int, hidden: int, width: int, experts: int, top_k: int, seed: int) -> "_MoECase":
        gen = torch.Generator().manual_seed(seed)
        shapes = ((experts, width, hidden), (experts, width, hidden), (experts, hidden, width))
        packed = [(torch.randn(s, generator=gen) * s[-1] ** -0.5).requires_grad_() for s in shapes]
        topk_weight, topk_idx = torch.rand(tokens, experts, generator=gen).topk(top_k, dim=-1)
        return cls(
            x=torch.randn(tokens, hidden, generator=gen).requires_grad_(),
            topk_idx=topk_idx,
            topk_weight=topk_weight,
            upstream=torch.randn(tokens, hidden, generator=gen),
            packed=packed,
            single=[[w.detach()[e].clone().requires_grad_() for e in range(experts)] for w in packed],
        )

    def loop(self) -> Tensor:
        experts = [Experts(*map(Projection, weights)) for weights in zip(*self.single, strict=True)]
        return expert_loop(self.x, experts, self.topk_idx, self.topk_weight)

    def grouped(self) -> Tensor:
        return grouped_experts(self.x, Experts(*map(Projection, self.packed)), self.topk_idx, self.topk_weight)

    def clear(self) -> None:
        for tensor in (self.x, *self.packed, *(w for weights in self.single for w in weights)):
            tensor.grad = None

    def check_agreement(self) -> None:
        """Compare output and every gradient; also the warm-up of both."""

        def run(call: Callable[[], Tensor]) -> list[Tensor]:
            self.clear()
            out = call()
            out.backward(self.upstream)
            return [out.detach(), _grad(self.x)]

        want = run(self.loop) + [torch.stack([_grad(w) for w in weights]) for weights in self.single]
        got = run(self.grouped) + [_grad(w) for w in self.packed]
        names = ("output", "grad x", "grad gate", "grad up", "grad down")
        for name, a, b in zip(names, got, want, strict=True):
            difference = float((a - b).norm() / b.norm())
            if not difference <= _AGREEMENT:
                raise RunError(
                    f"bench moe: {name} — differs by {difference:.1e} — must be <= {_AGREEMENT} — report this bug"
                )

    def median_ms(self, repeats: int) -> dict[str, float]:
        """Median milliseconds `NAME_forward_ms` and `NAME_backward_ms` of both forms."""
        calls = {"loop": self.loop, "grouped": self.grouped}
        times: dict[str, list[float]] = {f"{name}_{part}_ms": [] for name in calls for part in ("forward", "backward")}
        for _ in range(repeats):
            for name, run in calls.items():
                self.clear()
                start = time.process_time()
                out = run()
                middle = time.process_time()
                out.backward(self.upstream)
                times[f"{name}_backward_ms"].append(1e3 * (time.process_time() - middle))
                times[f"{name}_forward_ms"].append(1e3 * (middle - start))
        return {name: median(values) for name, values in times.items()}


def _grad(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad
