"""Clocks, ceilings and peak memory of one device."""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

Result = TypeVar("Result")

_QUEUE_MARGIN = 1.5
_MAX_QUEUE_MS = 40.0
"""Longest product that is put before a timed call; launches that take longer on the host show as time of the device."""


class Ceilings(NamedTuple):
    """What the device reaches here, in this process.

    Attributes:
        tflop_s: of a large matrix product in the dtype of the bench.
        gb_s: of a copy, counting bytes read and written.
    """

    tflop_s: float
    gb_s: float


class Timed(NamedTuple):
    """Milliseconds of one call.

    Attributes:
        device: on the CPU, processor time of this process; on a GPU, from its first to its last operation there.
        host: on a GPU, wall time until the call returned, which is what its launches cost. Equal to `device` on a CPU.
    """

    device: float
    host: float


class Meter:
    """Times calls on one device.

    On a GPU a matrix product runs before each timed call: it is long enough for all launches to wait behind it, so the
    host's speed doesn't count, and it empties the caches.

    Attributes:
        ceilings: see `Ceilings`.

    Args:
        device: its kind decides the clock.
        dtype: of the matrix product behind `ceilings`.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"
        size = 8192 if self._on_gpu else 1024
        self._factors = torch.randn(2, size, size, device=device).to(dtype)
        self._product_ms = 0.0
        self.ceilings = self._measure_ceilings()

    def _measure_ceilings(self) -> Ceilings:
        a, b = self._factors
        out = torch.empty_like(a)
        source = torch.randn((2**31 if self._on_gpu else 2**28) // 4, device=self.device)
        target = torch.empty_like(source)
        self._product_ms = self._best_ms(lambda: torch.mm(a, b, out=out))
        copy_ms = self._best_ms(lambda: target.copy_(source))
        return Ceilings(
            tflop_s=2 * a.shape[0] ** 3 / self._product_ms * 1e-9,
            gb_s=2 * source.numel() * source.itemsize / copy_ms * 1e-6,
        )

    def _best_ms(self, call: Callable[[], object]) -> float:
        call()
        return min(self.time(call)[1].device for _ in range(5))

    def time(self, call: Callable[[], Result], *, expected_host_ms: float = 0.0) -> tuple[Result, Timed]:
        """Run once. The result, and what it took.

        Args:
            expected_host_ms: of an earlier run; on a GPU, launches of about this length stay hidden.
        """
        if not self._on_gpu:
            start = time.process_time()
            result = call()
            ms = 1e3 * (time.process_time() - start)
            return result, Timed(ms, ms)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        self._occupy(expected_host_ms)
        begin.record()
        start = time.perf_counter()
        result = call()
        host_ms = 1e3 * (time.perf_counter() - start)
        end.record()
        torch.cuda.synchronize(self.device)
        return result, Timed(begin.elapsed_time(end), host_ms)

    def _occupy(self, host_ms: float) -> None:
        if not self._product_ms:
            return
        a, b = self._factors
        for _ in range(math.ceil(min(_QUEUE_MARGIN * host_ms, _MAX_QUEUE_MS) / self._product_ms) + 1):
            torch.mm(a, b)


def peak_bytes(device: torch.device, call: Callable[[], object]) -> int:
    """The most memory that a call allocates on the device and holds at once, above what was there before."""
    if device.type != "cuda":
        return _peak_cpu_bytes(call)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_cpu_bytes(call: Callable[[], object]) -> int:
    """From the profiler's record of torch's allocator, which other processes and the heap's habits don't touch."""
    # Above every level: the profiler announces each start and stop on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        call()
    assert recorded.profiler is not None
    results: Any = recorded.profiler.kineto_results
    changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


@contextmanager
def one_thread() -> Iterator[None]:
    """Processor time on one thread: on a shared machine, wall time and thread teams measure the other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def medians(times: list[Timed]) -> Timed:
    """Median of each clock."""
    return Timed(*(median(column) for column in zip(*times, strict=True)))


def relative_difference(got: Tensor, want: Tensor) -> float:
    """Relative L2 in float64; integers count as different entries' share. NaN if anything is NaN."""
    if not want.is_floating_point():
        return float((got != want).double().mean())
    # One norm of a difference at a time: weight gradients are as large as the weights.
    norm = float(want.double().norm())
    difference = float((got.double() - want.double()).norm())
    return difference / norm if norm else difference
