"""Bytes that a rank really holds: of an engine's states, tensor by tensor, and of the whole process."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lumina_ft.parallel.footprint import StateBytes
from lumina_ft.parallel.zero3 import is_partitioned

if TYPE_CHECKING:
    from lumina_ft.parallel.engine import Engine

_STATUS = Path("/proc/self/status")


def measured_bytes(engine: "Engine") -> StateBytes:
    """Storage behind an engine's weights, gradients and optimizer state on this rank, as `StateBytes` defines them.

    Call it after the last backward pass of a step that isn't the first: AdamW's moments exist from the first update on.
    Shared storage counts once, for weights before gradients before optimizer. Attribute names are DeepSpeed's (0.19).
    """
    seen: set[int] = set()
    parameters = _new_bytes(_weights(engine.module), seen)
    gradients = _new_bytes(_gradients(engine), seen)
    return StateBytes(parameters, gradients, _new_bytes(_optimizer_tensors(engine), seen))


def anonymous_bytes() -> int:
    """Memory of this process that is its own: without mapped files and shared memory.

    Raises:
        OSError: not on Linux.
    """
    return _status()["RssAnon"]


def peak_anonymous_bytes() -> int:
    """The most that it ever had, if it maps and shares as much as then.

    Raises:
        OSError: not on Linux.
    """
    status = _status()
    return status["VmHWM"] - status["RssFile"] - status["RssShmem"]


def _status() -> dict[str, int]:
    """What the kernel says about this process's memory, in bytes."""
    fields = (line.split() for line in _STATUS.read_text(encoding="ascii").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if words[-1] == "kB"}


def _weights(module: nn.Module) -> Iterator[Tensor]:
    for param in module.parameters():
        if not is_partitioned(param):
            yield param.data
            continue
        managed: Any = param
        yield managed.ds_tensor
        # A large parameter may be whole for a moment too, when the next module that reads it is near.
        if getattr(managed, "ds_persist", False):
            yield param.data


def _gradients(engine: "Engine") -> Iterator[Tensor]:
    wrapper: Any = engine.ds_optimizer
    for param in engine.module.parameters():
        for grad in (param.grad, getattr(param, "grad_accum", None)):
            if grad is not None:
                yield grad
    yield from _tensors(getattr(wrapper, "grad_partitions_flat_buffer", None))
    yield from _tensors(getattr(wrapper, "fp32_groups_gradients_flat", None))
    for name in ("averaged_gradients", "all_grad_tensors"):
        yield from _tensors(list(getattr(wrapper, name, {}).values()))


def _optimizer_tensors(engine: "Engine") -> Iterator[Tensor]:
    wrapper: Any = engine.ds_optimizer
    names = (
        "fp32_groups",
        "fp32_groups_flat_partition",
        "single_partition_of_fp32_groups",
        "fp32_partitioned_groups_flat",
    )
    for name in names:
        yield from _tensors(getattr(wrapper, name, None))
    for state in engine.optimizer.state.values():
        yield from _tensors(list(state.values()))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors in nested lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _new_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the storages that no earlier tensor has."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
