"""Where a run continues: which stage, and from which checkpoint."""

from pathlib import Path
from typing import NamedTuple

from lumina_ft.checkpoint.directory import newest_checkpoint, stage_end
from lumina_ft.config.schema import RunConfig
from lumina_ft.errors import RunError
from lumina_ft.monitor.metrics import METRICS_FILE, cut_after


class ResumePoint(NamedTuple):
    """The stage to run next and the checkpoint it starts from (None: from `model`)."""

    stage_index: int
    checkpoint: Path | None


def resume_point(run_dir: Path) -> ResumePoint:
    """The point that the newest complete checkpoint of a run leads to.

    Raises:
        CheckpointError: a checkpoint is marked complete but can't be read.
    """
    newest = newest_checkpoint(run_dir)
    if newest is None:
        return ResumePoint(0, None)
    return ResumePoint(newest.state.stage_index + int(newest.state.stage_finished), newest.path)


def after_stage(run_dir: Path, stage_index: int) -> ResumePoint:
    """The point behind a stage that has just ended.

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


def forget_lost_steps(cfg: RunConfig, point: ResumePoint) -> None:
    """Cut the records of steps that will run again, so that `metrics.jsonl` ends up like an uninterrupted run's."""
    path = cfg.output_dir / METRICS_FILE
    if point.checkpoint is None:
        path.unlink(missing_ok=True)
    elif point.stage_index < len(cfg.stages):
        newest = newest_checkpoint(cfg.output_dir)
        assert newest is not None and newest.path == point.checkpoint
        done = 0 if newest.state.stage_finished else newest.state.stage_step
        cut_after(path, cfg.stages[point.stage_index].name, done)
