"""One rank reads the checkpoints, and all ranks of another launcher learn what it has found.

Each would find the same, but reading hundreds of GB once is enough; and checkpoints that only some can read must not
send the ranks to different places.
"""

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from lumina_ft.errors import RunError
from lumina_ft.launch.resume import ResumePoint

_LONGEST_SEARCH = timedelta(days=2)


def share_point(find: Callable[[], ResumePoint], timeout_minutes: float) -> ResumePoint:
    """The point that rank 0 finds, on every rank; `skipped` stays with rank 0. Before there is a process group.

    Args:
        find: called on rank 0 alone. However long it reads, the others wait: it is alive, or the launcher ends them.
        timeout_minutes: how long the ranks wait for rank 0 to be there, and it for them to have its answer.

    Raises:
        RunError: rank 0 wasn't there in time, or has ended without an answer.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size == 1 or not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        # `init_distributed` says what is missing.
        return find() if rank == 0 else ResumePoint(0, None)
    from lumina_ft.parallel.rendezvous import connect_store

    timeout = timedelta(minutes=timeout_minutes)
    # torchrun's store outlives ranks that it restarts.
    key = f"resume-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store = connect_store(key, rank, size, timeout)
    if rank == 0:
        point = find()
        path = str(point.checkpoint) if point.checkpoint else None
        store.set("point", json.dumps([point.stage_index, path, point.inside_stage]))
        # Where rank 0 hosts the store, it ends with this function.
        store.wait([f"read-{other}" for other in range(1, size)], timeout)
        return point
    try:
        store.wait(["point"], _LONGEST_SEARCH)
    except RuntimeError as error:
        raise RunError(
            f"rank {rank} of {size} — --resume — rank 0 ended before it found where to continue — see what it says"
        ) from error
    stage_index, path, inside = json.loads(store.get("point"))
    store.set(f"read-{rank}", "1")
    return ResumePoint(stage_index, Path(path) if path else None, inside)
