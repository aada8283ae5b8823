"""`python -m lumina_ft.launch.agent --parent PID --ranks N --port P --run-dir D -- ARGS…`: torchrun for one stage.

The same as `python -m torch.distributed.run --nproc-per-node N --master-port P -m lumina_ft.launch.rank ARGS…`, but a
failed rank doesn't print torchrun's own traceback and report: the rank's error file says what matters, and the death
of a rank by a signal is written down here, since the rank no longer can.
"""

import argparse
import logging
import os
import signal
import sys
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from lumina_ft.errors import RunError
from lumina_ft.launch.failures import EXIT_BUG, write_failure
from lumina_ft.launch.lifeline import die_with_parent


def main(argv: list[str]) -> int:
    """Start the ranks of one stage and wait for them.

    Returns:
        0; 1 when a rank failed or was interrupted: its report says which.
    """
    parser = argparse.ArgumentParser(prog="lumina_ft.launch.agent")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("rank_args", nargs="*")
    args = parser.parse_args(argv)
    # The parent has blocked SIGTERM and SIGINT in this process: it alone decides when the ranks end.
    die_with_parent(args.parent)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    options = ["--nproc-per-node", str(args.ranks), "--master-addr", "127.0.0.1", "--master-port", str(args.port)]
    module = [
        "-m",
        "lumina_ft.launch.rank",
        "--agent",
        str(os.getpid()),
        "--run-dir",
        str(args.run_dir),
        *args.rank_args,
    ]
    try:
        run(parse_args([*options, *module]))
    except ChildFailedError as failed:
        for rank, failure in failed.failures.items():
            if failure.exitcode < 0:
                write_failure(args.run_dir, rank, _killed(rank, -failure.exitcode), time.time())
        return EXIT_BUG
    return 0


def _killed(rank: int, number: int) -> RunError:
    name = signal.Signals(number).name
    reason = "; the kernel does that when memory runs out (see `dmesg`)" if number == signal.SIGKILL else ""
    return RunError(f"rank {rank} — killed by {name}{reason} — resume from the newest checkpoint with --resume")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
