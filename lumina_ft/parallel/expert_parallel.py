"""Expert parallelism: routed experts spread over ranks that exchange tokens, on DeepSpeed's own process groups.

A layer's E experts are cut into `size` runs of E / size along dim 0; rank r of an exchange group holds the r-th run.
Exchange groups are runs of neighbouring ranks, so that tokens stay within a machine where they can; ranks that hold the
same experts replicate each other, and ZeRO divides an expert's states among them alone.

DeepSpeed's private names for this are in this file alone; `tests/dist/test_expert_parallel.py` fails if one changes.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup  # pyright: ignore[reportPrivateImportUsage]

_ANNOUNCEMENT = "shared_experts_announcement"


@dataclass(frozen=True)
class ExpertParallel:
    """This rank's place among the ranks that share a layer's experts.

    Attributes:
        size: ranks that share them. rank: of this one among those.
        name: DeepSpeed's key of the two groups.
        group: the ranks that exchange tokens.
        replicas: the ranks that hold the same experts.
    """

    size: int
    rank: int
    name: str
    group: ProcessGroup
    replicas: ProcessGroup

    def local(self, num_experts: int) -> slice:
        """Global ids of this rank's experts, of `num_experts` in all."""
        count = num_experts // self.size
        return slice(self.rank * count, (self.rank + 1) * count)


def join_experts(size: int) -> ExpertParallel | None:
    """Form the groups. Collective over all ranks, before the model is built; asking again gives the same groups.

    Args:
        size: `parallel.expert_parallel_size`; it divides the number of ranks.

    Returns:
        None for size 1: every rank holds every expert.
    """
    if size == 1:
        return None
    assert torch_dist.get_world_size() % size == 0
    from deepspeed.utils import groups

    name = f"ep_size_{size}"
    if name not in groups._get_expert_parallel_group_dict():
        groups._create_expert_and_data_parallel(expert_parallel_size_=size)
    group = groups._get_expert_parallel_group(name)
    return ExpertParallel(size, torch_dist.get_rank(group), name, group, groups._get_expert_data_parallel_group(name))


def share_experts(param: Tensor, experts: ExpertParallel) -> None:
    """Declare that a parameter [E / size, ...] holds this rank's experts only. Adapters of experts count.

    Must happen before ZeRO takes hold of the parameter. An undeclared one would be averaged with other experts.
    """
    marked: Any = param
    marked.expert_parallel = experts
    # ZeRO-1/2, and the broadcast of initial weights.
    marked.allreduce = False
    marked.group_name = experts.name
    # ZeRO-3: where it is partitioned, how its gradient is averaged, how it counts in the norm.
    marked.ds_zero_placement_family = "autoep_expert"
    marked.ds_zero_partition_group_name = experts.name
    marked.ds_zero_partition_process_group = experts.replicas


def sharing_of(param: Tensor) -> ExpertParallel | None:
    """The ranks among which a parameter's experts are spread; None if every rank holds the whole parameter."""
    return getattr(param, "expert_parallel", None)


def optimizer_keys(experts: ExpertParallel | None) -> dict[str, Any]:
    """What DeepSpeed reads from an optimizer's parameter group, which holds either shared experts only or none."""
    return {} if experts is None else {"moe": True, "name": experts.name}


@contextmanager
def announced(module: nn.Module, trained: Iterable[Tensor]) -> Iterator[None]:
    """Inside, DeepSpeed's engine finds out that experts are shared, if any of the trained parameters is one.

    ZeRO-1 and 2 treat groups of experts apart only if the model contains a layer of a class they know. ZeRO-3 goes by
    the marks on the parameters alone.

    Args:
        module: what the engine will get; holds one more module inside the block.
    """
    if all(sharing_of(param) is None for param in trained):
        yield
        return
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    class SharedExperts(AutoEPMoELayer):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts = 0

        def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
            """The groups exist."""

    module.add_module(_ANNOUNCEMENT, SharedExperts())
    try:
        yield
    finally:
        delattr(module, _ANNOUNCEMENT)


def allow_experts_alone(wrapper: Any) -> None:
    """Let ZeRO-1's wrapper for bf16 find the norm of the gradients where shared experts are all that trains.

    It takes the norm of the other gradients by stacking those of each tensor, which fails for none at all.

    Args:
        wrapper: DeepSpeed's optimizer, of any class.
    """
    if not (getattr(wrapper, "has_moe_layers", False) and hasattr(wrapper, "get_grads_for_norm")):
        return
    find = wrapper.get_grads_for_norm

    def find_one_at_least(for_clipping: bool = False) -> Any:
        found = find(for_clipping=for_clipping)
        if for_clipping or found[0]:
            return found
        of_experts = next(iter(found[1].values()))
        return [of_experts[0].new_zeros(1)], found[1]

    wrapper.get_grads_for_norm = find_one_at_least


def exchange_counts(counts: Tensor, experts: ExpertParallel) -> Tensor:
    """Tell each rank how many rows it will get.

    Args:
        counts: [E] int64, this rank's rows for each expert.

    Returns:
        [size, E / size] int64: rows from each rank for each local expert.
    """
    received = torch.empty_like(counts)
    torch_dist.all_to_all_single(received, counts.contiguous(), group=experts.group)
    return received.view(experts.size, -1)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], experts: ExpertParallel) -> Tensor:
        ctx.plan = (send, receive, experts)
        return _all_to_all(rows, send, receive, experts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive, experts = ctx.plan
        return _all_to_all(grad, receive, send, experts), None, None, None


def exchange_rows(rows: Tensor, send: list[int], receive: list[int], experts: ExpertParallel) -> Tensor:
    """Send rows to their experts' ranks, or back. Collective over the exchange group, in backward too.

    Args:
        rows: [sum(send), ...] grouped by receiving rank.
        send, receive: rows to and from each rank of the group.

    Returns:
        [sum(receive), ...] grouped by sending rank; gradients travel back the same way.
    """
    return _Exchange.apply(rows, send, receive, experts)  # pyright: ignore[reportReturnType]


def _all_to_all(rows: Tensor, send: list[int], receive: list[int], experts: ExpertParallel) -> Tensor:
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    torch_dist.all_to_all_single(out, rows.contiguous(), receive, send, group=experts.group)
    return out


def gather_experts(local: Tensor, experts: ExpertParallel) -> Tensor:
    """[E / size, ...] of each rank -> [E, ...] on every rank of the exchange group, in the order of global ids."""
    whole = local.new_empty((experts.size * local.shape[0], *local.shape[1:]))
    torch_dist.all_gather_into_tensor(whole, local.contiguous(), group=experts.group)
    return whole
