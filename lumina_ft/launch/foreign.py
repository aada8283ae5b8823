"""A run whose ranks were started by someone else: `torchrun cli.py sft …`, `deepspeed cli.py sft …`.

The launcher starts each rank once, but a stage needs fresh processes: a ZeRO-3 engine that is rebuilt in one process
leaks. So each rank replaces itself (exec) with the same command for the next stage. The process group of each stage
uses its own prefix in the launcher's store.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from lumina_ft.config.load import load_run
from lumina_ft.config.schema import RunConfig
from lumina_ft.errors import ConfigError, Interrupted, LuminaError, RunError
from lumina_ft.launch.checks import check_run
from lumina_ft.launch.environment import end_rank, is_main_rank, let_another_rank_speak
from lumina_ft.launch.expert_checks import SIZE_KEY, sizes_text
from lumina_ft.launch.failures import EXIT_BUG, explained, read_failures, write_failure
from lumina_ft.launch.rank import execute_stage
from lumina_ft.launch.resume import ResumePoint, after_stage
from lumina_ft.launch.run_dir import LOG_FILE, RUN_FILE, prepare_run_dir
from lumina_ft.launch.shared_point import share_point
from lumina_ft.launch.summary import run_summary
from lumina_ft.train.stop import StopRequest

STAGE_ENV = "LUMINA_FT_FOREIGN_STAGE"
"""Set by a rank for its next incarnation: index of the stage to run; the run directory is ready by then."""

START_ENV = "LUMINA_FT_FOREIGN_START"
"""Set with it: when the first stage started, in unix seconds."""


def with_world_size(cfg: RunConfig) -> RunConfig:
    """The config with `parallel.ranks` as the launcher set it.

    Raises:
        ConfigError: the config asks for another number outright, or the number doesn't fit the config.
    """
    size = int(os.environ["WORLD_SIZE"])
    if "ranks" in cfg.parallel.model_fields_set and cfg.parallel.ranks != size:
        raise ConfigError(
            f"parallel.ranks — {cfg.parallel.ranks} — the launcher started {size} ranks — "
            "leave parallel.ranks out, or make them agree"
        )
    if cfg.train.packs_per_step % size:
        raise ConfigError(
            f"train.packs_per_step — {cfg.train.packs_per_step} — must be a multiple of the launcher's {size} ranks — "
            f"use {-(-cfg.train.packs_per_step // size) * size}"
        )
    shared = cfg.parallel.expert_parallel_size
    if size % shared:
        raise ConfigError(
            f"{SIZE_KEY} — {shared} — must divide the launcher's {size} ranks — use {sizes_text(size)}, or other ranks"
        )
    return cfg.model_copy(update={"parallel": cfg.parallel.model_copy(update={"ranks": size})})


def run_foreign(
    cfg: RunConfig,
    *,
    resume: bool,
    overwrite: bool,
    tell: Callable[[RunError], None],
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Run one stage in this process, then become the next one; the last stage returns.

    Args:
        tell: says why the run ends where that can't be raised, because this process hangs.
        stop: set by signals of this process, from `listen_as_rank`; None: nobody asks the training loop to stop.

    Returns:
        The summary that `--json` prints.

    Raises:
        LuminaError: the config or the stage failed. Every rank raises; see `wait_for_main_rank`.
        Interrupted: a rank was told to stop; what is done is saved. Every rank raises.
    """

    def tell_hang(error: RunError, speaks: bool) -> None:
        if speaks:
            tell(error)
        else:
            let_another_rank_speak()

    start = float(os.environ.setdefault(START_ENV, str(time.time())))
    if STAGE_ENV in os.environ:
        # The user may have edited the config file since the run began.
        cfg = with_world_size(load_run(cfg.output_dir / RUN_FILE, []))
        point = after_stage(cfg.output_dir, int(os.environ[STAGE_ENV]) - 1)
    else:
        cfg = with_world_size(cfg)
        point = _first_point(cfg, resume=resume, overwrite=overwrite)
    if point.stage_index < len(cfg.stages):
        _train(cfg, point, stop or StopRequest(), tell_hang)
        if point.stage_index + 1 < len(cfg.stages):
            _become_stage(point.stage_index + 1)
    return run_summary(cfg, seconds=time.time() - start)


def _train(cfg: RunConfig, point: ResumePoint, stop: StopRequest, on_hang: Callable[[RunError, bool], None]) -> None:
    run_dir, rank = cfg.output_dir, int(os.environ.get("RANK", "0"))
    # The launcher owns our output, so rank 0 keeps its own log.
    log_file = run_dir / LOG_FILE if is_main_rank() else None
    try:
        execute_stage(
            cfg,
            point.stage_index,
            resume=point.checkpoint,
            run_dir=run_dir,
            stop=stop,
            on_hang=on_hang,
            log_file=log_file,
        )
    except Interrupted as stopped:
        raise explained(stopped, run_dir, "the same command and --resume") from None
    except Exception as error:
        if not isinstance(error, LuminaError) and any(told.rank != rank for told in read_failures(run_dir)):
            # A consequence. The rank that reported the cause will tell it, after it has waited for us to.
            let_another_rank_speak(2)
            end_rank(EXIT_BUG)
        write_failure(run_dir, rank, error, time.time())
        raise


def _first_point(cfg: RunConfig, *, resume: bool, overwrite: bool) -> ResumePoint:
    check_run(cfg)
    if resume:
        return share_point(lambda: _find_point(cfg), cfg.parallel.timeout_minutes)
    # The others meet rank 0 in the process group, which it joins only when the directory is ready, or not at all.
    return prepare_run_dir(cfg, resume=False, overwrite=overwrite) if is_main_rank() else ResumePoint(0, None)


def _find_point(cfg: RunConfig) -> ResumePoint:
    """Where the run continues, said on stderr and in the log."""
    point = prepare_run_dir(cfg, resume=True, overwrite=False)
    sys.stderr.write(f"{point.describe()}\n")
    with (cfg.output_dir / LOG_FILE).open("a", encoding="utf-8") as log:
        log.write(f"{point.describe()}\n")
    return point


def _become_stage(index: int) -> NoReturn:
    """Replace this process by the same command for stage `index`; pid, pipes and environment stay."""
    os.environ[STAGE_ENV] = str(index)
    sys.stdout.flush()
    sys.stderr.flush()
    # Sockets and devices of libraries would otherwise live on in the new process, a listening port among them. They are
    # closed by the exec itself: threads of those libraries still use them.
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):
                os.set_inheritable(int(name), False)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
