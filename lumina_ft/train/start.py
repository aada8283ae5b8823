"""Where a stage's weights and adapter come from."""

from dataclasses import dataclass
from pathlib import Path

from lumina_ft.checkpoint.directory import Checkpoint, read_state
from lumina_ft.config.schema import RunConfig
from lumina_ft.errors import CheckpointError


@dataclass(frozen=True)
class Start:
    """What a stage begins with.

    Attributes:
        weights: model directory; None: random weights.
        adapter: adapter directory to continue, with the modules stored beside it; None: no adapter yet.
        changed: groups of base weights that differ from those in `weights`; `adapter` holds them.
        checkpoint: that all this is from; None at the start of a run.
        inside: `checkpoint`, if it lies inside this stage.
        global_step: optimizer steps of earlier stages.
    """

    weights: Path | None
    adapter: Path | None
    changed: frozenset[str]
    checkpoint: Checkpoint | None
    inside: Checkpoint | None
    global_step: int


def find_start(cfg: RunConfig, stage_index: int, resume: Path | None) -> Start:
    """Where the stage starts, from the checkpoint's state.

    Raises:
        CheckpointError: the checkpoint doesn't lead into this stage, or its base is gone.
    """
    if resume is None:
        if stage_index:
            raise CheckpointError(
                f"stage {stage_index + 1} — started without a checkpoint — it starts from the end of stage "
                f"{stage_index} — pass that checkpoint"
            )
        return Start(cfg.model.path, None, frozenset(), None, None, 0)
    checkpoint = Checkpoint(resume, read_state(resume))
    state = checkpoint.state
    inside = state.stage_index == stage_index and not state.stage_finished
    if not inside and not (state.stage_index == stage_index - 1 and state.stage_finished):
        raise CheckpointError(
            f"{resume} — stage {state.stage_name!r}, step {state.stage_step} of {state.stage_steps} — doesn't lead "
            f"into stage {cfg.stages[stage_index].name!r} — resume from inside that stage or from the end of the one "
            "before"
        )
    kept = state.adapter == "kept"
    return Start(
        weights=checkpoint.base_dir,
        adapter=checkpoint.adapter_dir if kept else None,
        changed=frozenset(state.changed_groups if kept else ()),
        checkpoint=checkpoint,
        inside=checkpoint if inside else None,
        global_step=state.global_step - (state.stage_step if inside else 0),
    )
