"""How a checkpoint comes into being: whole, or not at all, whatever is killed or runs full in between.

aside → files written, each by one rank → reopened, compared with what was announced, hashed → flushed → renamed to its
name → marker. Only the marker makes it a checkpoint, and nothing older is deleted before the marker is on disk.

A rank whose disk fails keeps taking part in every collective, without writing. Ranks tell each other at the end of each
phase, so that all of them raise the same error, and none waits for one that has given up.
"""

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import torch

from lumina_ft.checkpoint.directory import (
    STATE_FILE,
    Checkpoint,
    Skipped,
    TrainState,
    aside_path,
    checkpoint_path,
    checkpoints_dir,
    complete_checkpoints,
    holding_checkpoint,
    inspect,
    newest_checkpoint,
    unfinished,
)
from lumina_ft.checkpoint.manifest import MARKER, Manifest, format_manifest, hash_file
from lumina_ft.checkpoint.verify import check_files
from lumina_ft.errors import CheckpointError, LuminaError, RunError
from lumina_ft.models.json_files import write_json
from lumina_ft.models.tensor_files import TensorSpec
from lumina_ft.parallel.dist import World, work_apart

log = logging.getLogger(__name__)

T = TypeVar("T")

POINTS = (
    "made",
    "tensor_written",
    "model_written",
    "adapter_written",
    "optimizer_written",
    "verified",
    "flushed",
    "renamed",
    "marker_written",
    "committed",
    "rotating",
    "rotated",
)
"""Moments of a save, in order. Every rank reaches those up to `verified`, except that `tensor_written` comes after each
tensor in the rank that writes it, and `adapter_written` only with an adapter; rank 0 alone reaches the others.
`rotating` lies between the renaming and the deletion of an old checkpoint."""

_MARKER_ASIDE = f".{MARKER}"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def reached(point: str) -> None:
    """Called at each of `POINTS`. Does nothing; tests put something in its place that ends the process there."""
    assert point in POINTS, point


class Commit:
    """One checkpoint on its way to disk. Collective: every rank makes one and calls the same methods.

    Args:
        run_dir: the run directory.
        state: what `state.json` will hold, but for what `finish` is given.
        world: the ranks that write.

    Attributes:
        folder: where to write; becomes `checkpoint-N`.
        rank: this rank.
        failed: writing has failed on this rank, so it only takes part.
    """

    def __init__(self, run_dir: Path, state: TrainState, world: World) -> None:
        self.run_dir = run_dir
        self.world = world
        self.final = checkpoint_path(run_dir, state.global_step)
        self.folder = aside_path(self.final)
        self._state = state
        self._needed = 0
        self._renamed = False
        self._error: LuminaError | None = None

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def failed(self) -> bool:
        return self._error is not None

    def begin(self, *, needed: int, started_from: Path | None = None, folders: tuple[str, ...] = ()) -> bool:
        """Clear what interrupted saves have left, make sure of the room, and make the folders.

        Args:
            needed: bytes that all ranks together are going to write.
            started_from: the checkpoint that this stage was started or continued from.
            folders: to make inside.

        Returns:
            False if the checkpoint exists already, so that there is nothing to do.

        Raises:
            CheckpointError: a complete checkpoint of this step exists and belongs to another run.
            RunError: no room, or the directory can't be written.
        """
        self._needed = needed
        ready = self.together(lambda: self._prepare(started_from) if self.world.is_main else None)
        if not self.world.from_main(ready):
            return False
        for name in ("", *folders):
            # On a shared file system all ranks see one directory, made by whoever comes first.
            self.attempt(lambda name=name: (self.folder / name).mkdir(exist_ok=True))
        self.agree()
        reached("made")
        return True

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Do local work, unless this rank has failed; a failure is kept until the ranks agree."""
        if self._error is not None:
            return None
        try:
            return work()
        except OSError as error:
            self._error = RunError(self._describe(error))
        except LuminaError as error:
            self._error = error
        return None

    def together(self, work: Callable[[], T]) -> T | None:
        """Long local work on every rank, then `agree`.

        However slow a disk is, its rank doesn't look lost: see `work_apart`.
        """
        result = work_apart(self.world, lambda: self.attempt(work))
        self.agree()
        return result

    def agree(self) -> None:
        """Raise on every rank what has failed on any of them, after removing what was written.

        Raises:
            LuminaError: of the first rank that failed.
        """
        errors = [error for error in self.world.gather_objects(self._error) if error is not None]
        if errors:
            self.abandon()
            # No rank may end before the directory is gone: its end can end the one that is deleting.
            self.world.barrier()
            raise errors[0]

    def abandon(self) -> None:
        """Remove what was written."""
        if self.world.is_main:
            shutil.rmtree(self.folder, ignore_errors=True)
            if self._renamed:
                (self.final / MARKER).unlink(missing_ok=True)
                shutil.rmtree(self.final, ignore_errors=True)

    def finish(self, state: TrainState, own: Mapping[str, Mapping[str, TensorSpec] | None]) -> None:
        """Verify, hash and flush this rank's files; then publish the checkpoint.

        Args:
            state: content of `state.json`.
            own: this rank's files, relative to `folder`, with the tensors announced for each; None: not announced.

        Raises:
            RunError: a file isn't what was announced, a value isn't finite, or the disk fails. Nothing is left.
        """
        mine = self.together(lambda: self._check_own(own))
        reached("verified")
        manifest: Manifest = {}
        for entries in self.world.gather_objects(mine):
            assert not manifest.keys() & entries.keys(), "two ranks wrote one file"
            manifest |= entries
        self.together(lambda: self._publish(state, manifest) if self.world.is_main else None)

    def _prepare(self, started_from: Path | None) -> bool:
        checkpoints_dir(self.run_dir).mkdir(parents=True, exist_ok=True)
        if self._is_saved(started_from):
            return False
        for leftover in unfinished(self.run_dir):
            shutil.rmtree(leftover)
        free = shutil.disk_usage(checkpoints_dir(self.run_dir)).free
        if free < self._needed:
            raise RunError(f"rank {self.rank} — {self.final} — {self._no_room('no room')}")
        self.folder.mkdir()
        return True

    def _is_saved(self, started_from: Path | None) -> bool:
        """Whether a whole checkpoint leads to this point already. A damaged one is in the way of nothing."""
        if not (self.final / MARKER).exists():
            return False
        found = inspect(self.final, hashes=False)
        if isinstance(found, Skipped):
            log.warning("%s is replaced", found)
            return False
        saved = found.state
        ours = self._state
        began_here = saved.stage_finished and saved.stage_index + 1 == ours.stage_index and ours.stage_step == 0
        same = (saved.stage_index, saved.stage_step) == (ours.stage_index, ours.stage_step)
        if began_here or (same and saved.fingerprint == ours.fingerprint):
            return True
        if started_from is not None and self.final.samefile(started_from):
            return True
        raise CheckpointError(
            f"{self.final} — exists — a run writes each step once — resume that run, or choose another output_dir"
        )

    def _check_own(self, own: Mapping[str, Mapping[str, TensorSpec] | None]) -> Manifest:
        for name in own:
            flush(self.folder / name)
        for folder in {(self.folder / name).parent for name in own}:
            flush(folder)
        return check_files(self.folder, own, self._describe_intact())

    def _publish(self, state: TrainState, manifest: Manifest) -> None:
        write_json(self.folder / STATE_FILE, asdict(state))
        entries = {**manifest, STATE_FILE: hash_file(self.folder / STATE_FILE)}
        for path in (*(p for p in self.folder.rglob("*") if p.is_dir()), self.folder):
            flush(path)
        reached("flushed")
        if self.final.exists():
            # Damaged or of no use, see `_is_saved`.
            shutil.rmtree(self.final)
        self._renamed = True
        self.folder.rename(self.final)
        flush(self.final.parent)
        reached("renamed")
        aside = self.final / _MARKER_ASIDE
        aside.write_text(format_manifest(entries), encoding="utf-8")
        flush(aside)
        reached("marker_written")
        aside.rename(self.final / MARKER)
        flush(self.final)
        reached("committed")

    def _describe(self, error: OSError) -> str:
        where, what = f"rank {self.rank} — {error.filename or self.final}", error.strerror or str(error)
        if error.errno in _NO_ROOM:
            return f"{where} — {self._no_room(what)}"
        return (
            f"{where} — {what} — {self.final.name} must be written whole, nothing of it is kept; "
            f"{self._describe_intact()} — make the folder writable, then continue with --resume"
        )

    def _no_room(self, what: str) -> str:
        folder = checkpoints_dir(self.run_dir)
        try:
            free = size_text(shutil.disk_usage(folder if folder.exists() else self.run_dir).free)
        except OSError as error:
            free = f"({error.strerror})"
        return (
            f"{what} — {self.final.name} needs {size_text(self._needed)}, {free} are free in {folder}; it must be "
            f"written whole, nothing of it is kept; {self._describe_intact()} — make room, then continue with --resume"
        )

    def _describe_intact(self) -> str:
        try:
            newest = newest_checkpoint(self.run_dir)
        except OSError:
            newest = None
        return f"{newest.path.name} is intact" if newest else "no earlier checkpoint exists"


@contextmanager
def new_checkpoint(run_dir: Path, state: TrainState) -> Iterator[Path]:
    """A folder that one process fills. On success it becomes `checkpoint-N` and complete; on failure it is removed.

    Raises:
        CheckpointError: a complete checkpoint of that step exists.
        RunError: the disk is full or can't be written, or a tensor isn't finite.
    """
    commit = Commit(run_dir, state, World(0, 1, 0, torch.device("cpu")))
    if not commit.begin(needed=0):
        raise CheckpointError(f"{commit.final} — exists — a run writes each step once — resume that run")
    try:
        yield commit.folder
    except OSError as error:
        commit.abandon()
        raise RunError(commit._describe(error)) from error
    except BaseException:
        commit.abandon()
        raise
    own = (str(p.relative_to(commit.folder)) for p in sorted(commit.folder.rglob("*")) if p.is_file())
    commit.finish(state, dict.fromkeys(own))


def rotate(run_dir: Path, keep: int, spare: Path | None = None) -> None:
    """Delete all but the newest `keep` checkpoints inside stages.

    Stage ends stay, so does what another checkpoint has its base in, and `spare`. The name goes first: an interrupted
    deletion leaves what the next save clears, never a damaged checkpoint.
    """
    assert keep >= 1, "the newest one stays"
    complete = complete_checkpoints(run_dir)
    inside = [c for c in complete if not c.state.stage_finished]
    doomed = inside[: max(0, len(inside) - keep)]
    if spare is not None and spare.exists():
        doomed = [c for c in doomed if not c.path.samefile(spare)]
    bases = {holding_checkpoint(run_dir, c.state.base) for c in complete}
    for old in doomed:
        if old.path not in bases:
            _delete(old)


def _delete(checkpoint: Checkpoint) -> None:
    aside = aside_path(checkpoint.path)
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.path.rename(aside)
    reached("rotating")
    shutil.rmtree(aside)
    reached("rotated")


def flush(path: Path) -> None:
    """fsync a file or directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def size_text(count: int) -> str:
    """Bytes, with a unit that fits."""
    value, unit = float(count), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{count} bytes" if unit == "bytes" else f"{value:.3g} {unit}"
