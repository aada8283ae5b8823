"""Process group of a stage: rendezvous, reductions, orderly end. Environment variables are torchrun's."""

import logging
import os
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import (
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    rendezvous,  # pyright: ignore[reportPrivateImportUsage]
)

from lumina_ft.errors import ConfigError

_ENV = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class World:
    """This rank's place among all ranks of the stage."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

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
        self.barrier()
        torch_dist.destroy_process_group()


def init_distributed(stage_key: str, timeout_minutes: float) -> World:
    """Join the ranks of one stage and tell DeepSpeed about them.

    Args:
        stage_key: prefix of every key in the store; a new one per stage keeps successive groups apart in a store that
            outlives them (torchrun's agent).
        timeout_minutes: limit of one collective.

    Raises:
        ConfigError: the environment names some but not all of RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
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
    device = _pick_device(local_rank)
    store = _stage_store(stage_key, timeout) if present else PrefixStore(stage_key, HashStore())
    torch_dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device if device.type == "cuda" and size > 1 else None,
    )
    _init_deepspeed(timeout)
    return World(rank, size, local_rank, device)


def _pick_device(local_rank: int) -> torch.device:
    """The rank's CUDA device, or the CPU (then DeepSpeed must not look for anything else)."""
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _stage_store(stage_key: str, timeout: timedelta) -> Any:
    """Connect to the store that the launcher's agent or rank 0 hosts, under the stage's prefix.

    Where rank 0 hosts it and the ranks live on from stage to stage, a quick rank may reach the server of the stage that
    is just ending. Only this stage's rank 0 sets the key waited for here, and a server that ends drops the connection.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        base, rank, _ = next(iter(rendezvous("env://", timeout=timeout)))
        store = PrefixStore(stage_key, base)
        if rank == 0:
            store.set("open", "1")
            return store
        try:
            store.wait(["open"], timeout)
            return store
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


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
