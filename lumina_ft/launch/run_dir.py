"""The run directory: who may use it, what lies in it, and the log that everything on stderr is copied to."""

import json
import os
import platform
import re
import shutil
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from lumina_ft.checkpoint.directory import checkpoints_dir, set_damaged_aside
from lumina_ft.config.load import load_run
from lumina_ft.config.schema import RunConfig
from lumina_ft.config.yaml_file import dump_yaml
from lumina_ft.errors import ConfigError, RunError
from lumina_ft.launch.resume import ResumePoint, forget_lost_steps, resume_point
from lumina_ft.models.json_files import write_json
from lumina_ft.monitor.metrics import METRICS_FILE, SUMMARY_FILE

RUN_FILE = "run.yaml"
ENVIRONMENT_FILE = "environment.json"
LOG_FILE = "log.txt"
ERRORS_DIR = "errors"

_OWNED = (
    RUN_FILE,
    ENVIRONMENT_FILE,
    LOG_FILE,
    SUMMARY_FILE,
    METRICS_FILE,
    ERRORS_DIR,
    "checkpoints",
    "hang",
    "nonfinite",
    "plots",
    "tensorboard",
)
"""All that a run writes, hence all that `--overwrite` deletes."""

_FIXED_ON_RESUME = ("family", "seed", "model.path", "model.config", "model.dtype", "data", "train.packs_per_step")
"""Keys that decide which samples a step sees or what a checkpoint holds; finished stages are fixed, too.

The dtype is among them at a stage boundary as well: weights are rounded to it there, so that with another one the run
would go on from other numbers than it seems to."""

_FIXED_INSIDE_STAGE = ("name", "train", "freeze", "lora", "steps", "epochs", "data")
"""The same for the stage that is continued; its learning rates may change, as `optim` may, and `lora_at_end`."""

_FREE_IN_ADAPTER = {"lr_ratio"}
"""Keys of `lora` that may change once a stage with an adapter has begun."""

_PACKAGES = ("torch", "deepspeed", "transformers", "peft", "datasets", "triton", "numpy", "safetensors", "pydantic")
_ENV_PREFIXES = ("CUDA_", "NCCL_", "GLOO_", "OMP_", "DS_", "TORCH_", "SLURM_JOB_ID", "LUMINA_")
_ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


def prepare_run_dir(cfg: RunConfig, *, resume: bool, overwrite: bool) -> ResumePoint:
    """Create the run directory and write `run.yaml` and `environment.json`.

    Returns:
        Where the run starts.

    Raises:
        ConfigError: it holds a run and neither `resume` nor `overwrite` is given; there is nothing to resume;
            `resume` with a config that would no longer see the same samples; or `overwrite` would delete an input.
        CheckpointError: every checkpoint is damaged.
        RunError: the disk is full.
    """
    path = cfg.output_dir
    earlier, point = None, ResumePoint(0, None)
    present = [name for name in _OWNED if (path / name).exists()]
    if resume:
        earlier = _earlier_config(path)
        point = resume_point(path)
        _check_resumable(cfg, earlier, point)
    elif present and not overwrite:
        raise ConfigError(
            f"output_dir — {str(path)!r} — already holds a run ({', '.join(present)}) — "
            "pass --resume to continue it, --overwrite to delete it, or choose another directory"
        )
    elif present:
        _check_overwrite(cfg, present)
    try:
        if earlier is not None:
            set_damaged_aside(point.skipped)
            forget_lost_steps(path, earlier, point)
        else:
            for name in present:
                _remove(path / name)
        path.mkdir(parents=True, exist_ok=True)
        _remove(path / ERRORS_DIR)
        if point.stage_index < len(cfg.stages):
            # Otherwise the run is finished, and its config stays that of what was trained.
            dump_yaml(cfg, path / RUN_FILE)
        _record_environment(path / ENVIRONMENT_FILE)
    except OSError as error:
        raise RunError(
            f"output_dir — {error.filename or path} — {error.strerror} — the run writes its files there — make room, "
            "or choose another directory"
        ) from error
    return point


def forget_unstarted(path: Path) -> None:
    """Remove what a launch wrote if it never made a step, so that a user's mistake leaves nothing behind."""
    metrics = path / METRICS_FILE
    if (metrics.exists() and metrics.stat().st_size) or checkpoints_dir(path).exists():
        return
    for name in _OWNED:
        _remove(path / name)
    if not any(path.iterdir()):
        path.rmdir()


def _check_overwrite(cfg: RunConfig, doomed: list[str]) -> None:
    """Refuse to delete the model or data that the run is about to read."""
    inputs = {"model.path": cfg.model.path, "data.path": cfg.data.path, "data.eval_path": cfg.data.eval_path}
    for key, path in inputs.items():
        for name in doomed:
            if path is not None and path.resolve().is_relative_to((cfg.output_dir / name).resolve()):
                raise ConfigError(
                    f"--overwrite — {key}={str(path)!r} — lies in {cfg.output_dir / name}, which would be deleted — "
                    "choose another output_dir"
                )


def _earlier_config(run_dir: Path) -> RunConfig:
    """The config of the interrupted run."""
    if not (run_dir / RUN_FILE).is_file():
        raise ConfigError(
            f"--resume — {str(run_dir)!r} — holds no {RUN_FILE}, so there is no run to resume — "
            "check output_dir, or drop --resume to start"
        )
    return load_run(run_dir / RUN_FILE, [])


def _check_resumable(cfg: RunConfig, earlier: RunConfig, point: ResumePoint) -> None:
    """Whether this config may continue the run of another one."""
    changed = [key for key in _FIXED_ON_RESUME if _value_at(earlier, key) != _value_at(cfg, key)]
    finished = range(min(point.stage_index, len(earlier.stages)))
    changed += [f"stages.{i}" for i in finished if i >= len(cfg.stages) or earlier.stages[i] != cfg.stages[i]]
    if point.inside_stage:
        changed += _changed_inside(earlier, cfg, point.stage_index)
    begun = earlier.stages[: point.stage_index + int(point.inside_stage)]
    if any(stage.lora != "off" for stage in begun):
        changed += _changed_adapter(earlier, cfg)
    if changed:
        raise ConfigError(
            f"--resume — {', '.join(changed)} — differ from {cfg.output_dir / RUN_FILE}; a resumed run must see the "
            "same samples — take the old values, or start a new run in another output_dir"
        )


def _changed_inside(earlier: RunConfig, cfg: RunConfig, index: int) -> list[str]:
    if index >= len(cfg.stages):
        return [f"stages.{index}"]
    before, after = earlier.stages[index], cfg.stages[index]
    return [f"stages.{index}.{key}" for key in _FIXED_INSIDE_STAGE if getattr(before, key) != getattr(after, key)]


def _changed_adapter(earlier: RunConfig, cfg: RunConfig) -> list[str]:
    if earlier.lora is None or cfg.lora is None:
        return ["lora"] if earlier.lora != cfg.lora else []
    before, after = earlier.lora.model_dump(), cfg.lora.model_dump()
    return [f"lora.{key}" for key in before if key not in _FREE_IN_ADAPTER and before[key] != after[key]]


def _value_at(cfg: RunConfig, key: str) -> Any:
    value: Any = cfg
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _record_environment(path: Path) -> None:
    """Append this launch to `environment.json`: a resumed run keeps the record of its earlier launches."""
    launches = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    launches.append(describe_environment())
    write_json(path, launches)


def describe_environment() -> dict[str, Any]:
    """Versions, machine and the settings that influence a run; no credentials, only known prefixes of variables."""
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    gpus = [
        match[1].strip()
        for info in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        if (match := re.search(r"Model:\s*(.+)", info.read_text(encoding="utf-8")))
    ]
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "directory": str(Path.cwd()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "cpu_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus,
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_ENV_PREFIXES)},
    }


class RunLog:
    """Copies what the run says on stderr to `log.txt`."""

    def __init__(self, run_dir: Path) -> None:
        # Unbuffered: what a full disk refuses must not come back when the file is closed.
        self._file = (run_dir / LOG_FILE).open("ab", buffering=0)
        self._pending = b""
        self._complete = True

    def line(self, text: str) -> None:
        """Say one line ourselves."""
        self.copy(f"{text}\n".encode())

    def copy(self, chunk: bytes) -> None:
        """Pass on output of the ranks as it comes; the log gets whole lines, without the redraws of a progress bar."""
        sys.stderr.buffer.write(chunk)
        sys.stderr.buffer.flush()
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            self.note(line)

    def note(self, line: bytes) -> None:
        """Write one line to the log only."""
        # A bar redraws its line: what follows the last carriage return or erasure is what remained on the screen.
        shown = re.split(rb"\r|\x1b\[2K", line.rstrip(b"\r"))[-1]
        try:
            self._file.write(_ANSI.sub(b"", shown) + b"\n")
        except OSError as error:
            # A full disk must not keep the run from saying so on the terminal.
            if self._complete:
                sys.stderr.write(f"{self._file.name} — {error.strerror} — lines are missing from here on\n")
            self._complete = False

    def close(self) -> None:
        if self._pending:
            self.note(self._pending)
        self._file.close()
