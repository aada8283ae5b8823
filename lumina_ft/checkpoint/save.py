"""Writing a checkpoint from an engine of any ZeRO stage, one tensor at a time.

Every rank takes part: tensors are gathered, and each file is written by one of the ranks (`writers`). How the files
become a checkpoint is `commit`'s matter.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch.nn import Parameter
from transformers import PreTrainedModel

from lumina_ft.adapters.files import write_adapter
from lumina_ft.adapters.lora import Adapter
from lumina_ft.checkpoint import commit as commit_points
from lumina_ft.checkpoint.commit import Commit, rotate
from lumina_ft.checkpoint.directory import ADAPTER_DIR, MODEL_DIR, OPTIMIZER_DIR, TrainState, base_reference
from lumina_ft.checkpoint.experts import METADATA_KEY, agree_on_experts
from lumina_ft.checkpoint.model_files import ModelFiles, WholeWeights, adapter_bytes, base_identity
from lumina_ft.checkpoint.writers import FilePlan, Lane, plan_files
from lumina_ft.errors import ConfigError
from lumina_ft.models.groups import base_name, group_of
from lumina_ft.models.identity import BaseIdentity, identity_of
from lumina_ft.models.tensor_files import TensorSpec
from lumina_ft.parallel.dist import World
from lumina_ft.parallel.engine import Engine
from lumina_ft.parallel.state import STATE_KEYS, StateKey, gather_state
from lumina_ft.parallel.zero3 import full_shape

__all__ = ["ModelFiles", "save_checkpoint", "state_name"]

log = logging.getLogger(__name__)

AtEnd = Literal["keep", "merge", "drop"]


@dataclass(frozen=True)
class _Contents:
    """What a checkpoint consists of besides the optimizer.

    Attributes:
        model: `model/` is written; else `base` stands for it.
        merge: with the adapter merged into it.
        adapter: `adapter/` is written, and what becomes of it.
        base: model directory elsewhere.
        changed: groups of base weights that are stored beside the adapter.
    """

    model: bool
    merge: bool = False
    adapter: Literal["none", "kept", "dropped"] = "none"
    base: Path | None = None
    changed: tuple[str, ...] = ()


def save_checkpoint(
    run_dir: Path,
    *,
    engine: Engine,
    model: PreTrainedModel,
    state: TrainState,
    files: ModelFiles,
    world: World,
    keep: int,
    spare: Path | None = None,
    adapter: Adapter | None = None,
    at_end: AtEnd = "keep",
) -> None:
    """Write `checkpoints/checkpoint-N`, then delete old ones. Collective. Does nothing if it exists already.

    The model's directory is in the packed layout and in the dtype of the weights.

    Args:
        model: the module inside the engine.
        state: `base`, `base_identity`, `adapter` and `experts` are filled in here. `changed_groups` are all groups of
            base weights that may differ from `files.source_dir`, those of earlier stages with the same base included.
        keep: checkpoints inside stages that stay.
        spare: a checkpoint that stays as well, because the run was resumed from it and still reads its files.
        adapter: attached to the model.
        at_end: what becomes of the adapter, if the state is a stage's end.

    Raises:
        CheckpointError: a complete checkpoint of this step exists and belongs to another run.
        RunError: no room, a failing disk, values that aren't finite, or experts that no rank or two ranks hold; on
            every rank. Earlier checkpoints are intact.
    """
    experts = agree_on_experts(model, world)
    contents = _choose_contents(state, files, adapter, at_end)
    weights = WholeWeights(model, files, adapter, merge=contents.merge)
    trained = {base_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    model_plan = plan_files(weights.specs, world.size, "model") if contents.model else None
    optimizer_plan = plan_files(_optimizer_specs(trained), world.size, "optimizer")
    needed = optimizer_plan.num_bytes + (model_plan.num_bytes if model_plan else 0)
    if adapter is not None and contents.adapter != "none":
        modules = {n: s for n, s in weights.specs.items() if n in trained and group_of(n) in contents.changed}
        needed += adapter_bytes(model, adapter, modules)
    commit = Commit(run_dir, state, world)
    plans = {MODEL_DIR: model_plan, OPTIMIZER_DIR: optimizer_plan}
    if not commit.begin(needed=needed, started_from=spare, folders=tuple(name for name, plan in plans.items() if plan)):
        return
    identity: BaseIdentity | None = None
    if model_plan is not None:
        hashed = contents.adapter != "none"
        identity = _write_model(commit, model_plan, weights, model, files, hashed=hashed, experts=experts)
    if adapter is not None and contents.adapter != "none":
        if contents.base is not None:
            base = contents.base
            identity = commit.together(lambda: base_identity(base) if world.is_main else None)
        _write_adapter(commit, model, adapter, contents, identity, files)
    _write_optimizer(commit, optimizer_plan, engine, trained, experts)
    state = replace(
        state,
        base=base_reference(run_dir, contents.base) if contents.base else None,
        base_identity=identity.digest if identity else None,
        adapter=contents.adapter,
        changed_groups=contents.changed,
        experts=experts,
    )
    commit.finish(state, _own_files(commit, plans))
    commit.together(lambda: _rotate(run_dir, keep, spare) if world.is_main else None)


def _choose_contents(state: TrainState, files: ModelFiles, adapter: Adapter | None, at_end: AtEnd) -> _Contents:
    if adapter is None:
        return _Contents(model=True)
    if state.stage_finished and at_end == "merge":
        return _Contents(model=True, merge=True)
    changed = state.changed_groups
    adapted = {group_of(target.weight) for target in adapter.targets}
    if adapter.start and adapted & set(changed):
        both = ", ".join(sorted(adapted & set(changed)))
        raise ConfigError(
            f"lora.init — pissa — stage {state.stage_name!r} also trains {both} in full; PiSSA takes the adapter's "
            "start out of those weights, which must then stay as they are — freeze them, or use another init"
        )
    dropped = state.stage_finished and at_end == "drop"
    # Without the adapter's directory, what was trained beside it would be lost as well.
    own = files.source_dir is None or not adapter.can_store(changed) or (dropped and bool(changed))
    return _Contents(
        model=own,
        adapter="dropped" if dropped else "kept",
        base=None if own else files.source_dir,
        changed=() if own else changed,
    )


def _write_model(
    commit: Commit,
    plan: FilePlan,
    weights: WholeWeights,
    model: PreTrainedModel,
    files: ModelFiles,
    *,
    hashed: bool,
    experts: str,
) -> BaseIdentity | None:
    """`model/`; returns the identity of its weights, if wanted."""
    lane = Lane(commit, MODEL_DIR, plan, hashed=hashed, metadata={METADATA_KEY: experts})
    for name, owner in plan.destinations().items():
        wanted = owner == commit.rank
        if weights.is_replaced(name):
            tensor = commit.attempt(lambda name=name: weights.original(name)) if wanted else None
        else:
            tensor = weights.take(name, wanted=wanted)
        if tensor is not None:
            lane.put(name, tensor)
    lane.close()
    if commit.rank == 0:
        commit.attempt(lambda: files.complete_model(model, commit.folder / MODEL_DIR))
        if weights.lowest is not None:
            log.info("merged the adapter; lowest delta cosine %.6f (%s)", *weights.lowest)
    commit.agree()
    commit_points.reached("model_written")
    if not hashed:
        return None
    parts = commit.world.gather_objects(lane.hashes)
    return identity_of({name: value for part in parts for name, value in part.items()})


def _write_adapter(
    commit: Commit,
    model: PreTrainedModel,
    adapter: Adapter,
    contents: _Contents,
    identity: BaseIdentity | None,
    files: ModelFiles,
) -> None:
    base = contents.base or commit.final / MODEL_DIR
    folder = commit.folder / ADAPTER_DIR
    commit.attempt(
        lambda: write_adapter(
            folder if commit.rank == 0 else None,
            model,
            adapter,
            base=identity,
            base_name=str(base.resolve()),
            changed=contents.changed,
        )
    )
    if commit.rank == 0:
        commit.attempt(lambda: files.complete_adapter(folder))
    commit.agree()
    commit_points.reached("adapter_written")


def _write_optimizer(
    commit: Commit, plan: FilePlan, engine: Engine, trained: Mapping[str, Parameter], experts: str
) -> None:
    names: dict[str, tuple[str, StateKey]] = {state_name(n, key): (n, key) for n in trained for key in STATE_KEYS}
    destinations = {names[stored]: owner for stored, owner in plan.destinations().items()}
    lane = Lane(commit, OPTIMIZER_DIR, plan, metadata={METADATA_KEY: experts})
    for name, key, tensor in gather_state(engine, trained, destinations):
        if tensor is not None:
            lane.put(state_name(name, key), tensor)
    lane.close()
    commit_points.reached("optimizer_written")


def _optimizer_specs(trained: Mapping[str, Parameter]) -> dict[str, TensorSpec]:
    return {
        state_name(name, key): TensorSpec(tuple(full_shape(p)), torch.float32)
        for name, p in trained.items()
        for key in STATE_KEYS
    }


def _own_files(commit: Commit, plans: Mapping[str, FilePlan | None]) -> dict[str, Mapping[str, TensorSpec] | None]:
    """This rank's files with what is in them: its shards; for rank 0, also everything that no plan mentions."""
    owned: dict[str, tuple[int, Mapping[str, TensorSpec]]] = {
        f"{folder}/{name}": (rank, tensors)
        for folder, plan in plans.items()
        if plan is not None
        for rank in range(commit.world.size)
        for name, tensors in plan.files_of(rank).items()
    }
    own: dict[str, Mapping[str, TensorSpec] | None] = {n: t for n, (rank, t) in owned.items() if rank == commit.rank}
    if commit.rank == 0:
        present = (p.relative_to(commit.folder).as_posix() for p in commit.folder.rglob("*") if p.is_file())
        own |= {name: None for name in sorted(present) if name not in owned}
    return own


def _rotate(run_dir: Path, keep: int, spare: Path | None) -> None:
    """Delete old checkpoints. The new one is safe by now, so that a failure is no reason to end the run."""
    try:
        rotate(run_dir, keep, spare)
    except OSError as error:
        log.warning("%s — %s — old checkpoints stay — delete them by hand", error.filename, error.strerror)


def state_name(name: str, key: StateKey) -> str:
    """Name of a state tensor in `optimizer/`; `name` is the parameter's, without PEFT's `base_layer`."""
    return f"{name}::{key}"
