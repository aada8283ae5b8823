"""Checkpoint directories: whole or absent, newest first, stage ends stay."""

import errno
import os
from dataclasses import replace
from unittest.mock import Mock

import pytest

from lumina_ft.checkpoint.directory import (
    MARKER,
    TrainState,
    checkpoints_dir,
    complete_checkpoints,
    new_checkpoint,
    newest_checkpoint,
    rotate,
    stage_end,
)
from lumina_ft.errors import CheckpointError, RunError


def state(global_step: int, stage_step: int, stage_index: int = 0, stage_steps: int = 10) -> TrainState:
    return TrainState(
        global_step=global_step,
        stage_index=stage_index,
        stage_name=f"s{stage_index}",
        stage_step=stage_step,
        stage_steps=stage_steps,
        adam_steps=stage_step,
        seconds=1.5,
        tokens=100,
        fingerprint={"seed": 3},
    )


def write(run_dir, *states: TrainState) -> None:
    for s in states:
        with new_checkpoint(run_dir, s) as folder:
            (folder / "payload").write_text(str(s.global_step))


def test_checkpoint_appears_complete_with_its_state(tmp_path):
    write(tmp_path, state(4, 4))
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.path.name == "checkpoint-4"
    assert found.state == state(4, 4)
    assert (found.path / "payload").read_text() == "4"
    assert (found.path / MARKER).is_file()


def test_nothing_is_left_of_a_checkpoint_that_fails(tmp_path):
    write(tmp_path, state(4, 4))
    with pytest.raises(ZeroDivisionError):
        with new_checkpoint(tmp_path, state(8, 8)) as folder:
            (folder / "payload").write_text("half")
            raise ZeroDivisionError
    assert [p.name for p in checkpoints_dir(tmp_path).iterdir()] == ["checkpoint-4"]


def test_a_full_disk_is_a_failed_run_with_a_way_out(tmp_path):
    with pytest.raises(RunError, match="checkpoint-8 — No space left on device — .* --resume"):
        with new_checkpoint(tmp_path, state(8, 8)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(checkpoints_dir(tmp_path).iterdir()) == []


def test_what_an_interrupted_save_or_deletion_left_does_not_pile_up(tmp_path, monkeypatch):
    """Stopped in a save at step 5; resumed with another save interval; stopped in a deletion."""
    write(tmp_path, state(4, 4))
    (checkpoints_dir(tmp_path) / ".tmp-checkpoint-5").mkdir()
    write(tmp_path, state(6, 6))
    assert {p.name for p in checkpoints_dir(tmp_path).iterdir()} == {"checkpoint-4", "checkpoint-6"}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", Mock(side_effect=KeyboardInterrupt))
        rotate(tmp_path, keep=1)
    assert [c.state.global_step for c in complete_checkpoints(tmp_path)] == [6]
    write(tmp_path, state(7, 7))
    assert {p.name for p in checkpoints_dir(tmp_path).iterdir()} == {"checkpoint-6", "checkpoint-7"}


def test_unfinished_directories_are_passed_over_and_replaced(tmp_path):
    write(tmp_path, state(4, 4))
    torn = checkpoints_dir(tmp_path) / "checkpoint-8"
    torn.mkdir()
    (torn / "payload").write_text("torn")
    (checkpoints_dir(tmp_path) / ".tmp-checkpoint-8").mkdir()
    assert [c.state.global_step for c in complete_checkpoints(tmp_path)] == [4]
    write(tmp_path, state(8, 8))
    assert (torn / "payload").read_text() == "8"


def test_newest_counts_by_number_not_by_name(tmp_path):
    write(tmp_path, state(9, 9), state(10, 10), state(11, 1, stage_index=1))
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.state.global_step == 11


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


def test_stage_end_is_found_by_stage(tmp_path):
    write(tmp_path, state(6, 6), state(10, 10), state(16, 6, 1))
    end = stage_end(tmp_path, 0)
    assert end is not None and end.state.global_step == 10
    assert stage_end(tmp_path, 1) is None


def test_a_step_is_written_once(tmp_path):
    write(tmp_path, state(4, 4))
    with pytest.raises(CheckpointError, match=r"checkpoint-4 — exists — .*another output_dir"):
        write(tmp_path, replace(state(4, 4), tokens=1))
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.state.tokens == 100


def test_unreadable_state_of_a_complete_checkpoint_is_an_error(tmp_path):
    write(tmp_path, state(4, 4))
    (checkpoints_dir(tmp_path) / "checkpoint-4" / "state.json").write_text('{"global_step": 4}')
    with pytest.raises(CheckpointError, match=r"state\.json — .*stage_index"):
        newest_checkpoint(tmp_path)
