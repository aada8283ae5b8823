"""Bytes of parameters, gradients and optimizer state on every rank of a stage, before anything is started."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from lumina_ft.adapters.lora import attach_adapter
from lumina_ft.config.lora_schema import LoraConfig
from lumina_ft.config.schema import OptimConfig, RunConfig
from lumina_ft.models.groups import group_of
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.parallel.expert_parallel import ExpertParallel, sharing_of
from lumina_ft.parallel.footprint import StateBytes, StoredParam, check_counted, state_bytes
from lumina_ft.parallel.zero3 import full_shape, local_shape
from lumina_ft.stages import ParamInfo, StagePlan, plan_stage
from lumina_ft.train.optim import rate_and_decay
from lumina_ft.train.run import engine_config
from lumina_ft.train.stage_adapter import stage_lora

WIDTHS = {"float32": 4, "bfloat16": 2}
"""Bytes of an element."""


class PlannedParam(NamedTuple):
    """A parameter, and what a rank holds of it before ZeRO divides that.

    Attributes:
        info: name, group and whole shape.
        numel: elements on a rank: of experts that ranks share, its own experts'.
        shared: whether ranks share its experts.
    """

    info: ParamInfo
    numel: int
    shared: bool


class StageStates(NamedTuple):
    """What the ranks of a stage keep.

    Attributes:
        plan: what is trained.
        ds_config: resolved.
        params: every parameter of the stage, in the model's order.
        stored: the same as ZeRO sees them on rank 0; other ranks differ in their places alone.
        ranks: bytes of each rank.
        sharing: ranks that share the experts.
    """

    plan: StagePlan
    ds_config: dict[str, Any]
    params: tuple[PlannedParam, ...]
    stored: tuple[StoredParam, ...]
    ranks: tuple[StateBytes, ...]
    sharing: int


def planned_params(config: U2Config, lora: LoraConfig | None, expert_parallel_size: int) -> tuple[PlannedParam, ...]:
    """Every parameter of the model, with the adapter on it, as one rank builds it; on the meta device.

    Raises:
        ConfigError: the experts can't be shared evenly, or the adapter doesn't fit the model.
    """
    experts = None
    if expert_parallel_size > 1:
        # Only the size counts here: nothing is sent.
        nobody = cast(Any, None)
        experts = ExpertParallel(expert_parallel_size, 0, "planned", nobody, nobody)
    with torch.device("meta"):
        model = U2ForDiffusion(config, expert_parallel=experts)
        if lora is not None:
            attach_adapter(model, lora, seed=0)
    return tuple(
        PlannedParam(
            ParamInfo(name, group_of(name), tuple(full_shape(param))),
            local_shape(param).numel(),
            sharing_of(param) is not None,
        )
        for name, param in model.named_parameters()
    )


def stage_states(
    cfg: RunConfig,
    index: int,
    config: U2Config,
    *,
    cuda: bool = False,
    params: tuple[PlannedParam, ...] | None = None,
) -> StageStates:
    """What stage `index` keeps on each rank.

    Args:
        config: of the run's model.
        cuda: whether it runs on GPUs, which decides some of DeepSpeed's automatic values.
        params: of the stage, where they are known already.

    Raises:
        ConfigError: the stage, its adapter or its DeepSpeed configuration doesn't fit the model, or the latter has a
            key without memory arithmetic.
    """
    lora = stage_lora(cfg, index)
    size, ranks = cfg.parallel.expert_parallel_size, cfg.parallel.ranks
    params = params or planned_params(config, lora, size)
    plan = plan_stage(cfg, index, [p.info for p in params])
    ds_config = engine_config(cfg, plan, ranks, cuda=cuda)
    check_counted(ds_config)
    width = WIDTHS[cfg.model.dtype]
    ratio = lora.lr_ratio if lora else 1.0
    held = [stored_params(params, plan, cfg.optim, ratio, ranks=ranks, size=size, rank=r) for r in range(ranks)]
    ranks_bytes = tuple(state_bytes(each, ds_config, width) for each in held)
    return StageStates(plan, ds_config, params, held[0], ranks_bytes, size)


def stored_params(
    params: Sequence[PlannedParam],
    plan: StagePlan,
    optim: OptimConfig,
    lr_ratio: float,
    *,
    ranks: int,
    size: int,
    rank: int,
) -> tuple[StoredParam, ...]:
    """Parameters as ZeRO sees them on one rank, numbered by the groups that `train.optim.build_optimizer` makes.

    Args:
        lr_ratio: see `build_optimizer`.
        ranks: of the run. size: those that share experts. rank: this one.
    """
    numbers: dict[tuple[float, float, bool], int] = {}
    out = []
    for info, numel, shared in params:
        group = None
        if info.group in plan.lr:
            key = (*rate_and_decay(info, plan, optim, lr_ratio), shared)
            group = numbers.setdefault(key, len(numbers))
        # Neighbouring ranks share experts, so that every `size`-th rank has the same ones.
        among, place = (ranks // size, rank // size) if shared else (ranks, rank)
        out.append(StoredParam(numel, among, place, group))
    return tuple(out)
