"""Ties the life of a child process to its parent, so that a killed parent leaves no ranks behind."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals) -> None:
    """Ask the kernel to send `number` to this process when its parent dies. Linux only; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
