"""A disk that is full, and a folder that can't be written: a clear error, and nothing lost but the step."""

import os
from pathlib import Path

import pytest
from fault_runs import STEPS, Fault, FaultRun, Launch
from small_disk import SmallDisk, small_disk

STAGES = [{"name": "one", "steps": STEPS}]

ORDINARY_USER = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
"""Makes permissions count for root as they do for everybody else."""


def size_of(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())


def check_failed_save(launch: Launch, run: FaultRun, step: int, reason: str) -> None:
    """The run says in one line which checkpoint couldn't be written and why; the one before is whole."""
    assert launch.code == 1, launch.err
    assert launch.result is not None and launch.result["kind"] == "RunError"
    errors = [line for line in launch.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, launch.err
    for text in (reason, f"checkpoint-{step}", f"checkpoint-{step - 1} is intact", "--resume"):
        assert text in errors[0]
    assert "Traceback" not in launch.err
    assert run.newest_whole() == f"checkpoint-{step - 1}"
    assert max(run.checkpoints) == step - 1


def fill(disk: SmallDisk, left_bytes: int) -> tuple[str, str]:
    """What another program may do at any time: take the room of a disk, but for some bytes."""
    free = f"$(df --output=avail --block-size=1 '{disk.path}' | tail -n 1)"
    return "shell", f"fallocate --length $(({free} - {left_bytes})) '{disk.path}/ballast'"


@pytest.mark.parametrize("then_locked", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["full", "both"])
def test_a_disk_that_fills_up_and_a_read_only_folder_cost_nothing_but_the_step(work, reference, then_locked):
    """One run that meets the first, or one and the other, while it writes a checkpoint, and then neither."""
    size = size_of(reference.checkpoints[STEPS])
    name = "both" if then_locked else "full"
    with small_disk(work / name, 8 * size) as disk:
        run = FaultRun(
            work,
            f"{name}/run",
            prefix=(*(disk.prefix if disk else ()), *ORDINARY_USER),
            seen_at=disk and disk.seen_at / "run",
            stages=STAGES,
            keep_checkpoints=1,
        )
        # Without mounts, the largest size of a file stands in for the end of the disk.
        full = fill(disk, size // 4) if disk else ("limit", size // 4)
        first = run.launch(fault=Fault("made", (full,), arrival=2))
        check_failed_save(first, run, 2, "No space left on device" if disk else "File too large")
        if disk:
            disk.run(f"rm '{disk.path}/ballast'")

        if then_locked:
            locked = ("shell", f"chmod 555 '{run.output}/checkpoints'")
            second = run.launch(resume=True, fault=Fault("step", (locked,), arrival=2))
            assert second.resumed_from == "checkpoint-1"
            check_failed_save(second, run, 3, "Permission denied")
            (run.path / "checkpoints").chmod(0o755)

        last = run.launch(resume=True)
        assert (last.code, last.resumed_from) == (0, "checkpoint-2" if then_locked else "checkpoint-1"), last.err
        run.check_same_end(reference)


@pytest.mark.slow
def test_a_disk_too_small_from_the_start_and_one_without_a_byte_left(work, reference):
    """Room for one checkpoint and a half is noticed before anything is written. Then not even the log can be."""
    size = size_of(reference.checkpoints[STEPS])
    with small_disk(work / "tiny", int(1.5 * size)) as disk:
        if disk is None:
            pytest.fail("this test needs a system that allows mounts, at least in a user namespace")
        run = FaultRun(
            work, "tiny/run", prefix=disk.prefix, seen_at=disk.seen_at / "run", stages=STAGES, keep_checkpoints=1
        )
        check_failed_save(run.launch(), run, 2, "no room")

        disk.run(f"mount -o remount,size={8 * size} '{disk.path}'")
        second = run.launch(resume=True, fault=Fault("step", (fill(disk, 0),), arrival=3))
        assert (second.code, second.resumed_from) == (1, "checkpoint-1"), second.err
        assert second.result is not None and second.result["kind"] == "RunError"
        assert "No space left on device" in second.result["error"]
        assert "Traceback" not in second.err
        assert run.newest_whole() == "checkpoint-3"

        still_full = run.launch(resume=True)
        assert still_full.code == 1, still_full.err
        assert "No space left on device" in still_full.err and "Traceback" not in still_full.err
        assert run.newest_whole() == "checkpoint-3"

        disk.run(f"rm '{disk.path}/ballast'")
        third = run.launch(resume=True)
        assert (third.code, third.resumed_from) == (0, "checkpoint-3"), third.err
        run.check_same_end(reference)


def test_an_output_folder_that_cannot_be_written_is_an_error_before_anything_starts(work):
    folder = work / "read-only"
    folder.mkdir()
    folder.chmod(0o555)
    launch = FaultRun(work, "read-only/run", prefix=ORDINARY_USER, stages=STAGES).launch()
    assert launch.code == 2
    assert f"error: output_dir — '{folder}/run' — {folder} is not writable" in launch.err
    assert list(folder.iterdir()) == []
