"""Checkpoint directories of a run: names, completeness, the newest one, rotation. No torch here.

`checkpoints/checkpoint-N/` (N optimizer steps since the start of the run, over all stages) holds `model/` (a complete
model directory), `optimizer.safetensors`, `state.json` and, written last, `COMPLETE`.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lumina_ft.errors import CheckpointError, RunError

MARKER = "COMPLETE"
MODEL_DIR = "model"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
_NAME = re.compile(r"^checkpoint-(\d+)$")
_ASIDE = ".tmp-"
"""Before the name of a checkpoint that is being written or deleted."""


@dataclass(frozen=True)
class TrainState:
    """Where training stands; content of `state.json`.

    Attributes:
        global_step: optimizer steps since the start of the run.
        stage_index, stage_name: the stage that was running.
        stage_step: steps of that stage that are done, skipped ones included.
        stage_steps: length of that stage.
        adam_steps: steps that the optimizer has applied in that stage.
        seconds, tokens: spent in that stage so far.
        fingerprint: what must not change between saving and resuming, by key.
    """

    global_step: int
    stage_index: int
    stage_name: str
    stage_step: int
    stage_steps: int
    adam_steps: int
    seconds: float
    tokens: int
    fingerprint: dict[str, Any]

    @property
    def stage_finished(self) -> bool:
        """The checkpoint is a stage's end."""
        return self.stage_step >= self.stage_steps


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    state: TrainState

    @property
    def model_dir(self) -> Path:
        """Directory that `from_pretrained` and `lumina-ft sample` take."""
        return self.path / MODEL_DIR


def checkpoints_dir(run_dir: Path) -> Path:
    """Folder of a run's checkpoints."""
    return run_dir / "checkpoints"


def complete_checkpoints(run_dir: Path) -> list[Checkpoint]:
    """Every complete checkpoint, oldest first; unfinished directories are passed over.

    Raises:
        CheckpointError: a directory is marked complete but its state can't be read.
    """
    folder = checkpoints_dir(run_dir)
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if _NAME.match(path.name) and (path / MARKER).is_file():
            found.append(Checkpoint(path, read_state(path)))
    return sorted(found, key=lambda c: c.state.global_step)


def newest_checkpoint(run_dir: Path) -> Checkpoint | None:
    """The checkpoint that a resumed run continues from, or None."""
    found = complete_checkpoints(run_dir)
    return found[-1] if found else None


def stage_end(run_dir: Path, stage_index: int) -> Checkpoint | None:
    """The checkpoint at the end of a stage, or None."""
    ends = [c for c in complete_checkpoints(run_dir) if c.state.stage_finished and c.state.stage_index == stage_index]
    return ends[-1] if ends else None


def read_state(path: Path) -> TrainState:
    """Read `state.json` of a checkpoint.

    Raises:
        CheckpointError: missing, not JSON, or of another version.
    """
    file = path / STATE_FILE
    try:
        return TrainState(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as err:
        raise CheckpointError(f"{file} — {err} — must be the state of this version — remove the checkpoint") from err


@contextmanager
def new_checkpoint(run_dir: Path, state: TrainState) -> Iterator[Path]:
    """A folder to fill. On success it becomes `checkpoint-N` at once and complete; on failure it is removed.

    For one process. Everything that is in the folder when the block ends is flushed to disk before the marker is. What
    an interrupted process has left unfinished, hundreds of GB for a large model, is deleted first.

    Raises:
        CheckpointError: a complete checkpoint of that step exists; it belongs to another run.
        RunError: the disk is full or can't be written.
    """
    folder = checkpoints_dir(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"checkpoint-{state.global_step}"
    aside = folder / f"{_ASIDE}{final.name}"
    if (final / MARKER).exists():
        raise CheckpointError(
            f"{final} — exists — a run writes each step once — resume that run, or choose another output_dir"
        )
    for leftover in (*folder.glob(f"{_ASIDE}*"), final):
        shutil.rmtree(leftover, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        (aside / STATE_FILE).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
        for path in sorted(aside.rglob("*")):
            _flush(path)
        (aside / MARKER).write_text(f"step {state.global_step}\n", encoding="utf-8")
        _flush(aside / MARKER)
        _flush(aside)
        aside.rename(final)
        _flush(folder)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunError(
                f"{final} — {error.strerror or error} — the checkpoint must be written whole; nothing of it is kept — "
                "make room, then continue from the one before with --resume"
            ) from error
        raise


def rotate(run_dir: Path, keep: int, spare: Path | None = None) -> None:
    """Delete all but the newest `keep` checkpoints inside stages; stage ends stay, and so does `spare`.

    The name goes first: an interrupted deletion leaves what `new_checkpoint` clears, never a damaged checkpoint.
    """
    inside = [c for c in complete_checkpoints(run_dir) if not c.state.stage_finished]
    for old in inside[: max(0, len(inside) - keep)]:
        if spare is not None and old.path.samefile(spare):
            continue
        doomed = old.path.with_name(f"{_ASIDE}{old.path.name}")
        old.path.rename(doomed)
        shutil.rmtree(doomed)


def _flush(path: Path) -> None:
    """fsync a file or directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
