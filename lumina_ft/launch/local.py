"""The parent process of a run on this machine: one torchrun per stage, failures told once, stops explained."""

import os
import shutil
import signal
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from lumina_ft.config.schema import RunConfig, StageConfig
from lumina_ft.errors import CheckpointError, ConfigError, DataError, Interrupted
from lumina_ft.launch.agent_process import AgentProcess
from lumina_ft.launch.checks import check_run, choose_port, cpu_cores, has_gpu
from lumina_ft.launch.failures import explained, read_failures, unreported
from lumina_ft.launch.resume import after_stage
from lumina_ft.launch.run_dir import RUN_FILE, RunLog, forget_unstarted, prepare_run_dir
from lumina_ft.launch.summary import run_summary
from lumina_ft.monitor.progress import FORCE_BAR_ENV, duration

_LAUNCHER_ENV = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def run_local(cfg: RunConfig, *, resume: bool, overwrite: bool) -> dict[str, Any]:
    """Run all stages (or the remaining ones), each in fresh ranks.

    Returns:
        The summary that `--json` prints.

    Raises:
        ConfigError: something is wrong with the config, before anything was written.
        LuminaError: what a rank reported. A user's mistake found before the first step of a new run leaves nothing.
        Interrupted: SIGINT or SIGTERM arrived; the ranks have finished their step, saved and ended, or were killed.
    """
    start = time.monotonic()
    check_run(cfg)
    choose_port(cfg.parallel.master_port)
    point = prepare_run_dir(cfg, resume=resume, overwrite=overwrite)
    try:
        with closing(RunLog(cfg.output_dir)) as log:
            if resume:
                log.line(point.describe())
            for index in range(point.stage_index, len(cfg.stages)):
                _run_stage(cfg, index, point.checkpoint, log)
                point = after_stage(cfg.output_dir, index)
            log.line(f"run complete in {duration(time.monotonic() - start)}: {cfg.output_dir}")
    except (ConfigError, DataError, CheckpointError):
        if not resume:
            forget_unstarted(cfg.output_dir)
        raise
    except Interrupted as stopped:
        again = f"lumina-ft sft --config {cfg.output_dir / RUN_FILE} --resume"
        raise explained(stopped, cfg.output_dir, again) from None
    return run_summary(cfg, seconds=time.monotonic() - start)


def _run_stage(cfg: RunConfig, index: int, checkpoint: Path | None, log: RunLog) -> None:
    stage = cfg.stages[index]
    port = choose_port(cfg.parallel.master_port)
    log.line(f"stage {index + 1}/{len(cfg.stages)} {stage.name}: {describe_stage(stage)}; port {port}")
    command = [sys.executable, "-m", "lumina_ft.launch.agent", f"--parent={os.getpid()}"]
    command += [f"--ranks={cfg.parallel.ranks}", f"--port={port}", f"--run-dir={cfg.output_dir}"]
    command += ["--", f"--stage={index}", *([f"--resume={checkpoint}"] if checkpoint else [])]
    with AgentProcess.started(command, rank_environment(cfg), cfg.parallel.grace_seconds) as agent:
        for chunk in agent.output():
            log.copy(chunk)
            if not chunk:
                log.line(_announcement(agent, cfg.parallel.grace_seconds))
        status = agent.wait()
    told = read_failures(cfg.output_dir)
    failures = [failure for failure in told if not failure.signal]
    stopped = next((failure for failure in told if failure.signal), None)
    on_purpose = bool(agent.signals or stopped)
    for failure in failures:
        if failure.traceback and failure is failures[0] and not on_purpose:
            log.line(f"rank {failure.rank}:\n{failure.traceback}")
        elif failure.traceback:
            log.note(f"rank {failure.rank}, then:\n{failure.traceback}".encode())
    # A rank that a signal ends drags others along, whose tracebacks are no news; an error that a user can fix is.
    if on_purpose and not any(failure.is_user_error for failure in failures):
        number = agent.signals[0] if agent.signals else stopped.signal if stopped else 0
        ended = f"stage {stage.name!r}, complete" if status == 0 else "the ranks ended without a report"
        raise Interrupted(number, stopped.message if stopped else agent.killed_by or ended)
    if failures:
        raise failures[0].to_error()
    if status:
        raise unreported(cfg.output_dir, stage.name, status)


def describe_stage(stage: StageConfig) -> str:
    """What a stage trains and how long, in a few words."""
    length = f"{stage.steps} steps" if stage.steps else f"{stage.epochs:g} epochs"
    frozen = f" without {', '.join(stage.freeze)}" if stage.freeze else ""
    trained = ", ".join(("adapter",) * (stage.lora == "train") + stage.train)
    beside = " over the frozen adapter" if stage.lora == "freeze" else ""
    then = "" if stage.lora_at_end == "keep" else f", then {stage.lora_at_end} the adapter"
    return f"{trained}{frozen}{beside} for {length}{then}"


def rank_environment(cfg: RunConfig) -> dict[str, str]:
    """Environment of the ranks: no trace of another launcher, CPU threads shared out, width of the terminal."""
    env = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_ENV}
    env["PYTHONUNBUFFERED"] = "1"
    if not has_gpu():
        env["DS_ACCELERATOR"] = "cpu"
    # Left unset, torchrun would give each rank one thread, and say so at length.
    threads = cfg.parallel.threads_per_rank or max(1, cpu_cores() // cfg.parallel.ranks)
    env["OMP_NUM_THREADS"] = str(threads)
    if sys.stderr.isatty():
        env[FORCE_BAR_ENV] = str(shutil.get_terminal_size().columns)
    return env


def _announcement(agent: AgentProcess, grace_seconds: float) -> str:
    """What happens because of a signal, told when it arrives."""
    name = signal.Signals(agent.signals[-1]).name
    if agent.killed_by:
        return f"{name}: {agent.killed_by}"
    return f"{name}: the ranks finish their step and save, within {grace_seconds:g} s; a second signal kills them"
