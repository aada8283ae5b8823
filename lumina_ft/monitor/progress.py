"""Progress of a stage on stderr: a live bar on a terminal, a plain line now and then otherwise."""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

FORCE_BAR_ENV = "LUMINA_FT_PROGRESS_WIDTH"
"""Set by a parent that pipes stderr through to a terminal: the width of that terminal in columns."""

_PLAIN_INTERVAL_SECONDS = 10.0
_SPEED_WINDOW_STEPS = 50


class StageProgress:
    """Shows step, loss, lr, tokens/s and remaining time of one stage.

    Args:
        stage: name of the stage.
        total_steps: optimizer steps of the whole stage.
        first_step: steps already done by an earlier, interrupted run.
    """

    def __init__(self, stage: str, total_steps: int, first_step: int = 0) -> None:
        self._stage = stage
        self._total = total_steps
        self._times: deque[tuple[int, float]] = deque([(first_step, time.monotonic())], maxlen=_SPEED_WINDOW_STEPS)
        self._last_line = float("-inf")
        self._shown: dict[str, float] = {}
        self._bar: Progress | None = None
        width = os.environ.get(FORCE_BAR_ENV)
        if width or sys.stderr.isatty():
            console = Console(stderr=True, force_terminal=True, width=int(width) if width else None)
            columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[text]}"), console=console, transient=False)
            self._task = self._bar.add_task(stage, total=total_steps, completed=first_step, text="")
            self._bar.start()

    def update(self, step: int, values: dict[str, float]) -> None:
        """Show the state after `step`: loss, eval_loss, lr, tokens_per_second, each as it was last given."""
        now = time.monotonic()
        self._times.append((step, now))
        self._shown |= values
        text = " ".join([*describe(self._shown), f"eta {self._eta(step)}"])
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=text)
        elif step >= self._total or now - self._last_line >= _PLAIN_INTERVAL_SECONDS:
            self._last_line = now
            sys.stderr.write(f"{self._stage} {step}/{self._total} {text}\n")
            sys.stderr.flush()

    def close(self) -> None:
        """Leave the bar on the screen as it stands."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _eta(self, step: int) -> str:
        first_step, first_time = self._times[0]
        if step <= first_step:
            return "-:--"
        seconds = (self._times[-1][1] - first_time) / (step - first_step) * max(0, self._total - step)
        return duration(seconds)


def describe(values: dict[str, float]) -> list[str]:
    """The values worth a place on the line, as short text."""
    parts: list[str] = []
    for name in ("loss", "eval_loss"):
        if name in values:
            parts.append(f"{name} {values[name]:.4f}")
    if "lr" in values:
        parts.append(f"lr {values['lr']:.1e}")
    if "tokens_per_second" in values:
        parts.append(f"{values['tokens_per_second']:,.0f} tokens/s")
    return parts


def duration(seconds: float) -> str:
    """`h:mm:ss`, or `m:ss` under an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def counted(what: str, *, quiet_seconds: float = 0.0) -> Iterator[Callable[[int, int], None]]:
    """Progress of a count on stderr; yields the function to call with (done, total).

    On a terminal a bar, otherwise a plain line every 10 seconds.

    Args:
        quiet_seconds: nothing is shown before; what is done by then isn't worth a bar.
    """
    start = last_line = time.monotonic()
    if sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        bar = Progress(*columns, console=Console(stderr=True))
        task = bar.add_task(what, total=None)

        def draw(done: int, total: int) -> None:
            if not bar.live.is_started and time.monotonic() - start >= quiet_seconds:
                bar.start()
            bar.update(task, completed=done, total=total)

        if not quiet_seconds:
            bar.start()
        try:
            yield draw
        finally:
            if bar.live.is_started:
                bar.stop()
        return

    def plain(done: int, total: int) -> None:
        nonlocal last_line
        if time.monotonic() - last_line >= _PLAIN_INTERVAL_SECONDS:
            last_line = time.monotonic()
            sys.stderr.write(f"{done}/{total} {what}\n")
            sys.stderr.flush()

    yield plain
