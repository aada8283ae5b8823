"""`python -m lumina_ft.launch.rank --agent PID --run-dir D --stage I [--resume CHECKPOINT]`: one rank of one stage.

Started by `agent.py` under torchrun's environment variables; the config is the run directory's resolved `run.yaml`.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lumina_ft.config.load import load_run
from lumina_ft.config.schema import RunConfig
from lumina_ft.errors import ConfigError, Interrupted, RunError
from lumina_ft.launch.checks import cpu_cores
from lumina_ft.launch.environment import local_ranks
from lumina_ft.launch.failures import exit_code, write_failure
from lumina_ft.launch.lifeline import die_with_parent
from lumina_ft.launch.run_dir import RUN_FILE
from lumina_ft.launch.signals import listen
from lumina_ft.train.stop import StopRequest


def main(argv: list[str]) -> int:
    """Run the stage; a failure goes to the run directory, where the parent finds it.

    Returns:
        0; 1 (our bug or a failed run) or 2 (an error of the user's); 130 or 143 (stopped by a signal, and saved).
    """
    parser = argparse.ArgumentParser(prog="lumina_ft.launch.rank")
    parser.add_argument("--agent", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--resume", type=Path)
    args = parser.parse_args(argv)
    die_with_parent(args.agent)
    rank = int(os.environ.get("RANK", "0"))

    def end(number: int) -> None:
        write_failure(args.run_dir, rank, Interrupted(number, "no stage was training"), time.time())

    def tell_hang(error: RunError, _: bool) -> None:
        write_failure(args.run_dir, rank, error, time.time())

    stop = StopRequest()
    # The launcher, which passes signals on, kills every rank at the second one.
    listen(stop, ranks_here=local_ranks(), end=end, second_kills=False)
    try:
        cfg = load_run(args.run_dir / RUN_FILE, [])
        execute_stage(cfg, args.stage, resume=args.resume, run_dir=args.run_dir, stop=stop, on_hang=tell_hang)
    except (Exception, Interrupted) as error:
        write_failure(args.run_dir, rank, error, time.time())
        return exit_code(error)
    return 0


def execute_stage(
    cfg: RunConfig,
    stage_index: int,
    *,
    resume: Path | None,
    run_dir: Path,
    stop: StopRequest,
    on_hang: Callable[[RunError, bool], None],
    log_file: Path | None = None,
) -> None:
    """Prepare this process as a rank and train one stage in it.

    Args:
        resume: checkpoint to start from: the end of the previous stage, or one inside this stage.
        stop: set by signals of this process.
        on_hang: see `parallel.watchdog.OnHang`.
        log_file: where log messages go besides stderr; None when a parent process copies stderr.

    Raises:
        LuminaError: the stage failed, out of GPU memory among others.
        Interrupted: a rank was told to stop; what is done is saved.
    """
    _configure_logging(log_file)
    _configure_devices(cfg)
    import torch

    from lumina_ft.train.run import train_stage

    try:
        train_stage(cfg, stage_index, resume=resume, run_dir=run_dir, stop=stop, on_hang=on_hang)
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"rank {os.environ.get('RANK', '0')} — stage {cfg.stages[stage_index].name!r} — "
            f"{' '.join(str(error).split())} — weights, optimizer state and the activations of one pack must fit — "
            "lower data.max_pack_tokens, train fewer groups, or use parallel.zero=zero3 with more GPUs"
        ) from error


def _configure_logging(log_file: Path | None) -> None:
    """Rank 0 informs, the others only warn and say who they are."""
    rank = int(os.environ.get("RANK", "0"))
    logger = logging.getLogger("lumina_ft")
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
    logger.handlers = [logging.StreamHandler(sys.stderr)]
    if log_file is not None:
        logger.handlers.append(logging.FileHandler(log_file, encoding="utf-8"))
    for handler in logger.handlers:
        handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"rank {rank}: %(message)s"))


def _configure_devices(cfg: RunConfig) -> None:
    """Set the CPU threads of this rank, and refuse more ranks than GPUs.

    Raises:
        ConfigError: GPUs are used and this machine shows fewer than the ranks on it.
    """
    import torch

    here = local_ranks()
    on_gpu = os.environ.get("DS_ACCELERATOR") != "cpu" and torch.cuda.is_available()
    if on_gpu and torch.cuda.device_count() < here:
        raise ConfigError(
            f"parallel.ranks — {here} on this machine — it shows {torch.cuda.device_count()} GPUs; each rank "
            "needs its own — lower parallel.ranks, check CUDA_VISIBLE_DEVICES, or set DS_ACCELERATOR=cpu"
        )
    if not on_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it when it is imported
    if cfg.parallel.threads_per_rank:
        torch.set_num_threads(cfg.parallel.threads_per_rank)
    else:
        torch.set_num_threads(max(1, cpu_cores() // here))


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # A rank that failed must not wait in the destructors of a process group whose other ranks are stuck.
    os._exit(status)
