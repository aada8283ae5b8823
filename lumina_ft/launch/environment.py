"""What the environment variables of a launcher say about this process, and how one of its ranks behaves at its end.

No heavy imports here: `signals.py` must come before them.
"""

import os
import sys
import time

_SPEAK_AFTER_SECONDS = 5.0


def is_foreign() -> bool:
    """Whether another launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_main_rank() -> bool:
    """Rank 0, or a process that isn't a rank."""
    return os.environ.get("RANK", "0") == "0"


def local_ranks() -> int:
    """Ranks on this machine: torchrun says LOCAL_WORLD_SIZE, deepspeed LOCAL_SIZE."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")
    return next((int(os.environ[name]) for name in names if name in os.environ), 1)


def wait_for_main_rank() -> None:
    """Let rank 0 speak first about an error that every rank has met: its exit makes the launcher end the others."""
    if is_foreign() and not is_main_rank():
        let_another_rank_speak()


def let_another_rank_speak(turns: int = 1) -> None:
    """Give it the time; usually the launcher ends this process meanwhile.

    Args:
        turns: how many ranks in a row may do the same.
    """
    time.sleep(turns * _SPEAK_AFTER_SECONDS)


def end_rank(code: int) -> None:
    """End a rank of another launcher at once; does nothing in any other process.

    A failed rank must not wait in the destructors of a process group whose other ranks are stuck in a collective.
    """
    if is_foreign():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
