"""Writing a checkpoint from an engine of any ZeRO stage, one tensor at a time.

Every rank takes part, because tensors are gathered; rank 0 writes.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter
from transformers import PreTrainedModel

from lumina_ft.checkpoint.companions import write_companions
from lumina_ft.checkpoint.directory import MODEL_DIR, OPTIMIZER_FILE, TrainState, new_checkpoint, rotate
from lumina_ft.models.tensor_files import SINGLE_FILE, ShardWriter, TensorSpec
from lumina_ft.models.weights import ModelWriter, export_config
from lumina_ft.parallel.dist import World
from lumina_ft.parallel.engine import Engine
from lumina_ft.parallel.state import STATE_KEYS, StateKey, gather_state
from lumina_ft.parallel.zero3 import full_shape, gathered

_ONE_FILE = 1 << 62


@dataclass(frozen=True)
class ModelFiles:
    """Where the files that belong to a model besides its weights come from.

    Attributes:
        source_dir: model that the stage started from (config keys, code, tokenizer); None for random weights.
        dataset: built dataset of the stage: codec, system prompts, and the tokenizer where `source_dir` has none.
        block_tokens: L of the stage.
    """

    source_dir: Path | None
    dataset: Path
    block_tokens: int


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
) -> None:
    """Write `checkpoints/checkpoint-N` aside, rename it, delete old ones. Collective.

    The model's directory is in the packed layout and in the dtype of the weights. Master weights and moments of the
    trained parameters go to `optimizer.safetensors` as `name::key`.

    Args:
        model: the module inside the engine.
        keep: checkpoints inside stages that stay.
        spare: a checkpoint that stays as well, because the run was resumed from it and still reads its files.

    Raises:
        CheckpointError: a complete checkpoint of this step exists.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with ExitStack() as stack:
        folder = stack.enter_context(new_checkpoint(run_dir, state)) if world.is_main else None
        _write_model(folder, model, files)
        _write_optimizer(folder, engine, trained)
    if world.is_main:
        rotate(run_dir, keep, spare)
    world.barrier()


def _write_model(folder: Path | None, model: PreTrainedModel, files: ModelFiles) -> None:
    tensors: dict[str, Any] = model.state_dict(keep_vars=True)
    with ExitStack() as stack:
        writer = None
        if folder is not None:
            specs = {name: TensorSpec(tuple(full_shape(t)), t.dtype) for name, t in tensors.items()}
            dtype = next(model.parameters()).dtype
            writer = stack.enter_context(
                ModelWriter(
                    folder / MODEL_DIR,
                    specs,
                    layout="packed",
                    config_json=export_config(model.config, dtype, files.source_dir),
                    source_dir=files.source_dir,
                )
            )
        for name, tensor in tensors.items():
            with gathered([tensor]):
                if writer is not None:
                    writer.write(name, tensor.data)
    if folder is not None:
        write_companions(folder / MODEL_DIR, files.dataset, files.block_tokens)


def _write_optimizer(folder: Path | None, engine: Engine, trained: Mapping[str, Parameter]) -> None:
    with ExitStack() as stack:
        writer = None
        if folder is not None:
            specs = {
                state_name(name, key): TensorSpec(tuple(full_shape(p)), torch.float32)
                for name, p in trained.items()
                for key in STATE_KEYS
            }
            writer = stack.enter_context(ShardWriter(folder / "optimizer", specs, max_shard_bytes=_ONE_FILE))
        for name, key, tensor in gather_state(engine, trained):
            if writer is not None and tensor is not None:
                writer.write(state_name(name, key), tensor)
    if folder is not None:
        (folder / "optimizer" / SINGLE_FILE).rename(folder / OPTIMIZER_FILE)
        (folder / "optimizer").rmdir()


def state_name(name: str, key: StateKey) -> str:
    """Name of a state tensor in `optimizer.safetensors`."""
    return f"{name}::{key}"
