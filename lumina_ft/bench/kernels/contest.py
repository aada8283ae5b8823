"""One operation at one size, and all who can compute it: checked against a more exact reference, then timed in turn."""

import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lumina_ft.bench.kernels.measure import Ceilings, Meter, Timed, medians, peak_bytes, relative_difference

logger = logging.getLogger(__name__)

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest relative L2 difference of any output and gradient from the reference, by dtype of the inputs."""
PEERS_TOLERANCE = 5.0
"""Factor of it for other projects' code, which may keep gradients in the dtype of the inputs."""

_MIN_ROUNDS = 3
_MAX_ROUNDS = 25

Outputs = tuple[Tensor, ...]


class Work(NamedTuple):
    """What a pass has to do whoever computes it.

    Attributes:
        flops: of useful products. moved_bytes: each tensor that has to be read or written, once.
    """

    flops: float
    moved_bytes: float


class Side(NamedTuple):
    """One implementation.

    Attributes:
        run: forward pass on the contest's tensors.
        prepare: work of once per batch, such as plans, timed apart; called before `run`.
        forward_only: it has no backward pass here.
        foreign: another project's.
        inputs: instead of the contest's, where it stores weights in another way.
    """

    run: Callable[[], Outputs]
    prepare: Callable[[], None] | None = None
    forward_only: bool = False
    foreign: bool = False
    inputs: dict[str, Tensor] | None = None


@dataclass(frozen=True)
class Contest:
    """Attributes:
    operation, case: names.
    sizes: for the report.
    inputs: tensors whose gradients are wanted.
    outputs: names of what sides return, each with the gradient sent back, or None where there is none.
    reference: outputs and gradients, from higher precision where that tells more.
    sides: by name. unavailable: name -> reason.
    forward, backward: the work of each pass.
    """

    operation: str
    case: str
    dtype: torch.dtype
    sizes: dict[str, int]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor | None]
    reference: Callable[[], dict[str, Tensor]]
    sides: dict[str, Side]
    forward: Work
    backward: Work
    unavailable: dict[str, str] = field(default_factory=dict)

    def inputs_of(self, side: Side) -> dict[str, Tensor]:
        """Tensors whose gradients a side computes."""
        return self.inputs if side.inputs is None else side.inputs

    def gradients(self, side: Side, outputs: Outputs) -> Outputs:
        """Of the side's inputs, for the gradients sent back."""
        pairs = [(out, back) for out, back in zip(outputs, self.outputs.values(), strict=True) if back is not None]
        sources = list(self.inputs_of(side).values())
        return torch.autograd.grad([out for out, _ in pairs], sources, [back for _, back in pairs])


def settle(contest: Contest, meter: Meter, seconds: float) -> dict[str, Any]:
    """Check every side, then time those that are right, in turn within each round.

    A side that is wrong or fails is named with what went wrong and not timed; the others go on.

    Args:
        seconds: of timing; at least three rounds are run.

    Returns:
        `operation`, `case`, `dtype`, `sizes`, and `sides`: name -> figures, `{"unavailable": reason}` or
        `{"wrong": reason}`.
    """
    logger.info("bench kernels: %s, %s", contest.operation, contest.case)
    want = contest.reference()
    figures: dict[str, dict[str, Any]] = {name: {"unavailable": why} for name, why in contest.unavailable.items()}
    ready: dict[str, Side] = {}
    for name, side in contest.sides.items():
        try:
            figures[name] = check(contest, side, want)
            if "wrong" not in figures[name]:
                figures[name]["peak_bytes"] = peak_bytes(meter.device, lambda side=side: _both_passes(contest, side))
                ready[name] = side
        except Exception as error:
            # One kernel that doesn't compile here must not cost the figures of all others; the command fails later.
            logger.warning("bench kernels: %s %s: %s", contest.operation, name, traceback.format_exc())
            figures[name] = {"wrong": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    del want
    for name, (times, rounds) in _time(contest, ready, meter, seconds).items():
        figures[name] |= _rates(contest, times, meter.ceilings) | {"rounds": rounds}
    return {
        "operation": contest.operation,
        "case": contest.case,
        "dtype": str(contest.dtype).removeprefix("torch."),
        "sizes": contest.sizes,
        "sides": figures,
    }


def _both_passes(contest: Contest, side: Side) -> Outputs:
    if side.forward_only:
        with torch.no_grad():
            return side.run()
    outputs = side.run()
    return outputs + contest.gradients(side, outputs)


def check(contest: Contest, side: Side, want: dict[str, Tensor]) -> dict[str, Any]:
    """Run a side's passes once and compare; the first run may compile.

    Args:
        want: what `contest.reference` returned.

    Returns:
        `differences`: name -> relative L2; `prepare_ms`, if it prepares; `wrong`, if it is.
    """
    figures: dict[str, Any] = {}
    if side.prepare is not None:
        side.prepare()
        start = time.perf_counter()
        side.prepare()
        figures["prepare_ms"] = 1e3 * (time.perf_counter() - start)
    names = [*contest.outputs, *(() if side.forward_only else (f"grad {name}" for name in contest.inputs_of(side)))]
    got = dict(zip(names, _both_passes(contest, side), strict=True))
    differences = {name: relative_difference(tensor.detach(), want[name]) for name, tensor in got.items()}
    figures["differences"] = differences
    limit = TOLERANCES[contest.dtype] * (PEERS_TOLERANCE if side.foreign else 1.0)
    # Written so that NaN is wrong.
    wrong = [f"{name} differs by {value:.1e}" for name, value in differences.items() if not value <= limit]
    if wrong:
        figures["wrong"] = f"{', '.join(wrong)}; must be <= {limit:.0e}"
    return figures


_Times = dict[str, list[Timed]]


def _time(
    contest: Contest, sides: dict[str, Side], meter: Meter, seconds: float
) -> dict[str, tuple[dict[str, Timed], int]]:
    """Medians of `forward` and `backward` of each side, and the rounds."""
    times: dict[str, _Times] = {name: {"forward": [], "backward": []} for name in sides}
    host: dict[str, Timed] = {name: Timed(0.0, 0.0) for name in sides}
    end = time.monotonic() + seconds
    rounds = 0
    while sides and rounds < _MAX_ROUNDS and (rounds < _MIN_ROUNDS or time.monotonic() < end):
        for name, side in sides.items():
            with torch.set_grad_enabled(not side.forward_only):
                outputs, forward = meter.time(side.run, expected_host_ms=host[name].device)
            times[name]["forward"].append(forward)
            if not side.forward_only:
                _, backward = meter.time(
                    lambda side=side, outputs=outputs: contest.gradients(side, outputs),
                    expected_host_ms=host[name].host,
                )
                times[name]["backward"].append(backward)
                host[name] = Timed(forward.host, backward.host)
            del outputs
        rounds += 1
    return {
        name: ({part: medians(values) for part, values in parts.items() if values}, rounds)
        for name, parts in times.items()
    }


def _rates(contest: Contest, times: dict[str, Timed], ceilings: Ceilings) -> dict[str, float]:
    """Milliseconds, TFLOP/s, GB/s and their shares of the ceilings, by pass."""
    figures: dict[str, float] = {}
    for part, work in (("forward", contest.forward), ("backward", contest.backward)):
        if part not in times:
            continue
        ms = times[part].device
        tflop_s, gb_s = work.flops / ms * 1e-9, work.moved_bytes / ms * 1e-6
        figures |= {
            f"{part}_ms": ms,
            f"{part}_host_ms": times[part].host,
            f"{part}_tflop_s": tflop_s,
            f"{part}_tflop_share": tflop_s / ceilings.tflop_s,
            f"{part}_gb_s": gb_s,
            f"{part}_gb_share": gb_s / ceilings.gb_s,
        }
    return figures
