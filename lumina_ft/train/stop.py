"""A rank's wish to stop: set by a signal at any moment, heeded by the training loop between steps. No torch here."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_INTERRUPT_WEIGHT = 1 << 32
"""Votes are summed over the ranks; SIGTERM weighs 1, so that a sum tells both signals apart."""


class StopRequest:
    """Whether this rank was told to stop.

    Attributes:
        number: the first signal that asked; 0 while none has.
    """

    def __init__(self) -> None:
        self.number = 0
        self._heeded = False
        self._lock = threading.Lock()

    def ask(self, number: int) -> bool:
        """Ask to stop, from any thread.

        Returns:
            False if nobody heeds the request: then nothing would be lost by ending the process at once.
        """
        with self._lock:
            if self._heeded and not self.number:
                self.number = number
            return self._heeded

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Promise to look at `number` while and after the block runs."""
        self._heeded = True
        try:
            yield
        finally:
            with self._lock:
                self._heeded = False

    @property
    def vote(self) -> int:
        """This rank's share of a sum over all ranks, which `agreed` reads; 0: go on."""
        return {0: 0, signal.SIGINT: _INTERRUPT_WEIGHT}.get(self.number, 1)


def agreed(votes: int) -> int:
    """The signal to stop for, from the sum of all ranks' votes; 0: go on. Every rank gets the same answer."""
    if votes % _INTERRUPT_WEIGHT:
        return int(signal.SIGTERM)
    return int(signal.SIGINT) if votes else 0
