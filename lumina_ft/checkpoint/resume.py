"""Continuing a stage from a checkpoint: what must agree, and the optimizer's state into a fresh engine.

Weights are loaded like any model's, from the checkpoint's base, and the adapter from its directory. With the same
number of ranks the continued run is identical bit for bit where kernels are deterministic (on the CPU); with another
one the order of additions differs.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from lumina_ft.checkpoint.directory import OPTIMIZER_DIR, Checkpoint
from lumina_ft.checkpoint.model_files import base_identity
from lumina_ft.checkpoint.save import state_name
from lumina_ft.errors import CheckpointError
from lumina_ft.models.groups import base_name
from lumina_ft.models.tensor_files import CheckpointReader
from lumina_ft.parallel.dist import World, work_apart
from lumina_ft.parallel.engine import Engine
from lumina_ft.parallel.progress import LOAD, Progress
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


def check_base(checkpoint: Checkpoint, world: World) -> None:
    """Make sure that the base outside the checkpoint is the one that its adapter was trained on. Collective.

    Raises:
        CheckpointError: it holds other weights; on every rank.
    """
    wanted = checkpoint.state.base_identity
    if checkpoint.state.base is None or wanted is None:
        return
    base = checkpoint.base_dir
    # Rank 0 may read for longer than a collective may take.
    found = world.from_main(work_apart(world, lambda: base_identity(base).digest if world.is_main else None))
    if found != wanted:
        raise CheckpointError(
            f"{base} — hash {found} — the adapter in {checkpoint.path} was trained on {wanted} — bring that base back"
        )


def load_optimizer(
    checkpoint: Checkpoint, engine: Engine, trained: Mapping[str, Parameter], progress: Progress | None = None
) -> None:
    """Fill the engine's optimizer from `optimizer/`. Each rank reads the parts that it holds.

    Args:
        trained: trainable parameters by name.
        progress: gets a mark for each tensor.

    Raises:
        CheckpointError: a file is damaged, or they hold other parameters or shapes.
    """
    folder = checkpoint.path / OPTIMIZER_DIR
    named = {base_name(name): p for name, p in trained.items()}
    expected = {state_name(name, key): tuple(full_shape(p)) for name, p in named.items() for key in STATE_KEYS}
    with CheckpointReader(folder, "optimizer") as reader:
        found = {name: stored.shape for name, stored in reader.tensors.items()}
        for name in sorted({*expected, *found}):
            if expected.get(name) != found.get(name):
                raise CheckpointError(
                    f"{folder} — {name}: {found.get(name, 'absent')} in the file, {expected.get(name, 'absent')} in "
                    "the stage — both must agree — the checkpoint is of another run or stage"
                )

        def read(name: str, key: StateKey) -> Tensor:
            if progress is not None:
                progress.mark(LOAD)
            return reader.read(state_name(name, key))

        load_state(engine, named, read, adam_steps=checkpoint.state.adam_steps)
