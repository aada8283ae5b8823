"""The one door to weights that may be partitioned (ZeRO-3) or spread (experts): build, look at shapes, gather, write.

Everything works on plain parameters too, so callers don't ask how they run. A parameter's *whole* value is the one that
checkpoints hold: all experts, where this rank has some of them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lumina_ft.parallel.expert_parallel import gather_experts, sharing_of

FlatReader = Callable[[int, int], Iterable[Tensor]]
"""`read(start, stop)`: these elements of a flattened whole value in order, as flat pieces of any length."""


def is_partitioned(param: Tensor) -> bool:
    """Whether ZeRO-3 manages this parameter."""
    return hasattr(param, "ds_id")


def full_shape(param: Tensor) -> torch.Size:
    """Shape of the whole parameter, with all experts; `param.shape` is empty while ZeRO-3 partitions it."""
    shape, experts = local_shape(param), sharing_of(param)
    return shape if experts is None else torch.Size((shape[0] * experts.size, *shape[1:]))


def local_shape(param: Tensor) -> torch.Size:
    """Shape that the parameter has on this rank while it is gathered: with this rank's experts only."""
    return torch.Size(getattr(param, "ds_shape", param.shape))


def init_context(ds_config: dict[str, Any], dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Build a model inside, in the dtype that it trains in; ZeRO-3 partitions each module as soon as it exists.

    Buffers keep their declared dtype and value. DeepSpeed's own context replaces torch's tensor constructors by ones
    that return `dtype`, which turns fp32 buffers into bf16 (a rotary `inv_freq` is then off by 2.7 rad at position
    8192); here no constructor is replaced and only parameters are cast.

    Args:
        ds_config: resolved configuration.
        dtype: of the parameters.
    """
    if ds_config["zero_optimization"]["stage"] != 3:
        return default_dtype(dtype)
    import deepspeed

    class PartitionParameters(deepspeed.zero.Init):
        def _post_init_method(self, module: nn.Module) -> None:
            for param in module.parameters(recurse=False):
                if not is_partitioned(param) and param.is_floating_point():
                    param.data = param.data.to(dtype)
            super()._post_init_method(module)

    return PartitionParameters(config_dict_or_path=ds_config, dtype=dtype, tensor_overrides=[])


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside the block, new tensors that ask for no dtype get this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def place_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers to the training device, dtypes as they are; the engine moves parameters, but not these at ZeRO-3."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


@contextmanager
def gathered(params: Iterable[Tensor]) -> Iterator[None]:
    """Parameters without ZeRO-3's partitioning inside the block, for reading: of experts, this rank's.

    Collective: every rank enters with the same parameters.
    """
    absent = _absent(params)
    if not absent:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(absent):
        yield


@contextmanager
def whole(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Whole values, with all experts, for reading inside the block. Collective, as `gathered`."""
    with torch.no_grad(), gathered(params):
        values = []
        for param in params:
            experts = sharing_of(param)
            local = param.detach()
            values.append(local if experts is None else gather_experts(local, experts))
        yield values


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
    """Fill a parameter or buffer with a whole value, keeping the target's dtype. Collective for partitioned parameters.

    Of ranks that divide a partitioned parameter among them, the first one's value counts. Must run before the engine
    exists: the optimizer keeps fp32 copies of its own.
    """
    if tuple(value.shape) != tuple(full_shape(target)):
        raise AssertionError(f"shape {tuple(value.shape)} for a target of {tuple(full_shape(target))}")
    experts = sharing_of(target)
    _write_local(target, value if experts is None else value[experts.local(value.shape[0])])


def _write_local(target: Tensor, local: Tensor) -> None:
    """Fill a parameter or buffer with this rank's experts of a whole value, or with all of it."""
    with torch.no_grad():
        if not is_partitioned(target):
            target.copy_(local)
            return
        import deepspeed

        partitioned: Any = target
        with deepspeed.zero.GatheredParameters([target], modifier_rank=0):
            if torch.distributed.get_rank(partitioned.ds_process_group) == 0:
                target.data.copy_(local)


def fill_tensor(target: Tensor, read: FlatReader) -> None:
    """Fill a parameter or buffer, keeping the target's dtype, and read nothing but what this rank keeps of it.

    Every rank reads for itself; nothing is communicated, except for partitions that DeepSpeed keeps in a form of its
    own. Must run before the engine exists, as `write_tensor`.

    Args:
        read: of the whole value, with all experts.
    """
    if is_partitioned(target) and not _is_plain(target):
        local, start = local_shape(target), first_element(target)
        _write_local(target, torch.cat(list(read(start, start + local.numel()))).view(local))
        return
    kept, start = _kept_elements(target)
    filled = 0
    with torch.no_grad():
        for piece in read(start, start + kept.numel()):
            kept[filled : filled + piece.numel()].copy_(piece)
            filled += piece.numel()
    assert filled == kept.numel(), f"{filled} elements for a target of {kept.numel()}"


def _is_plain(param: Any) -> bool:
    """Whether a partition is just elements in memory: not quantised, on NVMe, or doubled within machines (ZeRO++)."""
    part = param.ds_tensor
    return param.ds_secondary_tensor is None and part.final_location is None and not hasattr(part, "ds_quant_scale")


def first_element(target: Tensor) -> int:
    """Where this rank's experts begin in the flattened whole value."""
    experts = sharing_of(target)
    return 0 if experts is None else experts.rank * local_shape(target).numel()


def _kept_elements(target: Any) -> tuple[Tensor, int]:
    """Flat view of the elements that this rank keeps, and where they begin in the flattened whole value."""
    if not is_partitioned(target):
        return target.detach().view(-1), first_element(target)
    assert _absent([target]), "a parameter that is gathered has two values"
    part = target.ds_tensor
    start = part.ds_numel * torch.distributed.get_rank(target.ds_process_group)
    # The last partitions are padded to the length of the others.
    length = max(0, min(part.ds_numel, target.ds_numel - start))
    return part[:length], first_element(target) + start
