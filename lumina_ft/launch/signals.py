"""SIGTERM and SIGINT of a rank, taken in a thread of their own.

A Python handler would run only when the main thread returns from the collective that it waits in, and wouldn't know who
sent the signal: a launcher that has lost a rank signals the others, too, and they must end rather than wait for it.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from lumina_ft.errors import Interrupted
from lumina_ft.launch.environment import is_main_rank, local_ranks
from lumina_ft.train.stop import StopRequest

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})

REPEAT_SECONDS = 1.0
"""Within this time a further signal is the same wish, told twice: by Slurm to every process and by the parent, say."""

EXIT_LOST_RANK = 1


def listen(stop: StopRequest, *, ranks_here: int, end: Callable[[int], None], second_kills: bool) -> None:
    """Take this process's stop signals from now on. Call it before any library starts threads: they don't block them.

    A signal becomes a request to the training loop; where no loop heeds it, the process ends at once.

    Args:
        ranks_here: ranks that this process's parent has started.
        end: tells the world about a process that ends at once; gets the signal.
        second_kills: a second signal ends the process at once; False if a parent process does that.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    thread = threading.Thread(target=_take_signals, args=(stop, ranks_here, end, second_kills), daemon=True)
    thread.start()


def listen_as_rank(tell: Callable[[Interrupted], None]) -> StopRequest:
    """Take this rank's SIGTERM and SIGINT: a training stage stops after its step and saves, all else ends at once.

    Args:
        tell: says why the run ends; called on rank 0.
    """
    stop = StopRequest()

    def end(number: int) -> None:
        if is_main_rank():
            tell(Interrupted(number, "no stage was training"))

    listen(stop, ranks_here=local_ranks(), end=end, second_kills=True)
    return stop


def _take_signals(stop: StopRequest, ranks_here: int, end: Callable[[int], None], second_kills: bool) -> None:
    asked = 0.0
    while True:
        number, sender = _next_signal()
        if _tells_of_lost_rank(sender, ranks_here):
            os._exit(EXIT_LOST_RANK)
        if stop.number:
            if second_kills and time.monotonic() - asked >= REPEAT_SECONDS:
                os._exit(128 + number)
        elif stop.ask(number):
            asked = time.monotonic()
        else:
            try:
                end(number)
            finally:
                os._exit(128 + number)


def _next_signal() -> tuple[int, int]:
    """(signal, pid of its sender); the sender is 0 where the system doesn't tell."""
    if sys.platform == "linux":
        info = signal.sigwaitinfo(STOP_SIGNALS)
        return info.si_signo, info.si_pid
    return int(signal.sigwait(STOP_SIGNALS)), 0


def _tells_of_lost_rank(sender: int, ranks_here: int) -> bool:
    """Whether the parent has sent this because one of its ranks has ended."""
    # 0 is the kernel or another container, never the parent; a container's first process has 0 as its parent's number.
    if not sender or sender != os.getppid():
        return False
    alive = 0
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(sender).children():
            with suppress(psutil.NoSuchProcess):
                alive += child.status() != psutil.STATUS_ZOMBIE
    return alive < ranks_here
