"""Which base and adapter a run has come to."""

from pathlib import Path
from typing import NamedTuple

from lumina_ft.checkpoint.directory import complete_checkpoints
from lumina_ft.config.schema import RunConfig
from lumina_ft.errors import CheckpointError


class AdapterSource(NamedTuple):
    """base: model directory that the adapter was trained on. adapter: PEFT directory."""

    base: Path
    adapter: Path


def adapter_of_run(cfg: RunConfig) -> AdapterSource:
    """The adapter of a run's newest complete checkpoint, and its base.

    Raises:
        CheckpointError: no complete checkpoint; it has no adapter, because a stage merged it or there never was one; or
            the base is gone.
    """
    found = complete_checkpoints(cfg.output_dir)
    if not found:
        raise CheckpointError(
            f"{cfg.output_dir} — no complete checkpoint — a merge takes the newest one's adapter — check output_dir, "
            "or give --base, --adapter and --output"
        )
    newest = found[-1]
    if newest.adapter_dir is not None:
        return AdapterSource(newest.base_dir, newest.adapter_dir)
    state = newest.state
    stage = cfg.stages[state.stage_index] if state.stage_index < len(cfg.stages) else None
    merged = stage is not None and state.stage_finished and stage.lora != "off" and stage.lora_at_end == "merge"
    why = "ended with lora_at_end: merge, so its adapter is merged already" if merged else "has no adapter"
    raise CheckpointError(
        f"{newest.path} — stage {state.stage_name!r} {why} — there is nothing to merge — the model is "
        f"{newest.model_dir}"
    )
