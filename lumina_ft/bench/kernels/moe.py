"""Routed experts: the fused kernels, grouped products, padded products, a loop over experts, and Liger's kernels.

Shape legend: T tokens, H hidden, I expert width, E experts, K chosen experts per token, N = T * K rows, r rank.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lumina_ft.bench.kernels.contest import Contest, Side, Work
from lumina_ft.kernels import Experts, Lora, Projection, combine, dispatch, plan_experts, sort_slots
from lumina_ft.kernels.launch import unavailable_reason
from lumina_ft.kernels.moe.fused import fused_experts, fused_unsupported_reason
from lumina_ft.kernels.moe.grouped import grouped_experts
from lumina_ft.kernels.moe.products import unsupported_reason
from lumina_ft.kernels.moe.ref import expert_loop

_SCALE = 2.0


class MoESizes(NamedTuple):
    """T, H, I, E, K, r."""

    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int
    rank: int


SIZES = {
    "real": MoESizes(8192, 2048, 512, 256, 8, 16),
    "small": MoESizes(512, 256, 64, 256, 8, 16),
    "tiny": MoESizes(24, 32, 16, 6, 2, 4),
}
CASES = ("frozen", "lora", "full")
"""What is trained: nothing of the experts, adapters on all projections, their weights."""


class Problem:
    """Tensors of one case.

    Attributes:
        x: [T, H]. topk_idx: [T, K] int64. topk_weight: [T, K] float32. upstream: [T, H], gradient sent back.
        weights: gate, up [E, I, H] and down [E, H, I].
        adapters: `gate_a` [E, r, H] and so on; empty without adapters.
    """

    def __init__(self, case: str, sizes: MoESizes, device: torch.device, dtype: torch.dtype) -> None:
        gen = torch.Generator(device=device).manual_seed(0)

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=gen, device=device) * std).to(dtype)

        tokens, hidden, width, experts, top_k, rank = sizes
        shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        self.sizes, self.case, self.dtype = sizes, case, dtype
        self.x = normal(tokens, hidden).requires_grad_()
        self.upstream = normal(tokens, hidden)
        score = torch.rand(tokens, experts, generator=gen, device=device)
        weight, self.topk_idx = score.topk(top_k, dim=-1)
        self.topk_weight = weight.requires_grad_()
        self.weights = {name: normal(experts, o, i, std=i**-0.5) for name, (o, i) in shapes.items()}
        self.adapters: dict[str, Tensor] = {}
        if case == "lora":
            for name, (outputs, inputs) in shapes.items():
                self.adapters[f"{name}_a"] = normal(experts, rank, inputs, std=inputs**-0.5)
                self.adapters[f"{name}_b"] = normal(experts, outputs, rank, std=rank**-0.5 / _SCALE)
        trained = {"frozen": {}, "lora": self.adapters, "full": self.weights}[case]
        for tensor in trained.values():
            tensor.requires_grad_()
        self.inputs = {"x": self.x, "topk_weight": self.topk_weight, **trained}

    def experts(self, convert: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Experts:
        """The weights, each passed through `convert`."""
        parts = []
        for stream, (name, weight) in enumerate(self.weights.items()):
            lora = None
            if self.adapters:
                pair = (convert(self.adapters[f"{name}_{part}"]) for part in "ab")
                lora = Lora(*pair, scale=_SCALE, stream=stream)
            parts.append(Projection(convert(weight), lora))
        return Experts(*parts)

    def reference(self) -> dict[str, Tensor]:
        """By the loop over experts, in float64, or in float32 for bfloat16."""
        exact = torch.float64 if self.dtype == torch.float32 else torch.float32
        copies: dict[int, Tensor] = {}

        def convert(tensor: Tensor) -> Tensor:
            copies[id(tensor)] = copy = tensor.detach().to(exact).requires_grad_(tensor.requires_grad)
            return copy

        experts, x = self.experts(convert), convert(self.x)
        out = expert_loop(x, experts.unbind(), self.topk_idx, convert(self.topk_weight))
        sources = [copies[id(tensor)] for tensor in self.inputs.values()]
        gradients = torch.autograd.grad(out, sources, self.upstream.to(exact))
        want = {"output": out.detach()} | {
            f"grad {name}": gradient for name, gradient in zip(self.inputs, gradients, strict=True)
        }
        if self.case == "full":
            want["grad gate_up"] = torch.cat((want["grad gate"], want["grad up"]), dim=1)
        return want


def contests(sizes: MoESizes, device: torch.device, dtype: torch.dtype) -> Iterator[Contest]:
    """One per case, built when asked for."""
    return (contest(case, sizes, device, dtype) for case in CASES)


def contest(case: str, sizes: MoESizes, device: torch.device, dtype: torch.dtype) -> Contest:
    """Random experts and tokens. `case`: one of CASES."""
    problem = Problem(case, sizes, device, dtype)
    sides, unavailable = _sides(problem, device)
    forward, backward = _work(sizes, case, dtype.itemsize)
    return Contest(
        operation="moe",
        case=case,
        dtype=dtype,
        sizes=sizes._asdict() if case == "lora" else {**sizes._asdict(), "rank": 0},
        inputs=problem.inputs,
        outputs={"output": problem.upstream},
        reference=problem.reference,
        sides=sides,
        unavailable=unavailable,
        forward=forward,
        backward=backward,
    )


def _sides(problem: Problem, device: torch.device) -> tuple[dict[str, Side], dict[str, str]]:
    """Those that can run, and why the others can't."""
    sizes = problem.sizes
    shape = (sizes.hidden, sizes.width, problem.dtype)
    reasons = {
        "triton": unavailable_reason(device, problem.dtype) or fused_unsupported_reason(*shape, sizes.experts),
        "torch": unsupported_reason(*shape),
        "bmm": "no adapters" if problem.adapters else None,
        "eager": None,
        "liger": _liger_reason(problem, device),
    }
    runs: dict[str, Callable[[Problem], Side]] = {
        "triton": lambda p: Side(lambda: (fused_experts(p.x, p.experts(), p.topk_idx, p.topk_weight),)),
        "torch": lambda p: Side(lambda: (grouped_experts(p.x, p.experts(), p.topk_idx, p.topk_weight),)),
        "bmm": lambda p: Side(lambda: (padded_experts(p.x, p.experts(), p.topk_idx, p.topk_weight),)),
        "eager": lambda p: Side(lambda: (expert_loop(p.x, p.experts().unbind(), p.topk_idx, p.topk_weight),)),
        "liger": _liger,
    }
    sides = {name: build(problem) for name, build in runs.items() if reasons[name] is None}
    return sides, {name: reason for name, reason in reasons.items() if reason is not None}


def padded_experts(x: Tensor, experts: Experts, topk_idx: Tensor, topk_weight: Tensor) -> Tensor:
    """Rows of each expert padded to those of the busiest one, and batched products. Reads that number on the host.

    Args and returns as `kernels.ExpertsFunction`, without adapters.
    """
    count = experts.gate.weight.shape[0]
    plan = plan_experts(topk_idx, count)
    room = int(plan.counts.max())
    expert = topk_idx.reshape(-1)[plan.order]
    first = plan.offsets.long() - plan.counts
    slot = expert * room + torch.arange(expert.shape[0], device=x.device) - first[expert]
    rows = x.new_zeros(count * room, x.shape[1]).index_copy(0, slot, dispatch(x, plan)).view(count, room, -1)
    gate, up, down = (part.weight.transpose(1, 2) for part in experts)
    hidden = F.silu(rows @ gate) * (rows @ up)
    weight = topk_weight.new_zeros(count * room, 1).index_copy(0, slot, sort_slots(topk_weight, plan))
    out = (hidden * weight.view(count, room, 1)).to(x.dtype) @ down
    return combine(out.view(count * room, -1).index_select(0, slot), plan, x.shape[0])


def _liger_reason(problem: Problem, device: torch.device) -> str | None:
    if problem.adapters:
        return "no adapters"
    if device.type != "cuda":
        return f"needs a CUDA device, this is {device.type}"
    if not importlib.util.find_spec("liger_kernel") or not importlib.util.find_spec("liger_kernel.ops.fused_moe"):
        return "liger-kernel with a fused MoE is not installed"
    return None


def _liger(problem: Problem) -> Side:
    """Its layout holds gate and up in one tensor."""
    function: Any = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    gate_up = torch.cat((problem.weights["gate"].detach(), problem.weights["up"].detach()), dim=1)
    down, inputs = problem.weights["down"], {"x": problem.x, "topk_weight": problem.topk_weight}
    if problem.case == "full":
        inputs |= {"gate_up": gate_up.requires_grad_(), "down": down}
    index = problem.topk_idx.to(torch.int32)
    return Side(
        lambda: (function.apply(problem.x, gate_up, down, index, problem.topk_weight),), foreign=True, inputs=inputs
    )


def _work(sizes: MoESizes, case: str, itemsize: int) -> tuple[Work, Work]:
    """Of both passes. Each product reads its inputs and writes its outputs once; gathers and sums are part of them."""
    tokens, hidden, width, experts, top_k, rank = sizes
    rows = tokens * top_k
    weights = 3 * experts * width * hidden
    flops = 6.0 * rows * hidden * width
    adapter_flops = 6.0 * rows * rank * (hidden + width) if case == "lora" else 0.0
    forward = weights + 2 * tokens * hidden + rows * (4 * width + 2 * hidden)
    backward = weights + 2 * tokens * hidden + rows * (6 * width + 2 * hidden)
    weight_gradients = weights + 2 * tokens * hidden + rows * 6 * width if case == "full" else 0
    return (
        Work(flops + adapter_flops, forward * itemsize),
        Work((2 if case == "full" else 1) * flops + 2 * adapter_flops, (backward + weight_gradients) * itemsize),
    )
