"""Process group of a stage: rendezvous, reductions, orderly end. Environment variables are torchrun's."""

import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import (
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
)

from lumina_ft.errors import ConfigError, RunError
from lumina_ft.parallel.collectives import count_collectives
from lumina_ft.parallel.progress import Progress
from lumina_ft.parallel.rendezvous import RollCall, call_roll, connect_store
from lumina_ft.parallel.watchdog import HANG_DIR, OnHang, Watchdog

_ENV = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

_BACKSTOP = timedelta(minutes=10)

_MAX_PAUSE_SECONDS = 1.0

T = TypeVar("T")


@dataclass
class World:
    """This rank's place among all ranks of the stage.

    Attributes:
        progress: where this rank is; whoever works says so there.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    progress: Progress = field(default_factory=Progress)
    _on_close: list[Callable[[], None]] = field(default_factory=list)

    @property
    def is_main(self) -> bool:
        """Rank 0 writes files and logs."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place. Order of addition is fixed, so repeated runs agree bit for bit."""
        if self.size > 1:
            torch_dist.all_reduce(values, op=torch_dist.ReduceOp.SUM)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Maximum over ranks, in place."""
        if self.size > 1:
            torch_dist.all_reduce(values, op=torch_dist.ReduceOp.MAX)
        return values

    def gather_ints(self, value: int) -> list[int]:
        """Every rank's value, by rank."""
        if self.size == 1:
            return [value]
        mine = torch.tensor([value], dtype=torch.int64, device=self.device)
        out = [torch.empty_like(mine) for _ in range(self.size)]
        torch_dist.all_gather(out, mine)
        return torch.cat(out).tolist()

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's (picklable) value, by rank."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        torch_dist.all_gather_object(out, value)
        return out

    def from_main(self, value: Any) -> Any:
        """Rank 0's (picklable) value on every rank."""
        box = [value]
        if self.size > 1:
            torch_dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            torch_dist.barrier()

    def close(self) -> None:
        """Leave the group together."""
        self.progress.mark("end")
        self.barrier()
        torch_dist.destroy_process_group()
        for undo in self._on_close:
            undo()


def work_apart(world: World, work: Callable[[], T]) -> T:
    """Long local work on every rank, in a thread, while the ranks ask each other whether all are done. Collective.

    A rank that reads or writes for long must not look lost to those that wait for it, and a lost rank must not go
    unnoticed behind it.

    Returns:
        What `work` returns. What it raises is raised when all are done, on its rank alone.
    """
    if world.size == 1:
        return work()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(work)
        pause = 0.002
        while sum(world.gather_ints(int(job.done()))) < world.size:
            if job.done():
                time.sleep(pause)
            else:
                wait([job], timeout=pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)
        return job.result()


def init_distributed(
    stage_key: str,
    timeout_minutes: float,
    *,
    run_dir: Path | None = None,
    on_hang: OnHang | None = None,
) -> World:
    """Join the ranks of one stage and tell DeepSpeed about them.

    Args:
        stage_key: prefix of every key in the store; a new one per stage keeps successive groups apart in a store that
            outlives them (torchrun's agent).
        timeout_minutes: limit of joining, and of a rank without progress, as when a collective doesn't complete.
        run_dir: existing directory that all ranks share. None: hangs aren't diagnosed, and the communication library's
            own timeout ends them.
        on_hang: called in a thread of its own. None: prints the diagnosis.

    Raises:
        ConfigError: the environment names some but not all of RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
        RunError: not all ranks have come in time.
    """
    present = [name for name in _ENV if name in os.environ]
    if present and len(present) < len(_ENV):
        missing = [name for name in _ENV if name not in os.environ]
        raise ConfigError(
            f"environment — {', '.join(present)} set, {', '.join(missing)} not — a rank needs all of "
            f"{', '.join(_ENV)} — start through `lumina-ft sft`, torchrun or deepspeed"
        )
    timeout = timedelta(minutes=timeout_minutes)
    rank, size, local_rank = (int(os.environ.get(name, default)) for name, default in zip(_ENV[:3], "010", strict=True))
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it
    world = World(rank, size, local_rank, _pick_device(local_rank))
    world.progress.stage = stage_key
    store = connect_store(stage_key, rank, size, timeout) if present else PrefixStore(stage_key, HashStore())
    if rank == 0 and run_dir is not None:
        shutil.rmtree(run_dir / HANG_DIR, ignore_errors=True)
    page = world.progress.publish()
    roll = call_roll(store, rank, size, timeout, page=page.fd)
    world._on_close += [page.close, count_collectives(world.progress)]
    backend_timeout = timeout
    if size > 1 and run_dir is not None:
        watchdog = _watch(world, roll, run_dir / HANG_DIR / f"{stage_key}-{roll.token}", timeout, on_hang or _print)
        world._on_close.append(watchdog.stop)
        # A second line only: ranks that the backend ends can't say who is missing. Saves that get on may take longer
        # than the limit, with the other ranks waiting in a collective.
        backend_timeout = 2 * timeout + _BACKSTOP
    world.progress.mark("connect")
    torch_dist.init_process_group(
        backend="nccl" if world.device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=backend_timeout,
        device_id=world.device if world.device.type == "cuda" and size > 1 else None,
    )
    _init_deepspeed(backend_timeout)
    return world


def _watch(world: World, roll: RollCall, folder: Path, timeout: timedelta, on_hang: OnHang) -> Watchdog:
    watchdog = Watchdog(
        world.progress, world.rank, roll.peers, folder, limit_seconds=timeout.total_seconds(), on_hang=on_hang
    )
    watchdog.start()
    return watchdog


def _print(error: RunError, speaks: bool) -> None:
    if not speaks:
        return
    sys.stderr.write(f"{error}\n")
    sys.stderr.flush()


def _pick_device(local_rank: int) -> torch.device:
    """The rank's CUDA device, or the CPU (then DeepSpeed must not look for anything else)."""
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _init_deepspeed(timeout: timedelta) -> None:
    """Hand the process group to DeepSpeed without compiling anything."""
    # DeepSpeed calls collectives under names that torch is renaming; one warning per collective would drown the log.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # Its shared-memory collectives are a C++ extension that is compiled at first use (about a minute).
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Profiler ranges around 2,000 calls a step; without a GPU nothing reads them.
    deepspeed.utils.nvtx.enable_nvtx = torch.cuda.is_available()
    deepspeed.init_distributed(verbose=False, timeout=timeout)
