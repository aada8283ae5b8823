"""Continuing a stage from a checkpoint: what must agree, and the optimizer's state into a fresh engine.

Weights are loaded like any model's, from the checkpoint's `model/`. With the same number of ranks the continued run is
identical bit for bit where kernels are deterministic (on the CPU); with another one the order of additions differs.
"""

from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import Parameter

from lumina_ft.checkpoint.directory import OPTIMIZER_FILE, Checkpoint
from lumina_ft.checkpoint.save import state_name
from lumina_ft.errors import CheckpointError
from lumina_ft.parallel.engine import Engine
from lumina_ft.parallel.state import STATE_KEYS, StateKey, load_state
from lumina_ft.parallel.zero3 import full_shape


def check_fingerprint(checkpoint: Checkpoint, current: Mapping[str, Any]) -> None:
    """Compare what determines the remaining steps.

    Raises:
        CheckpointError: the first difference, with both values.
    """
    saved = checkpoint.state.fingerprint
    for key in sorted({*saved, *current}):
        if saved.get(key) != current.get(key):
            raise CheckpointError(
                f"{checkpoint.path} — {key} was {saved.get(key)!r}, is {current.get(key)!r} — a resumed stage trains "
                "the same parameters on the same packs — restore the configuration, or start a new run"
            )


def load_optimizer(checkpoint: Checkpoint, engine: Engine, trained: Mapping[str, Parameter]) -> None:
    """Fill the engine's optimizer from `optimizer.safetensors`.

    Args:
        trained: trainable parameters by name.

    Raises:
        CheckpointError: the file is damaged, or holds other parameters or shapes.
    """
    path = checkpoint.path / OPTIMIZER_FILE
    try:
        with safe_open(path, framework="pt") as file:
            expected = {
                state_name(name, key): tuple(full_shape(p)) for name, p in trained.items() for key in STATE_KEYS
            }
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
            for name in sorted({*expected, *found}):
                if expected.get(name) != found.get(name):
                    raise CheckpointError(
                        f"{path} — {name}: {found.get(name, 'absent')} in the file, {expected.get(name, 'absent')} in "
                        "the stage — both must agree — the checkpoint is of another run or stage"
                    )

            def read(name: str, key: StateKey) -> Tensor:
                return file.get_tensor(state_name(name, key))

            load_state(engine, trained, read, adam_steps=checkpoint.state.adam_steps)
    except (SafetensorError, OSError) as err:
        raise CheckpointError(
            f"{path} — {err} — must be a complete safetensors file — resume from an earlier checkpoint"
        ) from err
