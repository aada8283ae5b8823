"""Optimizer state as whole tensors: read from and written to an engine of any ZeRO stage, at any number of ranks.

A parameter's fp32 master weight and Adam moments lie in flat partitions; of experts that ranks share among them, those
of this rank's experts. `_fragment` is the one function that knows where; it returns views, so writing to them writes to
the optimizer. Whole tensors hold all experts. Attribute names are DeepSpeed's (0.19).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.nn import Parameter

from lumina_ft.parallel.zero3 import first_element, full_shape

if TYPE_CHECKING:
    from lumina_ft.parallel.engine import Engine

StateKey = Literal["master", "exp_avg", "exp_avg_sq"]
STATE_KEYS: tuple[StateKey, ...] = ("master", "exp_avg", "exp_avg_sq")
"""fp32 master weight, and AdamW's first and second moment."""


class _Fragment(NamedTuple):
    """This rank's part of one tensor: `view` is flat fp32, `start` its offset in the flattened whole."""

    view: Tensor
    start: int


def gather_state(
    engine: "Engine", params: Mapping[str, Parameter], destinations: Mapping[tuple[str, StateKey], int] | None = None
) -> Iterator[tuple[str, StateKey, Tensor | None]]:
    """Whole state tensors, one at a time. Collective: every rank iterates to the end.

    Args:
        params: trainable parameters by name.
        destinations: rank that gets each tensor, in the order in which they come, the same on all ranks; default: rank
            0 gets all.

    Yields:
        (name, key, fp32 CPU tensor of the parameter's full shape on its destination, None elsewhere).
    """
    _create_state(engine)
    rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
    if destinations is None:
        destinations = {(name, key): 0 for name in params for key in STATE_KEYS}
    for (name, key), target in destinations.items():
        param = params[name]
        shape = full_shape(param)
        fragment = _fragment(engine, param, key)
        if engine.zero_stage == 0 or size == 1:
            assert fragment is not None, f"{name}: no {key}"
            yield name, key, fragment.view.detach().reshape(shape).to("cpu", copy=True) if rank == target else None
            continue
        whole = torch.zeros(shape.numel(), dtype=torch.float32, device=param.device)
        if fragment is not None:
            whole[fragment.start : fragment.start + fragment.view.numel()] = fragment.view
        # As integers: exactly one rank contributes, and 0 + x keeps every bit (as floats, -0.0 would become 0.0).
        torch_dist.reduce(whole.view(torch.int32), dst=target)
        yield name, key, whole.reshape(shape).cpu() if rank == target else None


def load_state(
    engine: "Engine", params: Mapping[str, Parameter], read: Callable[[str, StateKey], Tensor], *, adam_steps: int
) -> None:
    """Write whole state tensors into the engine. Each rank keeps its part; nothing is communicated.

    The model's own weights must be loaded already: in bf16 they equal the rounded masters.

    Args:
        read: full fp32 tensor of (name, key); called where this rank has a part of it. A view of a mapped file will do:
            only the part is touched.
        adam_steps: optimizer steps that the moments have seen (bias correction).
    """
    _create_state(engine)
    for flat in _owned(engine):
        engine.optimizer.state[flat]["step"].fill_(float(adam_steps))
    for name, param in params.items():
        for key in STATE_KEYS:
            fragment = _fragment(engine, param, key)
            if fragment is not None:
                whole = read(name, key).reshape(-1)
                part = whole[fragment.start : fragment.start + fragment.view.numel()]
                fragment.view.detach().copy_(part)


def adam_steps(engine: "Engine") -> int:
    """Steps counted by AdamW; 0 before the first one."""
    counts = {int(state["step"]) for state in engine.optimizer.state.values()}
    assert len(counts) <= 1, f"parameter groups are at different steps: {sorted(counts)}"
    return counts.pop() if counts else 0


def local_decay(engine: "Engine", params: Iterable[Parameter], factor: float) -> None:
    """Multiply this rank's part of the master weights."""
    for param in params:
        fragment = _fragment(engine, param, "master")
        if fragment is not None:
            fragment.view.detach().mul_(factor)


def zero_gradient_params(engine: "Engine", params: list[Parameter]) -> tuple[set[int], bool]:
    """Parameters whose complete gradient is exactly zero, after the last backward pass of a step.

    Args:
        params: trainable parameters in the same order on all ranks.

    Returns:
        `id`s of the parameters, and whether all gradients are finite; the same on every rank.
    """
    device = params[0].device
    seen = torch.zeros(len(params) + 1, dtype=torch.int32, device=device)
    for i, param in enumerate(params):
        grad = _gradient_part(engine, param)
        if grad is not None and grad.numel():
            seen[i] = grad.any()
            seen[-1] |= ~torch.isfinite(grad).all()
    torch_dist.all_reduce(seen, op=torch_dist.ReduceOp.MAX)
    flags = seen.tolist()
    return {id(p) for p, flag in zip(params, flags, strict=False) if not flag}, not flags[-1]


def _owned(engine: "Engine") -> list[Tensor]:
    """Tensors that the torch optimizer updates: flat partitions, or whole parameters at ZeRO-0."""
    if engine.zero_stage == 3:
        return engine.ds_optimizer.fp32_partitioned_groups_flat
    return [p for group in engine.optimizer.param_groups for p in group["params"]]


def _create_state(engine: "Engine") -> None:
    """AdamW makes its state in the first step; make it now where it is missing, as that step would."""
    state = engine.optimizer.state
    for flat in _owned(engine):
        if not state.get(flat):
            on_device = engine.optimizer.defaults.get("fused")
            state[flat] = {
                "step": torch.zeros((), dtype=torch.float32, device=flat.device if on_device else "cpu"),
                "exp_avg": torch.zeros_like(flat),
                "exp_avg_sq": torch.zeros_like(flat),
            }


def _fragment(engine: "Engine", param: Parameter, key: StateKey) -> _Fragment | None:
    part = _local_fragment(engine, param, None if key == "master" else key)
    return part and _Fragment(part.view, part.start + first_element(param))


def _local_fragment(engine: "Engine", param: Parameter, state_key: str | None) -> _Fragment | None:
    """As `_fragment`, with offsets in what this rank has of the parameter while it is gathered.

    Args:
        state_key: name of the moment; None: the master weight.
    """
    wrapper: Any = engine.ds_optimizer
    if engine.zero_stage == 3:
        view, _ = wrapper._get_fp32_opt_state_partition(param, False, state_key)
        start = view.numel() * torch_dist.get_rank(group=param.ds_process_group)  # pyright: ignore
        length = max(0, min(view.numel(), param.ds_numel - start))  # pyright: ignore[reportAttributeAccessIssue]
        return _Fragment(view[:length], start) if length else None
    if engine.zero_stage in (1, 2):
        mapping = param._hp_mapping  # pyright: ignore[reportAttributeAccessIssue]
        if mapping is None:
            return None
        # DeepSpeed's own links to the moments exist for the first parameter group only.
        (flat,) = engine.optimizer.param_groups[mapping.param_group_index]["params"]
        whole = flat if state_key is None else engine.optimizer.state[flat][state_key]
        address = mapping.hp_fragment_address
        return _Fragment(whole.narrow(0, address.start, address.numel), mapping.lp_fragment_address.start)
    owner = param if wrapper is engine.optimizer else _master_of(wrapper, param)
    whole = owner if state_key is None else engine.optimizer.state[owner][state_key]
    return _Fragment(whole.view(-1), 0)


def _master_of(wrapper: Any, param: Parameter) -> Tensor:
    """fp32 copy of a bf16 parameter at ZeRO-0."""
    for low, high in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
        for candidate, master in zip(low, high, strict=True):
            if candidate is param:
                return master
    raise AssertionError("parameter is not in the optimizer")


def _gradient_part(engine: "Engine", param: Parameter) -> Tensor | None:
    """This rank's part of a parameter's reduced gradient."""
    if engine.zero_stage == 3:
        return engine.ds_optimizer.get_local_fp32_grad_for_param(param)
    if engine.zero_stage in (1, 2):
        mapping = param._hp_mapping  # pyright: ignore[reportAttributeAccessIssue]
        return None if mapping is None else mapping.get_lp_grad_fragment(param._index_in_param_group)  # pyright: ignore
    return param.grad
