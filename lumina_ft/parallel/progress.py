"""Where this rank is: written by the training code at every turn, read by the watchdog when nothing moves any more.

Entering a module or a collective costs a few assignments, cheap enough for every one of every step; the clock is the
watchdog's.
"""

import json
import sys
import threading
from array import array
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import asdict
from typing import Any, ParamSpec, TypeVar

import psutil
from torch import nn

from lumina_ft.batch import Batch
from lumina_ft.parallel.page import Page, read_page
from lumina_ft.parallel.position import (
    WAIT,
    BatchShape,
    Position,
    describe_batch,
    describe_stack,
    is_communication,
)

P = ParamSpec("P")
R = TypeVar("R")

LOAD = "load"
"""Phase in which weights and optimizer state are read."""

SAVE = "save"
"""Phase in which some ranks may write for long while the others wait for them."""

COLLECTIVES = (
    "_all_gather_base",
    "_reduce_scatter_base",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "new_group",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)
"""Functions of `torch.distributed` that every rank of a group calls together. Point-to-point calls are none of them."""

_NUM_NUMBERS = 4
_MODULE, _COLLECTIVES, _COLLECTIVE, _INSIDE = range(_NUM_NUMBERS)
_IN_COLLECTIVE, _IN_WAIT = 1, 2


class Progress:
    """The position of this rank.

    Every sign of life raises `marks`. One thread writes at a time (the main thread, or autograd's while the main thread
    waits for it); others only read.

    What changes most often are integers in `numbers`: those of a page that other processes on this machine can read
    (`publish`), so that the position of a rank that is stopped or stuck is known to them.
    """

    __slots__ = (
        "stage",
        "steps",
        "step",
        "micro_batch",
        "phase",
        "batch",
        "tasks",
        "marks",
        "thread",
        "module_names",
        "numbers",
        "_page",
    )

    def __init__(self) -> None:
        self.stage = ""
        self.steps = 0
        self.step = 0
        self.micro_batch = 0
        self.phase = "start"
        self.batch: BatchShape | None = None
        self.tasks: tuple[str, ...] = ()
        self.marks = 0
        self.thread = threading.get_ident()
        self.module_names: list[str] = []
        self.numbers: MutableSequence[int] | memoryview = [0] * _NUM_NUMBERS
        self._page: Page | None = None

    @property
    def module(self) -> str:
        """The last one entered."""
        return _name(self.module_names, self.numbers[_MODULE])

    @property
    def collectives(self) -> int:
        """Number of those entered."""
        return self.numbers[_COLLECTIVES]

    @property
    def collective(self) -> str:
        """The last one entered."""
        return _name(COLLECTIVES, self.numbers[_COLLECTIVE])

    @property
    def inside(self) -> str:
        """See `Position`."""
        return _inside(self.numbers)

    def publish(self) -> Page:
        """Let other processes on this machine read the position, until the page is closed. Before `follow`."""
        self._page = Page()
        self._page.numbers[:_NUM_NUMBERS] = memoryview(array("q", self.numbers))
        self.numbers = self._page.numbers
        self._write_page()
        return self._page

    def begin_stage(self, stage: str, steps: int, tasks: tuple[str, ...]) -> None:
        """Name what is going to run.

        Args:
            tasks: names that `Batch.task_ids` counts.
        """
        self.stage, self.steps, self.tasks = stage, steps, tasks
        self._write_page()
        self.marks += 1

    def mark(
        self, phase: str, *, step: int | None = None, micro_batch: int | None = None, batch: Batch | None = None
    ) -> None:
        """Enter a phase, or show life inside it.

        Args:
            step: 1-based; a step begins outside any micro-batch.
            micro_batch: 1-based.
            batch: what the model is about to see, on the CPU.
        """
        self.phase = phase
        if step is not None:
            self.step, self.micro_batch = step, 0
        if micro_batch is not None:
            self.micro_batch = micro_batch
        if batch is not None:
            self.batch = describe_batch(batch, self.tasks)
        self._write_page()
        self.marks += 1

    def marking(self, phase: str, function: Callable[P, R]) -> Callable[P, R]:
        """The function, with a mark after each call."""

        def marked(*args: P.args, **kwargs: P.kwargs) -> R:
            result = function(*args, **kwargs)
            self.mark(phase)
            return result

        return marked

    def follow(self, model: nn.Module) -> Callable[[], None]:
        """Note each module that the model enters, from now on; also when a checkpointed layer is recomputed.

        Returns:
            Undoes it.
        """
        numbers = self.numbers

        def hook(index: int) -> Callable[..., None]:
            def entered(_module: nn.Module, _inputs: Any) -> None:
                numbers[_MODULE] = index
                self.marks += 1

            return entered

        modules = [(name, module) for name, module in model.named_modules() if name]
        self.module_names = [name for name, _ in modules]
        handles = [
            # First in line, before the hook that gathers the module's weights from the other ranks.
            module.register_forward_pre_hook(hook(index), prepend=True)
            for index, (_, module) in enumerate(modules, 1)
        ]

        def undo() -> None:
            for handle in handles:
                handle.remove()

        return undo

    def enter_collective(self, number: int) -> None:
        """Count one, by its 1-based number in `COLLECTIVES`."""
        self.numbers[_COLLECTIVES] += 1
        self.numbers[_COLLECTIVE] = number
        self.numbers[_INSIDE] = _IN_COLLECTIVE
        self.thread = threading.get_ident()
        self.marks += 1

    def enter_wait(self) -> None:
        """Wait for a collective that was entered before."""
        self.numbers[_INSIDE] = _IN_WAIT
        self.thread = threading.get_ident()

    def leave(self) -> None:
        """The collective, or the wait, is over."""
        self.numbers[_INSIDE] = 0
        self.marks += 1

    def position(self, rank: int, idle_seconds: float) -> Position:
        """Where this rank is; for another thread than the one that writes."""
        frames = sys._current_frames()
        frame = frames.get(self.thread) or frames.get(threading.main_thread().ident or 0)
        stack = describe_stack(frame)
        return Position(
            rank=rank,
            **self._slow_part(),
            **_fast_part(self.numbers, self.module_names),
            held_up=bool(self.inside) and bool(stack) and not is_communication(stack[0]),
            marks=self.marks,
            idle_seconds=round(idle_seconds, 1),
            stack=stack,
            state="",
        )

    def neighbour(self, rank: int, pid: int, fd: int) -> Position | None:
        """Where another rank on this machine is, by its page; None if it can't be read.

        Args:
            fd: of the page.
        """
        content = read_page(pid, fd)
        if content is None:
            return None
        try:
            slow = json.loads(content.text)
            state = psutil.Process(pid).status()
        except (ValueError, psutil.Error):
            return None  # it was stopped in the middle of writing, or is gone
        batch = slow.pop("batch")
        return Position(
            rank=rank,
            **slow,
            **_fast_part(content.numbers, self.module_names),
            batch=BatchShape(**batch) if batch else None,
            held_up=False,
            marks=0,
            idle_seconds=0.0,
            stack=[],
            state=str(state),
        )

    def _slow_part(self) -> dict[str, Any]:
        names = ("stage", "steps", "step", "micro_batch", "phase", "batch")
        return {name: getattr(self, name) for name in names}

    def _write_page(self) -> None:
        if self._page is not None:
            batch = asdict(self.batch) if self.batch else None
            self._page.write_text(json.dumps(self._slow_part() | {"batch": batch}))


def _fast_part(numbers: Sequence[int] | memoryview, module_names: Sequence[str]) -> dict[str, Any]:
    return {
        "module": _name(module_names, numbers[_MODULE]),
        "collectives": numbers[_COLLECTIVES],
        "collective": _name(COLLECTIVES, numbers[_COLLECTIVE]),
        "inside": _inside(numbers),
    }


def _name(names: Sequence[str], number: int) -> str:
    """1-based; 0 is no name."""
    return names[number - 1] if 0 < number <= len(names) else ""


def _inside(numbers: Sequence[int] | memoryview) -> str:
    match numbers[_INSIDE]:
        case 0:
            return ""
        case 1:
            return _name(COLLECTIVES, numbers[_COLLECTIVE])
        case _:
            return WAIT
