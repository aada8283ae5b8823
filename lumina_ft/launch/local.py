"""The parent process of a run on this machine: one torchrun per stage, signals passed on, failures told once."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil

from lumina_ft.config.schema import RunConfig, StageConfig
from lumina_ft.errors import CheckpointError, ConfigError, DataError, Interrupted, RunError
from lumina_ft.launch.checks import check_run, choose_port, cpu_cores, has_gpu
from lumina_ft.launch.failures import read_failures
from lumina_ft.launch.resume import after_stage
from lumina_ft.launch.run_dir import LOG_FILE, RUN_FILE, RunLog, forget_unstarted, prepare_run_dir
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
        Interrupted: SIGINT or SIGTERM arrived; the ranks have ended.
    """
    start = time.monotonic()
    check_run(cfg)
    choose_port(cfg.parallel.master_port)
    point = prepare_run_dir(cfg, resume=resume, overwrite=overwrite)
    try:
        with closing(RunLog(cfg.output_dir)) as log:
            if resume:
                log.line(f"resuming from {point.checkpoint or 'the start: no complete checkpoint'}")
            for index in range(point.stage_index, len(cfg.stages)):
                _run_stage(cfg, index, point.checkpoint, log)
                point = after_stage(cfg.output_dir, index)
            log.line(f"run complete in {duration(time.monotonic() - start)}: {cfg.output_dir}")
    except (ConfigError, DataError, CheckpointError):
        if not resume:
            forget_unstarted(cfg.output_dir)
        raise
    return run_summary(cfg, seconds=time.monotonic() - start)


def _run_stage(cfg: RunConfig, index: int, checkpoint: Path | None, log: RunLog) -> None:
    stage = cfg.stages[index]
    port = choose_port(cfg.parallel.master_port)
    log.line(f"stage {index + 1}/{len(cfg.stages)} {stage.name}: {describe_stage(stage)}; port {port}")
    command = [sys.executable, "-m", "lumina_ft.launch.agent", f"--ranks={cfg.parallel.ranks}", f"--port={port}"]
    command += [f"--run-dir={cfg.output_dir}", "--", f"--stage={index}"]
    command += [f"--resume={checkpoint}"] if checkpoint else []
    with _Agent.started(command, rank_environment(cfg)) as agent:
        for chunk in iter(lambda: agent.output.read(65536), b""):
            log.copy(chunk)
        status = agent.process.wait()
    if agent.signals:
        again = f"lumina-ft sft --config {cfg.output_dir / RUN_FILE} --resume"
        raise Interrupted(agent.signals[0], f"the ranks have ended — continue with: {again}")
    failures = read_failures(cfg.output_dir)
    for failure in failures:
        if failure.traceback and failure is failures[0]:
            log.line(f"rank {failure.rank}:\n{failure.traceback}")
        elif failure.traceback:
            log.note(f"rank {failure.rank}, then:\n{failure.traceback}".encode())
    if failures:
        raise failures[0].to_error()
    if status:
        raise RunError(
            f"stage {stage.name!r} — exit code {status} — the ranks ended without a report — "
            f"see {cfg.output_dir / LOG_FILE}"
        )


def describe_stage(stage: StageConfig) -> str:
    """What a stage trains and how long, in a few words."""
    length = f"{stage.steps} steps" if stage.steps else f"{stage.epochs:g} epochs"
    frozen = f" without {', '.join(stage.freeze)}" if stage.freeze else ""
    return f"{', '.join(stage.train)}{frozen} for {length}"


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


@dataclass
class _Agent:
    """A running torchrun, its merged output, and the signals that were passed on to it."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    signals: list[int] = field(default_factory=list)

    @classmethod
    @contextmanager
    def started(cls, command: list[str], env: dict[str, str]) -> Iterator["_Agent"]:
        """Start the agent in its own session, pass SIGINT and SIGTERM on to it, and leave no process behind."""
        process = subprocess.Popen(
            command,
            env=env,
            bufsize=0,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A Ctrl-C of the terminal must not reach the ranks past us, or they would die as if on their own.
            start_new_session=True,
        )
        assert process.stdout is not None
        agent = cls(process, process.stdout)
        previous = {number: signal.signal(number, agent.forward) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield agent
        finally:
            agent.kill_tree()
            process.wait()
            for number, handler in previous.items():
                signal.signal(number, handler)
            agent.output.close()

    def forward(self, number: int, _: FrameType | None) -> None:
        """First signal: let torchrun end the ranks. Second: end everything at once."""
        self.signals.append(number)
        if len(self.signals) > 1:
            self.kill_tree()
        elif self.process.poll() is None:
            self.process.send_signal(number)

    def kill_tree(self) -> None:
        """SIGKILL for the agent and its ranks, if it still lives; ranks don't outlive their agent."""
        if self.process.poll() is not None:
            return
        try:
            root = psutil.Process(self.process.pid)
            family = [*root.children(recursive=True), root]
        except psutil.NoSuchProcess:
            return
        for member in family:
            try:
                member.kill()
            except psutil.NoSuchProcess:
                continue
