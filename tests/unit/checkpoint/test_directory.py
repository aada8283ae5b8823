"""Checkpoint directories: which count as complete, the newest, the intact one, stage ends, bases."""

from pathlib import Path

import pytest
from checkpoint_states import state, write

from lumina_ft.checkpoint.commit import rotate
from lumina_ft.checkpoint.directory import (
    DAMAGED_MARKER,
    MARKER,
    Checkpoint,
    base_reference,
    checkpoints_dir,
    complete_checkpoints,
    holding_checkpoint,
    newest_checkpoint,
    newest_intact,
    read_state,
    set_damaged_aside,
    stage_end,
)
from lumina_ft.errors import CheckpointError


def path_of(run_dir: Path, step: int) -> Path:
    return checkpoints_dir(run_dir) / f"checkpoint-{step}"


def test_checkpoint_appears_complete_with_its_state(tmp_path):
    saved = state(4, 4, adapter="kept", base="/models/base", base_identity="ab", changed_groups=("lm_head",))
    write(tmp_path, saved)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.path.name == "checkpoint-4"
    assert found.state == saved
    assert (found.path / "payload").read_text() == "4"


def test_newest_counts_by_number_not_by_name(tmp_path):
    write(tmp_path, state(9, 9), state(10, 10), state(11, 1, stage_index=1))
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.state.global_step == 11


def test_stage_end_is_found_by_stage(tmp_path):
    write(tmp_path, state(6, 6), state(10, 10), state(16, 6, 1))
    end = stage_end(tmp_path, 0)
    assert end is not None and end.state.global_step == 10
    assert stage_end(tmp_path, 1) is None


def test_a_run_without_checkpoints_has_none(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    assert newest_intact(tmp_path) == (None, ())


def damage_size(path: Path) -> str:
    (path / "payload").write_text("longer")
    return "payload has 6 bytes, was written with 1"


def damage_content(path: Path) -> str:
    (path / "payload").write_text("x")
    return "payload has hash "


def lose_file(path: Path) -> str:
    (path / "payload").unlink()
    return "payload is missing"


def lose_marker(path: Path) -> str:
    (path / MARKER).unlink()
    return "no COMPLETE: never finished"


def break_marker(path: Path) -> str:
    (path / MARKER).write_text("step 8\n")
    return "must list each file"


def empty_manifest(path: Path) -> str:
    (path / MARKER).write_text("{}")
    return "lists no file"


DAMAGES = (damage_size, damage_content, lose_file, lose_marker, break_marker, empty_manifest)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_a_damaged_checkpoint_is_skipped_and_named_with_the_reason(tmp_path, damage):
    write(tmp_path, state(4, 4), state(8, 8))
    reason = damage(path_of(tmp_path, 8))
    newest, (skipped,) = newest_intact(tmp_path)
    assert newest is not None and newest.state.global_step == 4
    assert str(skipped).startswith(f"{path_of(tmp_path, 8)} — ") and reason in str(skipped)
    assert skipped.was_complete == (damage is not lose_marker)


@pytest.mark.parametrize("damage", [d for d in DAMAGES if d is not damage_content], ids=lambda f: f.__name__)
def test_what_sizes_tell_is_seen_without_hashing(tmp_path, damage):
    write(tmp_path, state(4, 4), state(8, 8))
    damage(path_of(tmp_path, 8))
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.state.global_step == 4
    assert [c.state.global_step for c in complete_checkpoints(tmp_path)] == [4]


def test_a_state_of_another_version_is_named(tmp_path):
    write(tmp_path, state(4, 4))
    file = path_of(tmp_path, 4) / "state.json"
    file.write_text('{"global_step": 4}')
    with pytest.raises(CheckpointError, match=r"state\.json — .*stage_index"):
        read_state(path_of(tmp_path, 4))


def test_all_damaged_is_an_error_that_names_each(tmp_path):
    write(tmp_path, state(4, 4), state(8, 8), state(9, 9))
    lose_file(path_of(tmp_path, 4))
    damage_content(path_of(tmp_path, 8))
    lose_marker(path_of(tmp_path, 9))
    with pytest.raises(CheckpointError) as caught:
        newest_intact(tmp_path)
    nine, eight, four, conclusion = str(caught.value).splitlines()
    assert "checkpoint-9 — no COMPLETE" in nine and "checkpoint-8 — payload has hash" in eight
    assert "checkpoint-4 — payload is missing" in four
    assert "every checkpoint is damaged" in conclusion


def test_only_unfinished_checkpoints_mean_a_start_from_the_beginning(tmp_path):
    write(tmp_path, state(4, 4))
    lose_marker(path_of(tmp_path, 4))
    newest, skipped = newest_intact(tmp_path)
    assert newest is None and len(skipped) == 1


def test_a_damaged_checkpoint_that_was_set_aside_counts_for_nothing_but_stays(tmp_path):
    write(tmp_path, state(4, 4), state(8, 8))
    damage_content(path_of(tmp_path, 8))
    set_damaged_aside(newest_intact(tmp_path).skipped)
    assert [c.state.global_step for c in complete_checkpoints(tmp_path)] == [4]
    assert (path_of(tmp_path, 8) / DAMAGED_MARKER).is_file() and (path_of(tmp_path, 8) / "payload").is_file()
    (skipped,) = newest_intact(tmp_path).skipped
    assert skipped.was_complete and "found damaged before" in skipped.reason


def test_a_base_inside_the_run_is_relative_and_one_outside_absolute(tmp_path):
    run_dir, outside = tmp_path / "run", tmp_path / "models" / "base"
    write(run_dir, state(4, 4))
    inside = path_of(run_dir, 4) / "model"
    for folder in (inside, outside):
        folder.mkdir(parents=True)
    assert base_reference(run_dir, inside) == "checkpoints/checkpoint-4/model"
    assert base_reference(run_dir, outside) == str(outside)
    for folder in (inside, outside):
        checkpoint = Checkpoint(path_of(run_dir, 8), state(8, 8, adapter="kept", base=base_reference(run_dir, folder)))
        assert checkpoint.base_dir == folder and checkpoint.model_dir == folder
        assert checkpoint.adapter_dir == path_of(run_dir, 8) / "adapter"
    assert holding_checkpoint(run_dir, "checkpoints/checkpoint-4/model") == path_of(run_dir, 4)
    assert holding_checkpoint(run_dir, str(outside)) is None
    assert holding_checkpoint(run_dir, None) is None


def test_the_base_is_found_where_the_folder_of_checkpoints_is_a_link_to_another_disk(tmp_path):
    """Or the rotation would delete it."""
    run_dir, elsewhere = tmp_path / "run", tmp_path / "scratch"
    elsewhere.mkdir()
    run_dir.mkdir()
    checkpoints_dir(run_dir).symlink_to(elsewhere)
    write(run_dir, *(state(n, n) for n in (1, 2, 3)))
    base = path_of(run_dir, 1) / "model"
    base.mkdir()
    reference = base_reference(run_dir, base)
    assert holding_checkpoint(run_dir, reference) == path_of(run_dir, 1)
    write(run_dir, state(4, 4, adapter="kept", base=reference))
    rotate(run_dir, 1)
    assert [c.state.global_step for c in complete_checkpoints(run_dir)] == [1, 4]


def test_a_base_that_is_gone_or_damaged_makes_its_checkpoint_useless(tmp_path):
    write(tmp_path, state(4, 4), state(8, 8, adapter="kept", base="checkpoints/checkpoint-4/model"))
    gone = Checkpoint(path_of(tmp_path, 8), read_state(path_of(tmp_path, 8)))
    with pytest.raises(CheckpointError, match="base .*checkpoint-4/model.* — no such directory"):
        _ = gone.base_dir
    newest, (skipped,) = newest_intact(tmp_path)
    assert newest is not None and newest.state.global_step == 4 and "no such directory" in skipped.reason
    (path_of(tmp_path, 4) / "model").mkdir()
    assert newest_intact(tmp_path).skipped == ()
    damage_content(path_of(tmp_path, 4))
    with pytest.raises(CheckpointError, match="its base checkpoints/checkpoint-4/model: payload has hash"):
        newest_intact(tmp_path)
