"""Starting ranks for tests: gloo processes under the environment variables that torchrun sets."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def launch_ranks(
    script: str, *args: object, ranks: int = 2, ok: bool = True, timeout: float = 400
) -> subprocess.CompletedProcess[str]:
    """Run a script of this folder in every rank and wait.

    Args:
        ok: fail, showing what the ranks printed, unless all of them succeed.
        timeout: seconds that a rank may take.
    """
    port = free_port()
    processes = []
    for rank in range(ranks):
        env = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
        }
        command = [sys.executable, str(HERE / "run_rank.py"), str(HERE / script), *map(str, args)]
        processes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    status = max(abs(process.returncode) for process in processes)
    text = "\n".join(f"[rank {rank}]\n{output}" for rank, output in enumerate(outputs))
    assert not ok or status == 0, text
    return subprocess.CompletedProcess(script, status, stdout=text)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
