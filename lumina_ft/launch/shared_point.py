"""One rank reads the checkpoints, and all ranks of another launcher learn what it has found.

Each would find the same, but reading hundreds of GB once is enough; and checkpoints that only some can read must not
send the ranks to different places.
"""

import json
import os
from datetime import timedelta
from pathlib import Path

from lumina_ft.launch.resume import ResumePoint


def share_point(point: ResumePoint, timeout_minutes: float) -> ResumePoint:
    """Rank 0's point on every rank; `skipped` stays with rank 0. Before there is a process group.

    Args:
        timeout_minutes: how long rank 0 may take.

    Raises:
        RunError: rank 0 didn't answer in time.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size == 1 or not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        # `init_distributed` says what is missing.
        return point
    from lumina_ft.parallel.rendezvous import connect_store

    timeout = timedelta(minutes=timeout_minutes)
    # torchrun's store outlives ranks that it restarts.
    key = f"resume-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store = connect_store(key, rank, size, timeout)
    if rank == 0:
        path = str(point.checkpoint) if point.checkpoint else None
        store.set("point", json.dumps([point.stage_index, path, point.inside_stage]))
        # Where rank 0 hosts the store, it ends with this function.
        store.wait([f"read-{other}" for other in range(1, size)], timeout)
        return point
    stage_index, path, inside = json.loads(store.get("point"))
    store.set(f"read-{rank}", "1")
    return ResumePoint(stage_index, Path(path) if path else None, inside)
