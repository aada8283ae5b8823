"""Where a run continues: which stage, and from which checkpoint."""

from pathlib import Path
from typing import NamedTuple

from lumina_ft.checkpoint.directory import Skipped, newest_intact, read_state, stage_end
from lumina_ft.config.schema import RunConfig
from lumina_ft.errors import RunError
from lumina_ft.monitor.metrics import METRICS_FILE, cut_after


class ResumePoint(NamedTuple):
    """Where a run continues.

    Attributes:
        stage_index: the stage to run next.
        checkpoint: what it starts from; None: from `model`.
        inside_stage: the checkpoint lies inside that stage, which is continued rather than begun.
        skipped: newer checkpoints that can't be used, newest first.
    """

    stage_index: int
    checkpoint: Path | None
    inside_stage: bool = False
    skipped: tuple[Skipped, ...] = ()

    def describe(self) -> str:
        """For the user: what the run continues from, and what it doesn't and why."""
        lines = [f"skipped {entry}" for entry in self.skipped]
        return "\n".join([*lines, f"resuming from {self.checkpoint or 'the start: no complete checkpoint'}"])


def resume_point(run_dir: Path) -> ResumePoint:
    """The point that the newest complete and undamaged checkpoint of a run leads to. Reads that checkpoint whole.

    Raises:
        CheckpointError: there are finished checkpoints, and all of them are damaged.
    """
    newest, skipped = newest_intact(run_dir)
    if newest is None:
        return ResumePoint(0, None, skipped=skipped)
    finished = newest.state.stage_finished
    return ResumePoint(newest.state.stage_index + int(finished), newest.path, not finished, skipped)


def after_stage(run_dir: Path, stage_index: int) -> ResumePoint:
    """The point behind a stage that has just ended; its checkpoint was verified when it was written.

    Raises:
        RunError: the stage left no checkpoint.
    """
    end = stage_end(run_dir, stage_index)
    if end is None:
        raise RunError(
            f"{run_dir} — no complete checkpoint at the end of stage {stage_index} — the next stage starts from it — "
            "check disk space and log.txt, then --resume"
        )
    return ResumePoint(stage_index + 1, end.path)


def forget_lost_steps(run_dir: Path, earlier: RunConfig, point: ResumePoint) -> None:
    """Cut the records of steps that will run again, so that `metrics.jsonl` ends up like an uninterrupted run's.

    Args:
        earlier: config of the interrupted run, under whose stage names the records are.
    """
    path = run_dir / METRICS_FILE
    if point.checkpoint is None:
        path.unlink(missing_ok=True)
    elif point.stage_index < len(earlier.stages):
        done = read_state(point.checkpoint).stage_step if point.inside_stage else 0
        cut_after(path, earlier.stages[point.stage_index].name, done)
