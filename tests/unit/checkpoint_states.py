"""Checkpoints of next to nothing, for tests of what surrounds them."""

from pathlib import Path

from lumina_ft.checkpoint.commit import new_checkpoint
from lumina_ft.checkpoint.directory import TrainState


def state(global_step: int, stage_step: int, stage_index: int = 0, stage_steps: int = 10, **more) -> TrainState:
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
        **more,
    )


def write(run_dir: Path, *states: TrainState) -> None:
    for s in states:
        with new_checkpoint(run_dir, s) as folder:
            (folder / "payload").write_text(str(s.global_step))
