"""Checkpoints that were whole once: a resume names each damaged one and continues from the one before."""

from collections.abc import Callable
from pathlib import Path

import pytest
from fault_runs import STEPS, FaultRun

from lumina_ft.checkpoint.directory import MARKER
from lumina_ft.errors import CheckpointError
from lumina_ft.launch.resume import resume_point

STAGES = [{"name": "one", "steps": STEPS}]


def truncate(checkpoint: Path) -> str:
    """Half of the weights, as after a copy that was cut off."""
    path = checkpoint / "model" / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    return "model/model.safetensors has"


def flip_bit(checkpoint: Path) -> str:
    """One bit of the largest tensor file of the optimizer."""
    path = max((checkpoint / "optimizer").glob("*.safetensors"), key=lambda p: p.stat().st_size)
    with path.open("r+b") as file:
        file.seek(-5, 2)
        (byte,) = file.read(1)
        file.seek(-5, 2)
        file.write(bytes([byte ^ 1]))
    return f"optimizer/{path.name} has hash"


def remove_marker(checkpoint: Path) -> str:
    (checkpoint / MARKER).unlink()
    return f"no {MARKER}"


def remove_file(checkpoint: Path) -> str:
    (checkpoint / "model" / "config.json").unlink()
    return "model/config.json is missing"


def empty_marker(checkpoint: Path) -> str:
    (checkpoint / MARKER).write_text("")
    return MARKER


DAMAGES: tuple[Callable[[Path], str], ...] = (truncate, flip_bit, remove_marker, remove_file, empty_marker)


@pytest.fixture
def copy(work, reference, request) -> FaultRun:
    """A run that has ended, to be damaged."""
    run = FaultRun(work, f"damaged-{request.node.name}", stages=STAGES, keep_checkpoints=3)
    reference.copy_to(run)
    return run


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(copy, damage):
    damage(copy.checkpoints[STEPS])
    point = resume_point(copy.path)
    assert point.checkpoint == copy.checkpoints[STEPS - 1]
    assert (point.stage_index, point.inside_stage) == (0, True)


def test_a_resume_names_what_it_skips_and_ends_like_the_uninterrupted_run(copy, reference):
    expected = [
        (STEPS - offset, damage(copy.checkpoints[STEPS - offset]))
        for offset, damage in enumerate((remove_marker, truncate, flip_bit))
    ]
    launch = copy.launch(resume=True)
    assert (launch.code, launch.resumed_from) == (0, f"checkpoint-{STEPS - 3}"), launch.err
    for step, reason in expected:
        lines = [line for line in launch.err.splitlines() if f"checkpoint-{step} — {reason}" in line]
        assert len(lines) == 1 and "skip" in lines[0], launch.err
    copy.check_same_end(reference)


def test_a_run_without_any_whole_checkpoint_is_an_error_that_names_them_all(copy):
    damages = dict(zip(copy.checkpoints.items(), (truncate, flip_bit, remove_file, empty_marker), strict=True))
    expected = [(step, damage(path)) for (step, path), damage in damages.items()]
    launch = copy.launch(resume=True)
    assert launch.code == 2, launch.err
    assert launch.result is not None and launch.result["kind"] == CheckpointError.__name__
    for step, reason in expected:
        (line,) = [line for line in launch.err.splitlines() if f"checkpoint-{step} — " in line]
        assert reason in line
    assert len(copy.checkpoints) == len(expected), "nothing is deleted"
