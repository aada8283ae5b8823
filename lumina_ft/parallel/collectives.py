"""Counting the collectives that this rank enters, ours and DeepSpeed's.

The count is what names a missing rank: collectives of one group complete in order, so the rank that has entered fewest
is the one that the others wait for. With NCCL nothing else tells, since its calls return before anything has happened.

Functions of `torch.distributed` are replaced in place. DeepSpeed offers no hook around its communication, and it calls
them by attribute, except two that it looks up once when it is initialised: replace before that. This file is the only
place that does so, and the returned function puts everything back.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as torch_dist
from torch.distributed import distributed_c10d

from lumina_ft.parallel.progress import COLLECTIVES, Progress


def count_collectives(progress: Progress) -> Callable[[], None]:
    """Let every collective and every wait for one that runs say so in `progress`, from now on.

    Returns:
        Undoes it. What was looked up meanwhile goes on counting.
    """
    replaced: list[tuple[Any, str, Any]] = []
    # The package and the module that defines them are looked up both; a call inside another collective isn't counted.
    for owner in (torch_dist, distributed_c10d):
        for number, name in enumerate(COLLECTIVES, 1):
            if hasattr(owner, name):
                real = getattr(owner, name)
                replaced.append((owner, name, real))
                setattr(owner, name, _counted(real, number, progress))
    replaced.append((torch_dist.Work, "wait", torch_dist.Work.wait))
    torch_dist.Work.wait = _noted(torch_dist.Work.wait, progress)

    def undo() -> None:
        for owner, name, real in replaced:
            setattr(owner, name, real)

    return undo


def _counted(real: Callable[..., Any], number: int, progress: Progress) -> Callable[..., Any]:
    @functools.wraps(real)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if progress.inside:
            return real(*args, **kwargs)
        progress.enter_collective(number)
        try:
            return real(*args, **kwargs)
        finally:
            progress.leave()

    return collective


def _noted(real: Callable[..., Any], progress: Progress) -> Callable[..., Any]:
    @functools.wraps(real)
    def wait(*args: Any, **kwargs: Any) -> Any:
        if progress.inside:
            return real(*args, **kwargs)
        progress.enter_wait()
        try:
            return real(*args, **kwargs)
        finally:
            progress.leave()

    return wait
