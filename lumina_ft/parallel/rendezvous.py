"""How the ranks of a stage find each other: the store, and a roll call that names whoever stays away."""

import json
import os
import secrets
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from lumina_ft.errors import RunError

_RETRY_SECONDS = 0.1
_MAX_NAMED = 16


class Peer(NamedTuple):
    """The process that a rank is.

    Attributes:
        page: file descriptor of its page (`page.py`).
        processes: what its process id is unique in: a boot of a machine, and there a container.
    """

    host: str
    pid: int
    page: int = -1
    processes: str = ""

    def __str__(self) -> str:
        return f"{self.host}, pid {self.pid}"


class RollCall(NamedTuple):
    """Who takes part.

    Attributes:
        peers: every rank's process.
        token: a word that all ranks share and no other stage or attempt has.
    """

    peers: list[Peer]
    token: str


def connect_store(stage_key: str, rank: int, size: int, timeout: timedelta) -> Any:
    """Connect to the store that torchrun's agent or rank 0 hosts, under the stage's prefix.

    Where rank 0 hosts it and the ranks live on from stage to stage, a quick rank may reach the server of the stage that
    is just ending. Only this stage's rank 0 sets the key waited for here, and a server that ends drops the connection.

    Raises:
        RunError: there is no answer in time.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        try:
            base = TCPStore(
                host_name=address,
                port=port,
                world_size=size,
                is_master=rank == 0 and not hosted_by_agent,
                timeout=left,
                # The roll call below waits instead: it can say who is missing.
                wait_for_workers=False,
                multi_tenant=True,
            )
            base.set_timeout(timeout)
            store = PrefixStore(stage_key, base)
            if rank == 0:
                store.set("open", "1")
            else:
                store.wait(["open"], left)
            return store
        except RuntimeError as error:
            if time.monotonic() < deadline and rank:
                time.sleep(_RETRY_SECONDS)
                continue
            if rank == 0 and not hosted_by_agent:
                raise  # the port is taken, or the address isn't this machine's
            raise RunError(
                f"rank {rank} of {size} ({_me()}) — {address}:{port} — rank 0 didn't open stage {stage_key!r} there "
                f"within parallel.timeout_minutes={_minutes(timeout)} — look whether rank 0 was started and what it "
                "says, and whether this machine reaches that address"
            ) from error


def call_roll(store: Any, rank: int, size: int, timeout: timedelta, *, page: int = -1) -> RollCall:
    """Wait until every rank has come. Collective.

    Args:
        page: of this rank, see `Peer`.

    Raises:
        RunError: somebody hasn't in time.
    """
    store.set(f"rank-{rank}", json.dumps(_me()._replace(page=page)))
    if rank == 0:
        store.set("token", f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}")
    keys = [f"rank-{r}" for r in range(size)]
    try:
        store.wait([*keys, "token"], timeout)
    except RuntimeError as error:
        missing = [r for r in range(size) if not store.check([keys[r]])]
        if missing:
            raise RunError(_absence(missing, size, timeout)) from error
    *peers, token = store.multi_get([*keys, "token"])
    return RollCall([Peer(*json.loads(peer)) for peer in peers], token.decode())


def _absence(missing: list[int], size: int, timeout: timedelta) -> str:
    more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
    names = ", ".join(map(str, missing[:_MAX_NAMED])) + more
    return (
        f"start — {size - len(missing)} of {size} ranks joined within parallel.timeout_minutes={_minutes(timeout)} — "
        f"missing: rank {names} — look whether they were started and what they say, and whether every machine was "
        "given the same address, port and number of ranks"
    )


def _me() -> Peer:
    processes = ""
    if sys.platform == "linux":
        # Names of hosts repeat among containers.
        processes = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return Peer(socket.gethostname(), os.getpid(), processes=processes)


def _minutes(timeout: timedelta) -> str:
    return f"{timeout.total_seconds() / 60:g}"
