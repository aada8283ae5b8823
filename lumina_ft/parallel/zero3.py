"""The one door to weights that may be partitioned (ZeRO-3): build, look at shapes, gather, write.

Everything works on plain parameters too, so callers don't ask which ZeRO stage they run under.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter


def is_partitioned(param: Tensor) -> bool:
    """Whether ZeRO-3 manages this parameter."""
    return hasattr(param, "ds_id")


def full_shape(param: Tensor) -> torch.Size:
    """Shape of the whole parameter; `param.shape` is empty while it is partitioned."""
    return torch.Size(getattr(param, "ds_shape", param.shape))


def init_context(ds_config: dict[str, Any], dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Build a model inside: under ZeRO-3 each module's parameters are cast and partitioned as soon as it exists.

    Buffers keep their declared dtype and value. DeepSpeed's own context replaces torch's tensor constructors by ones
    that return `dtype`, which turns fp32 buffers into bf16 (a rotary `inv_freq` is then off by 2.7 rad at position
    8192); here no constructor is replaced and only parameters are cast.

    Args:
        ds_config: resolved configuration.
        dtype: of the parameters, under ZeRO-3. Other stages leave them as built; the engine casts.
    """
    if ds_config["zero_optimization"]["stage"] != 3:
        return nullcontext()
    import deepspeed

    class PartitionParameters(deepspeed.zero.Init):
        def _post_init_method(self, module: nn.Module) -> None:
            for param in module.parameters(recurse=False):
                if not is_partitioned(param) and param.is_floating_point():
                    param.data = param.data.to(dtype)
            super()._post_init_method(module)

    return PartitionParameters(config_dict_or_path=ds_config, dtype=dtype, tensor_overrides=[])


def place_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers to the training device, dtypes as they are; the engine moves parameters, but not these at ZeRO-3."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


@contextmanager
def gathered(params: Iterable[Tensor]) -> Iterator[None]:
    """Whole parameters inside the block, for reading. Collective: every rank enters with the same parameters."""
    absent = _absent(params)
    if not absent:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(absent):
        yield


def gather_for_good(params: Iterable[Parameter]) -> None:
    """Make partitioned parameters whole until the optimizer partitions them again. Collective."""
    absent = _absent(params)
    if absent:
        absent[0].all_gather(absent)  # pyright: ignore[reportAttributeAccessIssue]


def reads_also(module: nn.Module, params: Iterable[Parameter]) -> None:
    """Let ZeRO-3 gather parameters of other modules too whenever `module` runs, forward and backward.

    For a module whose forward reads them outside their own modules' forward, as DoRA's does. (Marking the surrounding
    module as DeepSpeed's "leaf" is no way out: where its input needs no gradient, its gradients are reduced before they
    have been computed.) Must be called before the engine exists.
    """
    import deepspeed

    for param in params:
        deepspeed.zero.register_external_parameter(module, param)


def _absent(params: Iterable[Tensor]) -> list[Parameter]:
    """Parameters of which this rank holds a part only; the same on every rank."""
    managed: list[Any] = [p for p in params if is_partitioned(p)]
    if not managed:
        return []
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return [p for p in managed if p.ds_status is ZeroParamStatus.NOT_AVAILABLE]


def write_tensor(target: Tensor, value: Tensor) -> None:
    """Fill a parameter or buffer with a full value, keeping the target's dtype. Collective for partitioned parameters.

    Rank 0's value is the one that counts for partitioned parameters. Must run before the engine exists: the optimizer
    keeps fp32 copies of its own.
    """
    if tuple(value.shape) != tuple(full_shape(target)):
        raise AssertionError(f"shape {tuple(value.shape)} for a target of {tuple(full_shape(target))}")
    with torch.no_grad():
        if not is_partitioned(target):
            target.copy_(value)
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters([target], modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                target.data.copy_(value)
