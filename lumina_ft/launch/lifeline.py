"""Ties the life of a child process to its parent, so that a killed parent leaves no ranks behind."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when process `parent`, which started it, dies. Linux only; else nothing."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)  # it died before the kernel knew
