"""The commit protocol: points in order, nothing half-written, agreement of the ranks, rotation."""

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from checkpoint_states import state, write
from safetensors.torch import save_file

from lumina_ft.checkpoint import commit as commit_module
from lumina_ft.checkpoint.commit import POINTS, Commit, new_checkpoint, rotate, size_text
from lumina_ft.checkpoint.directory import (
    MARKER,
    checkpoints_dir,
    complete_checkpoints,
    newest_checkpoint,
    newest_intact,
    set_damaged_aside,
)
from lumina_ft.checkpoint.manifest import FileEntry, read_manifest
from lumina_ft.errors import CheckpointError, LuminaError, RunError
from lumina_ft.models.tensor_files import TensorSpec
from lumina_ft.parallel.dist import World


def names(run_dir: Path) -> set[str]:
    return {p.name for p in checkpoints_dir(run_dir).iterdir()}


def alone() -> World:
    return World(0, 1, 0, torch.device("cpu"))


def test_the_marker_lists_every_file_with_size_and_hash(tmp_path):
    with new_checkpoint(tmp_path, state(4, 4)) as folder:
        (folder / "model").mkdir()
        save_file({"w": torch.ones(3)}, folder / "model" / "model.safetensors")
    final = checkpoints_dir(tmp_path) / "checkpoint-4"
    manifest = read_manifest(final)
    assert set(manifest) == {"model/model.safetensors", "state.json"}
    assert manifest["state.json"].bytes == (final / "state.json").stat().st_size
    assert all(isinstance(entry, FileEntry) and len(entry.xxh3) == 32 for entry in manifest.values())


def test_points_come_in_order_and_only_the_marker_makes_a_checkpoint(tmp_path, monkeypatch):
    write(tmp_path, state(2, 2))
    seen: list[str] = []
    complete: list[int] = []

    def reached(point: str) -> None:
        seen.append(point)
        complete.append(len(complete_checkpoints(tmp_path)))

    monkeypatch.setattr(commit_module, "reached", reached)
    write(tmp_path, state(4, 4))
    rotate(tmp_path, keep=1)
    assert seen == ["made", "verified", "flushed", "renamed", "marker_written", "committed", "rotating", "rotated"]
    assert complete == [1, 1, 1, 1, 1, 2, 1, 1]
    assert [point for point in POINTS if point in seen] == seen


@pytest.mark.parametrize("point", ["made", "verified", "flushed", "renamed", "marker_written", "committed"])
def test_an_end_at_any_point_leaves_a_checkpoint_to_continue_from(tmp_path, monkeypatch, point):
    """A process that ends runs no clean-up: what lies there is what the restart finds."""
    write(tmp_path, state(4, 4))

    class Killed(BaseException):
        pass

    def reached(at: str) -> None:
        if at == point:
            raise Killed

    commit = Commit(tmp_path, state(8, 8), alone())
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(commit_module, "reached", reached)
        assert commit.begin(needed=10)
        (commit.folder / "payload").write_text("8")
        commit.finish(state(8, 8), {"payload": None})
    newest, skipped = newest_intact(tmp_path)
    assert newest is not None
    assert newest.state.global_step == (8 if point == "committed" else 4)
    assert len(skipped) == (1 if point in ("renamed", "marker_written") else 0)
    if point != "committed":
        write(tmp_path, state(8, 8))
        assert names(tmp_path) == {"checkpoint-4", "checkpoint-8"}
        newest = newest_intact(tmp_path).checkpoint
        assert newest is not None and newest.state.global_step == 8


def test_nothing_is_left_of_a_checkpoint_that_fails(tmp_path):
    write(tmp_path, state(4, 4))
    with pytest.raises(ZeroDivisionError):
        with new_checkpoint(tmp_path, state(8, 8)) as folder:
            (folder / "payload").write_text("half")
            raise ZeroDivisionError
    assert names(tmp_path) == {"checkpoint-4"}


def test_a_full_disk_names_rank_path_room_and_what_is_intact(tmp_path):
    write(tmp_path, state(4, 4))
    pattern = (
        r"^rank 0 — .*checkpoint-8 — No space left on device — checkpoint-8 needs 0 bytes, .* are free in "
        r".*; checkpoint-4 is intact — make room, then continue with --resume$"
    )
    with pytest.raises(RunError, match=pattern):
        with new_checkpoint(tmp_path, state(8, 8)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert names(tmp_path) == {"checkpoint-4"}


def test_room_is_made_sure_of_before_anything_is_written(tmp_path):
    commit = Commit(tmp_path, state(8, 8), alone())
    with pytest.raises(RunError, match=r"no room — checkpoint-8 needs 1e\+06 TB, .* no earlier checkpoint exists"):
        commit.begin(needed=10**18)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("point", ["flushed", "renamed", "marker_written"])
def test_a_disk_that_fails_while_publishing_leaves_nothing(tmp_path, monkeypatch, point):
    write(tmp_path, state(4, 4))

    def reached(at: str) -> None:
        if at == point:
            raise OSError(errno.EIO, os.strerror(errno.EIO), "disk")

    monkeypatch.setattr(commit_module, "reached", reached)
    with pytest.raises(RunError, match="rank 0 — disk — Input/output error — .*checkpoint-4 is intact"):
        write(tmp_path, state(8, 8))
    assert names(tmp_path) == {"checkpoint-4"}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"a": torch.ones(2), "b": torch.ones(2)}, r"tensors \['b'\] differ from what was written"),
        ({"a": torch.ones(3)}, r"a \(3,\) torch.float32 differs from what was written"),
        ({"a": torch.ones(2, dtype=torch.bfloat16)}, r"a \(2,\) torch.bfloat16 differs from"),
        ({"a": torch.tensor([1.0, torch.nan])}, r"optimizer/x\.safetensors — a — holds values that aren't finite"),
        ({"a": torch.tensor([torch.inf, -torch.inf])}, r"a — holds values that aren't finite.*checkpoint-4 is intact"),
    ],
)
def test_files_are_reopened_and_compared_with_what_was_announced(tmp_path, written, message):
    write(tmp_path, state(4, 4))
    commit = Commit(tmp_path, state(8, 8), alone())
    assert commit.begin(needed=10, folders=("optimizer",))
    save_file(written, commit.folder / "optimizer" / "x.safetensors")
    announced = {"a": TensorSpec((2,), torch.float32)}
    with pytest.raises(RunError, match=message):
        commit.finish(state(8, 8), {"optimizer/x.safetensors": announced})
    assert names(tmp_path) == {"checkpoint-4"}


def test_a_truncated_file_is_noticed_before_it_counts(tmp_path):
    with pytest.raises(RunError, match=r"x\.safetensors — .*differs from what was written — the file system"):
        with new_checkpoint(tmp_path, state(8, 8)) as folder:
            save_file({"a": torch.ones(100)}, folder / "x.safetensors")
            with (folder / "x.safetensors").open("r+b") as file:
                file.truncate(200)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
def test_the_channel_mask_of_a_model_or_adapter_may_hold_minus_infinity(tmp_path, prefix):
    mask = {f"{prefix}multi_codebook_head.channel_mask": torch.tensor([0.0, -torch.inf])}
    with new_checkpoint(tmp_path, state(4, 4)) as folder:
        save_file(mask, folder / "model.safetensors")
    with pytest.raises(RunError, match="channel_mask — holds values"):
        with new_checkpoint(tmp_path, state(8, 8)) as folder:
            save_file({next(iter(mask)): torch.tensor([0.0, torch.nan])}, folder / "model.safetensors")


def test_what_an_interrupted_save_or_deletion_left_does_not_pile_up(tmp_path, monkeypatch):
    """Stopped in a save at step 5; resumed with another save interval; stopped in a deletion."""
    write(tmp_path, state(4, 4))
    (checkpoints_dir(tmp_path) / ".tmp-checkpoint-5").mkdir()
    (checkpoints_dir(tmp_path) / "checkpoint-5").mkdir()
    write(tmp_path, state(6, 6))
    assert names(tmp_path) == {"checkpoint-4", "checkpoint-6"}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(commit_module, "reached", Mock(side_effect=KeyboardInterrupt))
        rotate(tmp_path, keep=1)
    assert [c.state.global_step for c in complete_checkpoints(tmp_path)] == [6]
    write(tmp_path, state(7, 7))
    assert names(tmp_path) == {"checkpoint-6", "checkpoint-7"}


def test_saving_a_step_again_does_nothing(tmp_path):
    write(tmp_path, state(4, 4))
    inode = (checkpoints_dir(tmp_path) / "checkpoint-4").stat().st_ino
    assert not Commit(tmp_path, replace(state(4, 4), seconds=9.0), alone()).begin(needed=10)
    assert (checkpoints_dir(tmp_path) / "checkpoint-4").stat().st_ino == inode
    assert names(tmp_path) == {"checkpoint-4"}


def test_a_stage_that_is_stopped_before_its_first_step_keeps_the_end_of_the_one_before(tmp_path):
    write(tmp_path, state(10, 10))
    assert not Commit(tmp_path, state(10, 0, stage_index=1), alone()).begin(needed=10)


def test_a_step_of_another_run_is_an_error(tmp_path):
    write(tmp_path, state(4, 4))
    with pytest.raises(CheckpointError, match=r"checkpoint-4 — exists — .*another output_dir"):
        Commit(tmp_path, replace(state(4, 4), fingerprint={"seed": 4}), alone()).begin(needed=10)
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.state.fingerprint == {"seed": 3}


@pytest.mark.parametrize("noticed", [True, False])
def test_a_damaged_checkpoint_of_the_step_is_replaced(tmp_path, noticed):
    write(tmp_path, state(4, 4), state(8, 8))
    payload = checkpoints_dir(tmp_path) / "checkpoint-8" / "payload"
    payload.write_text("x" if noticed else "damaged")
    if noticed:
        set_damaged_aside(newest_intact(tmp_path).skipped)
    write(tmp_path, state(8, 8))
    assert payload.read_text() == "8"
    newest = newest_intact(tmp_path).checkpoint
    assert newest is not None and newest.state.global_step == 8


def test_rotation_keeps_stage_ends_and_the_newest_inside_stages(tmp_path):
    write(tmp_path, state(3, 3), state(6, 6), state(10, 10), state(13, 3, 1), state(16, 6, 1))
    rotate(tmp_path, keep=2)
    assert [c.state.global_step for c in complete_checkpoints(tmp_path)] == [10, 13, 16]


def test_rotation_spares_the_checkpoint_that_a_run_was_resumed_from(tmp_path):
    write(tmp_path, state(3, 3), state(6, 6), state(8, 8))
    rotate(tmp_path, keep=1, spare=checkpoints_dir(tmp_path) / "checkpoint-3")
    assert [c.state.global_step for c in complete_checkpoints(tmp_path)] == [3, 8]
    rotate(tmp_path, keep=1)
    assert [c.state.global_step for c in complete_checkpoints(tmp_path)] == [8]
    write(tmp_path, state(9, 9))
    rotate(tmp_path, keep=1, spare=checkpoints_dir(tmp_path) / "checkpoint-3")
    assert [c.state.global_step for c in complete_checkpoints(tmp_path)] == [9], "somebody has deleted it meanwhile"


def test_rotation_counts_whole_checkpoints_only(tmp_path):
    write(tmp_path, state(3, 3), state(6, 6), state(8, 8))
    for step in (6, 8):
        (checkpoints_dir(tmp_path) / f"checkpoint-{step}" / "payload").write_text("damaged")
    rotate(tmp_path, keep=1)
    newest = newest_intact(tmp_path).checkpoint
    assert newest is not None and newest.state.global_step == 3


def test_rotation_keeps_the_base_of_another_checkpoint(tmp_path):
    base = "checkpoints/checkpoint-3/model"
    write(tmp_path, state(3, 3), state(6, 6, adapter="kept", base=base), state(8, 8, adapter="kept", base=base))
    rotate(tmp_path, keep=1)
    assert [c.state.global_step for c in complete_checkpoints(tmp_path)] == [3, 8]


class Ranks:
    """Threads that play ranks: a collective waits until all have come."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.box: list[Any] = [None] * size

    def world(self, rank: int) -> World:
        def gather(value: Any) -> list[Any]:
            self.box[rank] = value
            self.barrier.wait()
            found = list(self.box)
            self.barrier.wait()
            return found

        fake = SimpleNamespace(
            rank=rank,
            size=self.size,
            is_main=rank == 0,
            gather_objects=gather,
            gather_ints=gather,
            from_main=lambda value: gather(value)[0],
            barrier=self.barrier.wait,
        )
        return cast(World, fake)

    def run(self, work: Callable[[int, World], object]) -> list[object]:
        """What each rank returned or raised."""
        results: list[object] = [None] * self.size

        def play(rank: int) -> None:
            try:
                results[rank] = work(rank, self.world(rank))
            except LuminaError as error:
                results[rank] = error

        threads = [threading.Thread(target=play, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads), "a rank hangs"
        return results


def save_as(rank: int, world: World, run_dir: Path, *, fail: int | None = None) -> Path:
    """Each rank writes a file; rank `fail` finds its disk full."""
    commit = Commit(run_dir, state(8, 8), world)
    assert commit.begin(needed=100, folders=("model",))
    name = f"model/part-{rank}"

    def work() -> None:
        time.sleep(0.02 * rank)
        if rank == fail:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(commit.folder / name))
        (commit.folder / name).write_text(str(rank))

    commit.together(work)
    commit.finish(state(8, 8), {name: None})
    return commit.final


def test_several_writers_make_one_manifest(tmp_path):
    (final, *others) = Ranks(3).run(lambda rank, world: save_as(rank, world, tmp_path))
    assert others == [final, final] and isinstance(final, Path)
    assert set(read_manifest(final)) == {"model/part-0", "model/part-1", "model/part-2", "state.json"}
    assert newest_intact(tmp_path).skipped == ()


@pytest.mark.parametrize("fail", [0, 2])
def test_one_writer_with_a_full_disk_stops_every_rank_with_the_same_error(tmp_path, fail):
    write(tmp_path, state(4, 4))
    results = Ranks(3).run(lambda rank, world: save_as(rank, world, tmp_path, fail=fail))
    assert all(isinstance(error, RunError) for error in results)
    assert len({str(error) for error in results}) == 1
    assert f"rank {fail} — " in str(results[0]) and f"part-{fail} — No space left" in str(results[0])
    assert names(tmp_path) == {"checkpoint-4"}


def test_a_directory_that_cannot_be_written_stops_every_rank_before_it_writes(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    results = Ranks(2).run(lambda rank, world: save_as(rank, world, tmp_path))
    assert len({str(error) for error in results}) == 1
    assert isinstance(results[0], RunError) and "rank 0 — " in str(results[0])


def test_every_marker_aside_is_gone_in_the_end(tmp_path):
    write(tmp_path, state(4, 4))
    found = {p.name for p in (checkpoints_dir(tmp_path) / "checkpoint-4").iterdir()}
    assert found == {"payload", "state.json", MARKER}


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (2 * 10**11, "200 GB")],
)
def test_sizes_have_a_unit_that_fits(count, text):
    assert size_text(count) == text
