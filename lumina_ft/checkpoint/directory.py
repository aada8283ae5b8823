"""Checkpoint directories of a run: what lies in them, which are complete, the newest one. No torch here.

`checkpoints/checkpoint-N/` (N optimizer steps since the start of the run, over all stages) holds

    model/      a complete model directory, unless `state.base` names one that serves
    adapter/    a PEFT adapter directory, while there is an adapter
    optimizer/  fp32 master weights and Adam moments of the trained parameters, named `name::key`
    state.json  where training stands
    COMPLETE    the manifest: size and hash of every other file
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lumina_ft.checkpoint.manifest import MARKER, find_damage
from lumina_ft.errors import CheckpointError

MODEL_DIR = "model"
ADAPTER_DIR = "adapter"
OPTIMIZER_DIR = "optimizer"
STATE_FILE = "state.json"
DAMAGED_MARKER = "DAMAGED"
"""What `COMPLETE` is renamed to when a resume finds the checkpoint damaged: no rotation or resume counts on it then."""

_NAME = re.compile(r"^checkpoint-(\d+)$")
_ASIDE = ".tmp-"


@dataclass(frozen=True)
class TrainState:
    """Where training stands; content of `state.json`.

    Learning rates, random draws and the position in the data follow from the step and the config, for any number of
    ranks; they need no state of their own.

    Attributes:
        global_step: optimizer steps since the start of the run.
        stage_index, stage_name: the stage that was running.
        stage_step: steps of that stage that are done, skipped ones included.
        stage_steps: length of that stage.
        adam_steps: steps that the optimizer has applied in that stage.
        seconds, tokens: spent in that stage so far.
        fingerprint: what must not change between saving and resuming, by key.
        base: model directory that stands for the checkpoint's own `model/`, relative to the run directory if inside it,
            else absolute; None if the checkpoint has its own.
        base_identity: digest of the weights in `base_dir` (`models.identity`); None without an adapter.
        adapter: `kept` for what comes next, or `dropped` at the stage's end: stored, but the next stage starts without.
        changed_groups: groups of base weights that differ from those in `base_dir`; they are stored in the adapter.
        expert_counts: [L][E] slots routed to each expert in that stage, up to the last record of the metrics.
        unlogged_counts: [L][E] since then; empty if nothing has run since.
        experts: ids of the routed experts of each layer that the checkpoint holds, as `checkpoint.experts` writes them.
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
    base: str | None = None
    base_identity: str | None = None
    adapter: Literal["none", "kept", "dropped"] = "none"
    changed_groups: tuple[str, ...] = ()
    expert_counts: list[list[int]] = field(default_factory=list)
    unlogged_counts: list[list[int]] = field(default_factory=list)
    experts: str = ""

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
    def base_dir(self) -> Path:
        """Model directory that training continues from: the base, where there is an adapter.

        Raises:
            CheckpointError: it lies elsewhere and is gone.
        """
        if self.state.base is None:
            return self.path / MODEL_DIR
        # An absolute one replaces the run directory.
        base = self.path.parent.parent / self.state.base
        if not base.is_dir():
            raise CheckpointError(
                f"{self.path / STATE_FILE} — base {str(base)!r} — no such directory; the adapter was trained on it — "
                "bring it back, or put a link to it there"
            )
        return base

    @property
    def model_dir(self) -> Path:
        """Directory that `from_pretrained` takes; without the adapter, where there is one."""
        return self.base_dir

    @property
    def adapter_dir(self) -> Path | None:
        """The adapter that belongs to the checkpoint, dropped ones included; None without."""
        return None if self.state.adapter == "none" else self.path / ADAPTER_DIR


class Skipped(NamedTuple):
    """A directory that looks like a checkpoint and can't be used.

    Attributes:
        reason: what is wrong with it.
        was_complete: it is damaged, rather than never finished.
    """

    path: Path
    reason: str
    was_complete: bool

    def __str__(self) -> str:
        return f"{self.path} — {self.reason}"


class Survey(NamedTuple):
    """A checkpoint to continue from, or None, and the newer ones that can't be used, newest first."""

    checkpoint: Checkpoint | None
    skipped: tuple[Skipped, ...]


def checkpoints_dir(run_dir: Path) -> Path:
    """Folder of a run's checkpoints."""
    return run_dir / "checkpoints"


def checkpoint_path(run_dir: Path, global_step: int) -> Path:
    """Where the checkpoint of a step is, or will be."""
    return checkpoints_dir(run_dir) / f"checkpoint-{global_step}"


def aside_path(path: Path) -> Path:
    """Where a checkpoint is while it is being written or deleted."""
    return path.with_name(f"{_ASIDE}{path.name}")


def unfinished(run_dir: Path) -> list[Path]:
    """What interrupted saves and deletions have left: directories aside, and those without any marker."""
    asides = checkpoints_dir(run_dir).glob(f"{_ASIDE}*")
    unmarked = (p for p in _named(run_dir) if not (p / MARKER).exists() and not (p / DAMAGED_MARKER).exists())
    return [*asides, *unmarked]


def complete_checkpoints(run_dir: Path) -> list[Checkpoint]:
    """Every complete checkpoint, oldest first, judged by marker, file sizes and a readable state."""
    found = (inspect(path, hashes=False) for path in _named(run_dir))
    return [checkpoint for checkpoint in found if isinstance(checkpoint, Checkpoint)]


def newest_checkpoint(run_dir: Path) -> Checkpoint | None:
    """The newest complete checkpoint, judged as in `complete_checkpoints`, or None."""
    return next(_usable(run_dir), None)


def stage_end(run_dir: Path, stage_index: int) -> Checkpoint | None:
    """The checkpoint at the end of a stage, judged as in `complete_checkpoints`, or None."""
    return next(
        (c for c in _usable(run_dir) if c.state.stage_finished and c.state.stage_index == stage_index),
        None,
    )


def newest_intact(run_dir: Path) -> Survey:
    """The newest checkpoint all of whose files have the hashes that they were written with. Reads it whole.

    Raises:
        CheckpointError: there are finished checkpoints, and all of them are damaged.
    """
    skipped: list[Skipped] = []
    for path in reversed(_named(run_dir)):
        found = inspect(path, hashes=True)
        if isinstance(found, Checkpoint):
            return Survey(found, tuple(skipped))
        skipped.append(found)
    if any(entry.was_complete for entry in skipped):
        raise CheckpointError(
            "\n".join(map(str, skipped)) + f"\n{checkpoints_dir(run_dir)} — every checkpoint is damaged — one must be "
            "whole to resume from — restore one from a backup, or start again with --overwrite"
        )
    return Survey(None, tuple(skipped))


def set_damaged_aside(skipped: Iterable[Skipped]) -> None:
    """Take the marker off damaged checkpoints, so that nothing counts on them; their files stay.

    A step that is saved again replaces its damaged directory.
    """
    for entry in skipped:
        if entry.was_complete and (entry.path / MARKER).exists():
            (entry.path / MARKER).replace(entry.path / DAMAGED_MARKER)


def read_state(path: Path) -> TrainState:
    """Read `state.json` of a checkpoint.

    Raises:
        CheckpointError: missing, not JSON, or of another version.
    """
    file = path / STATE_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return TrainState(**{**content, "changed_groups": tuple(content.get("changed_groups", ()))})
    except (OSError, ValueError, TypeError, AttributeError) as err:
        raise CheckpointError(f"{file} — {err} — must be the state of this version — remove the checkpoint") from err


def base_reference(run_dir: Path, base: Path) -> str:
    """How `TrainState.base` names a model directory: a run that is moved or copied keeps what lies inside it."""
    resolved, home = base.resolve(), run_dir.resolve()
    return str(resolved.relative_to(home)) if resolved.is_relative_to(home) else str(resolved)


def holding_checkpoint(run_dir: Path, base: str | None) -> Path | None:
    """The checkpoint of the run inside which a `TrainState.base` lies, or None."""
    if base is None:
        return None
    # Resolved, as `base_reference` has done: the folder may be a link to another disk.
    folder, target = checkpoints_dir(run_dir).resolve(), (run_dir / base).resolve()
    inside = target.is_relative_to(folder) and target != folder
    return checkpoints_dir(run_dir) / target.relative_to(folder).parts[0] if inside else None


def _named(run_dir: Path) -> list[Path]:
    """Directories that are called like a checkpoint, by step."""
    folder = checkpoints_dir(run_dir)
    found = [(int(match[1]), path) for path in _listed(folder) if (match := _NAME.match(path.name))]
    return [path for _, path in sorted(found)]


def _listed(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _usable(run_dir: Path) -> Iterator[Checkpoint]:
    """Complete checkpoints, newest first."""
    for path in reversed(_named(run_dir)):
        found = inspect(path, hashes=False)
        if isinstance(found, Checkpoint):
            yield found


def inspect(path: Path, *, hashes: bool) -> Checkpoint | Skipped:
    """A checkpoint, or why it isn't one.

    Args:
        hashes: read and hash its files, and those of a base inside the run; else look at their sizes only.
    """
    if (path / DAMAGED_MARKER).exists():
        return Skipped(path, f"found damaged before, see {DAMAGED_MARKER}", True)
    damage = find_damage(path, hashes=hashes, say=hashes)
    if damage is not None:
        return Skipped(path, damage, (path / MARKER).exists())
    try:
        checkpoint = Checkpoint(path, read_state(path))
        if hashes:
            base = holding_checkpoint(path.parent.parent, checkpoint.state.base)
            damage = find_damage(base, hashes=True, say=True) if base is not None else None
            checkpoint.base_dir  # noqa: B018 - raises when the directory is gone
    except CheckpointError as error:
        return Skipped(path, str(error), True)
    return checkpoint if damage is None else Skipped(path, f"its base {checkpoint.state.base}: {damage}", True)
