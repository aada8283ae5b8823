"""Runs of a tiny model through `lumina-ft sft` that are killed, stopped and starved, and started again."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dist_tiny
import psutil
from safetensors.torch import load_file

from lumina_ft.monitor.metrics import WALL_TIME_KEYS, read_metrics

REPOSITORY = Path(__file__).resolve().parents[2]
PLANT = Path(__file__).with_name("plant")
STEPS = 6
"""Length of the runs that are compared with the reference run."""

LAUNCH_SECONDS = 180
"""More than any launch here takes on a busy machine of two cores."""


@dataclass(frozen=True)
class Fault:
    """What happens in one rank when it arrives at a point; see `plant/sitecustomize.py`."""

    point: str
    acts: tuple[tuple[str, Any], ...]
    rank: int = 0
    arrival: int = 1


@dataclass(frozen=True)
class Launch:
    """How a launch ended.

    Attributes:
        code: exit code; -9 when the launcher itself was killed.
        result: the JSON object on stdout, if there was one.
    """

    code: int
    err: str
    result: dict[str, Any] | None

    @property
    def resumed_from(self) -> str:
        """What the run said it continues from: name of a checkpoint, or `the start`."""
        (line,) = re.findall(r"^resuming from (.*)$", self.err, re.M)
        found = re.search(r"checkpoint-\d+", line)
        return found[0] if found else "the start"


class FaultRun:
    """One run directory and the launches that work on it.

    Args:
        work: directory with the model config and the dataset.
        output: name of the run directory in it, or a path elsewhere.
        prefix: command that starts the launcher, to enter a namespace.
        seen_at: where this process sees the run directory, if not at the same path.
        parallel, lora: keys of these sections.
        train: keys of the `train` section, besides a checkpoint after every step.
    """

    def __init__(
        self,
        work: Path,
        output: str,
        *,
        stages: Sequence[dict[str, Any]],
        zero: int = 3,
        prefix: Sequence[str] = (),
        seen_at: Path | None = None,
        parallel: dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
        **train: object,
    ) -> None:
        self.config = dist_tiny.run_config(
            work,
            output,
            stages=list(stages),
            train={"packs_per_step": 4, "save_every_steps": 1, "tensorboard": False, "plots": False, **train},
            parallel={"ranks": 2, "zero": f"zero{zero}", **(parallel or {})},
            lora=lora,
        )
        self.name = output.replace("/", "-")
        self.work = work
        self.output = Path(self.config["output_dir"])
        self.path = seen_at or self.output
        self.prefix = list(prefix)
        self.launches = 0
        self.trace = work / f"{self.name}.trace"
        self.landed = work / f"{self.name}.landed"

    @contextmanager
    def started(self, *, resume: bool = False, fault: Fault | None = None) -> Iterator[subprocess.Popen[bytes]]:
        """The launcher as a running process; nothing of the run is left when the block ends."""
        self.launches += 1
        self.landed.unlink(missing_ok=True)
        plant: dict[str, Any] = {"trace": str(self.trace)}
        if fault is not None:
            plant |= {**vars(fault), "landed": str(self.landed)}
        config = self.work / f"{self.name}.yaml"
        config.write_text(json.dumps(self.config))
        command = [*self.prefix, sys.executable, "-m", "lumina_ft", "sft", "--json", "--config", str(config)]
        env = {**os.environ, "PYTHONPATH": str(PLANT), "LUMINA_FT_TEST_PLANT": json.dumps(plant)}
        env |= {"DS_ACCELERATOR": "cpu"}
        with self.stdout.open("wb") as out, self.stderr.open("wb") as err:
            process = subprocess.Popen(
                [*command, *(["--resume"] if resume else [])], cwd=REPOSITORY, env=env, stdout=out, stderr=err
            )
        try:
            yield process
        finally:
            for member in (*self.family(), process):
                with suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()

    def launch(self, *, resume: bool = False, fault: Fault | None = None) -> Launch:
        """Start the run, wait for its end, and for that of every process that belonged to it."""
        with self.started(resume=resume, fault=fault) as process:
            process.wait(LAUNCH_SECONDS)
            return self.ended(process)

    def ended(self, process: subprocess.Popen[bytes]) -> Launch:
        """How a launcher that has ended did, once its children are gone."""
        deadline = time.monotonic() + 30
        while left := self.family():
            assert time.monotonic() < deadline, f"{left} outlive the launcher"
            time.sleep(0.02)
        lines = self.stdout.read_text().splitlines()
        return Launch(process.returncode, self.stderr.read_text(), json.loads(lines[-1]) if lines else None)

    @property
    def stdout(self) -> Path:
        return self.work / f"{self.name}.{self.launches}.out"

    @property
    def stderr(self) -> Path:
        return self.work / f"{self.name}.{self.launches}.err"

    def family(self) -> list[psutil.Process]:
        """Agents and ranks of this run; the launcher names no run directory on its command line."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                run_dir = {str(self.output), f"--run-dir={self.output}"}
                if run_dir & set(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        """Processes of the ranks, rank 0 first."""
        found = [p for p in self.family() if "lumina_ft.launch.rank" in p.cmdline()]
        return sorted(found, key=lambda p: int(p.environ()["RANK"]))

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Directories that bear the name of a checkpoint, by step, whether complete or not."""
        found = (self.path / "checkpoints").glob("checkpoint-*")
        return dict(sorted((int(path.name.removeprefix("checkpoint-")), path) for path in found))

    def newest_whole(self) -> str:
        """Name of the newest checkpoint that is marked and whose every tensor file can be read, or `the start`."""
        whole = [path.name for path in self.checkpoints.values() if (path / "COMPLETE").is_file() and readable(path)]
        return whole[-1] if whole else "the start"

    def arrivals(self) -> list[tuple[int, str]]:
        """(rank, point) in order of arrival, over all launches."""
        lines = self.trace.read_text().splitlines() if self.trace.exists() else []
        return [(int(line.split()[0]), line.split()[1]) for line in lines]

    def records(self, *, clock: bool = False) -> list[dict[str, Any]]:
        """Metrics, with or without what depends on the clock."""
        return [{k: v for k, v in r.items() if clock or k not in WALL_TIME_KEYS} for r in read_metrics(self.path)]

    def check_same_end(self, other: "FaultRun") -> None:
        """This run has ended as the other has, bit for bit, and has left nothing unfinished."""
        assert self.records() == other.records()
        step = max(other.checkpoints)
        assert max(self.checkpoints) == step
        ours, theirs = (tensor_bytes(run.checkpoints[step]) for run in (self, other))
        assert ours.keys() == theirs.keys() and len(ours) > 1
        assert all(ours[name] == theirs[name] for name in theirs)
        names = {path.name for path in (self.path / "checkpoints").iterdir()}
        assert names == {f"checkpoint-{n}" for n in self.checkpoints}
        assert all((path / "COMPLETE").is_file() for path in self.checkpoints.values())

    def copy_to(self, other: "FaultRun") -> None:
        """Make another run directory start as a copy of this one."""
        shutil.copytree(self.path, other.path, dirs_exist_ok=True)


def uninterrupted(work: Path, output: str, **how: Any) -> FaultRun:
    """A run that nothing happens to; arguments are those of `FaultRun`."""
    run = FaultRun(work, output, **how)
    launch = run.launch()
    assert launch.code == 0, launch.err
    return run


def readable(checkpoint: Path) -> bool:
    """Whether every tensor file can be loaded."""
    try:
        return all(load_file(path) for path in checkpoint.rglob("*.safetensors"))
    except Exception:
        return False


def tensor_bytes(checkpoint: Path) -> dict[str, bytes]:
    """Content of every tensor file."""
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in checkpoint.rglob("*.safetensors")}
