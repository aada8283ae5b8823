"""Adapters of routed experts beside the weights, against PEFT's, which are folded into them: time and memory."""

import logging
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lumina_ft.adapters.peft_reference import with_peft_adapters
from lumina_ft.errors import RunError
from lumina_ft.models.experts import PROJECTIONS, PackedExperts
from lumina_ft.models.u2_config import U2Config, kernels_for
from lumina_ft.parallel.memory import anonymous_bytes, peak_anonymous_bytes

logger = logging.getLogger(__name__)

_AGREEMENT = 2e-2
"""Largest relative L2 difference of output and gradients: both sides round to bfloat16, in different places."""
_SCALE = 2.0


@dataclass(frozen=True)
class LoraCase:
    """Sizes of one layer of routed experts with an adapter on each projection.

    Attributes:
        tokens, hidden, width, experts, top_k: width is that of one expert; tokens * top_k rows go through experts.
        rank: r.
        seed: of all values.
    """

    tokens: int = 256
    hidden: int = 2048
    width: int = 512
    experts: int = 256
    top_k: int = 8
    rank: int = 16
    seed: int = 0


class Cost(NamedTuple):
    """What one side takes.

    Attributes:
        forward_ms, backward_ms: processor time on one thread, medians.
        weights_bytes: anonymous memory of the process before the first forward pass.
        peak_bytes: the most that it ever had.
    """

    forward_ms: float
    backward_ms: float
    weights_bytes: int
    peak_bytes: int


def bench_lora(case: LoraCase, *, repeats: int = 5) -> dict[str, Any]:
    """Forward and backward pass of one layer in bfloat16 with frozen experts, on this CPU.

    Each side runs in a process of its own, one after the other, on one thread whose processor time counts.

    Args:
        repeats: timed passes of each side, after one that is checked; medians are reported.

    Returns:
        `time_ratio`, `forward_ratio`, `backward_ratio`, `memory_ratio` (peaks) and `pass_memory_ratio` (peaks above the
        weights), all PEFT / grouped; figures of both sides in ms and GiB; sizes.

    Raises:
        RunError: the results disagree, or a process ended, as it does when memory runs out.
    """
    with TemporaryDirectory() as folder:
        files = {side: Path(folder) / f"{side}.safetensors" for side in _SIDES}
        grouped, peft = (_in_process(side, case, repeats, files[side]) for side in _SIDES)
        check_agreement(files["grouped"], files["peft"])
    figures = {
        f"{side}_{name}": value for side, cost in (("grouped", grouped), ("peft", peft)) for name, value in _shown(cost)
    }
    return {
        "time_ratio": (peft.forward_ms + peft.backward_ms) / (grouped.forward_ms + grouped.backward_ms),
        "forward_ratio": peft.forward_ms / grouped.forward_ms,
        "backward_ratio": peft.backward_ms / grouped.backward_ms,
        "memory_ratio": peft.peak_bytes / grouped.peak_bytes,
        "pass_memory_ratio": (peft.peak_bytes - peft.weights_bytes) / (grouped.peak_bytes - grouped.weights_bytes),
        **figures,
        "rows": case.tokens * case.top_k,
        **asdict(case),
        "repeats": repeats,
        "dtype": "bfloat16",
        "threads": 1,
        "clock": "processor time",
    }


def _shown(cost: Cost) -> Iterator[tuple[str, float]]:
    yield from (("forward_ms", cost.forward_ms), ("backward_ms", cost.backward_ms))
    yield from (("weights_gib", cost.weights_bytes / 2**30), ("peak_gib", cost.peak_bytes / 2**30))


def check_agreement(got: Path, want: Path) -> None:
    """Compare the tensors of two files, relative L2 of each.

    Raises:
        RunError: one differs.
    """
    with safe_open(got, "pt") as ours, safe_open(want, "pt") as theirs:
        assert set(ours.keys()) == set(theirs.keys())
        for name in ours.keys():
            reference = theirs.get_tensor(name).float()
            difference = float((ours.get_tensor(name).float() - reference).norm() / reference.norm())
            if not difference <= _AGREEMENT:
                raise RunError(
                    f"bench lora: {name} — differs by {difference:.1e} — must be <= {_AGREEMENT} — report this bug"
                )


def _in_process(side: str, case: LoraCase, repeats: int, file: Path) -> Cost:
    logger.info("bench lora: %s", side)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(measure, side, case, repeats, file).result()
        except BrokenProcessPool:
            weights = 6 * case.experts * case.width * case.hidden / 2**30
            raise RunError(
                f"bench lora: the process with adapters of {side} — ended — probably by the system, for memory: the "
                f"weights are {weights:.1f} GiB, and a pass takes up to twice that beside them — lower --experts"
            ) from None


def measure(side: str, case: LoraCase, repeats: int, file: Path) -> Cost:
    """Run one side in this process, which must be a fresh one: its peak of memory counts.

    Args:
        side: key of `_SIDES`.
        file: to write output and gradients of the first pass to.
    """
    torch.set_num_threads(1)
    layer = _layer(case)
    gen = torch.Generator().manual_seed(case.seed + 1)
    run, gradients = _SIDES[side](layer, case, gen)
    topk_weight, topk_idx = torch.rand(case.tokens, case.experts, generator=gen).topk(case.top_k, dim=-1)
    x, upstream = torch.randn(2, case.tokens, case.hidden, generator=gen).bfloat16()
    x = x.clone().requires_grad_()
    before = anonymous_bytes()
    times: list[tuple[float, float]] = []
    for _ in range(repeats + 1):
        start = time.process_time()
        out = run(x, topk_idx, topk_weight)
        middle = time.process_time()
        out.backward(upstream)
        times.append((middle - start, time.process_time() - middle))
        if len(times) == 1:
            peak = peak_anonymous_bytes()
            assert x.grad is not None
            save_file({"output": out.detach(), "grad x": x.grad, **gradients()}, file)
        x.grad = None
        layer.zero_grad()
        del out
    forward, backward = (1e3 * median(column) for column in zip(*times[1:], strict=True))
    return Cost(forward, backward, before, peak)


def _layer(case: LoraCase) -> PackedExperts:
    """Frozen experts without adapters."""
    config = U2Config(
        hidden_size=case.hidden,
        moe_intermediate_size=case.width,
        num_experts=case.experts,
        num_experts_per_tok=case.top_k,
        n_group=1,
        topk_group=1,
        # No attention here, but its sizes must go with any hidden size.
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    with torch.device("meta"):
        layer = PackedExperts(config, kernels_for(config, "torch"), None)
    layer = layer.to(torch.bfloat16).to_empty(device="cpu").requires_grad_(False)
    gen = torch.Generator().manual_seed(case.seed)
    for weight in layer.parameters():
        weight.normal_(std=weight.shape[-1] ** -0.5, generator=gen)
    return layer


def _pairs(layer: PackedExperts, case: LoraCase, gen: torch.Generator) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Adapter of each projection, whose term is about as large as the projection itself."""
    for projection in PROJECTIONS:
        outputs, inputs = layer.features(projection)
        a = torch.randn(case.experts, case.rank, inputs, generator=gen) * inputs**-0.5
        b = torch.randn(case.experts, outputs, case.rank, generator=gen) * case.rank**-0.5 / _SCALE
        yield projection, a.bfloat16(), b.bfloat16()


Gradients = Callable[[], dict[str, Tensor]]


def _grouped_side(
    layer: PackedExperts, case: LoraCase, gen: torch.Generator
) -> tuple[Callable[..., Tensor], Gradients]:
    params: dict[str, Tensor] = {}
    for projection, a, b in _pairs(layer, case, gen):
        layer.add_lora(projection, rank=case.rank, scale=_SCALE, dropout=0.0)
        for part, value in (("A", a), ("B", b)):
            params[f"grad {projection} {part}"] = param = layer.get_parameter(f"{projection}_lora_{part}")
            param.data.copy_(value)
    return layer, lambda: {name: _grad(param) for name, param in params.items()}


def _peft_side(layer: PackedExperts, case: LoraCase, gen: torch.Generator) -> tuple[Callable[..., Tensor], Gradients]:
    wrapped = with_peft_adapters(layer, rank=case.rank, scale=_SCALE)
    for projection, a, b in _pairs(layer, case, gen):
        wrapped.write(projection, a, b)

    def gradients() -> dict[str, Tensor]:
        found = ((projection, zip("AB", wrapped.gradients(projection), strict=True)) for projection in PROJECTIONS)
        return {f"grad {name} {part}": grad.contiguous() for name, parts in found for part, grad in parts}

    return wrapped.layer, gradients


_SIDES: dict[str, Callable[..., tuple[Callable[..., Tensor], Gradients]]] = {
    "grouped": _grouped_side,
    "peft": _peft_side,
}


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad
