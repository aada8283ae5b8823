"""What can be known to be wrong with the placement and the balancing of experts before a process is started."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lumina_ft.config.schema import RunConfig
from lumina_ft.errors import ConfigError

if TYPE_CHECKING:
    from lumina_ft.models.u2_config import U2Config

SIZE_KEY = "parallel.expert_parallel_size"


def expert_parallel_problems(cfg: RunConfig, model: Path | str | None) -> Iterator[str]:
    """Why a run can't spread its experts over the ranks, DeepSpeed's own reasons aside; nothing if it doesn't want to.

    Args:
        model: where its `config.json` is found; None if there is none.
    """
    size, ranks = cfg.parallel.expert_parallel_size, cfg.parallel.ranks
    if size == 1:
        return
    if ranks % size:
        yield f"{SIZE_KEY} — {size} — must divide parallel.ranks={ranks} — use {sizes_text(ranks)}, or other ranks"
    try:
        if model is not None:
            yield from _model_problems(cfg, _load(model))
    except ConfigError as error:
        yield str(error)


def bias_problems(cfg: RunConfig, model: Path | str | None) -> Iterator[str]:
    """Why a stage can't balance the experts' load by their selection bias; nothing if none wants to."""
    stages = [i for i in range(len(cfg.stages)) if cfg.bias_rate(i)]
    if not stages or model is None:
        return
    own = cfg.stages[stages[0]].expert_bias_rate is not None
    key = f"stages.{stages[0]}.expert_bias_rate" if own else "optim.expert_bias_rate"
    try:
        config = _load(model)
    except ConfigError as error:
        yield str(error)
        return
    if not config.num_moe_layers:
        yield f"{key} — {cfg.bias_rate(stages[0])} — the model has no routed experts to balance — set it to 0"
    elif not config.moe_router_enable_expert_bias:
        yield (
            f"{key} — {cfg.bias_rate(stages[0])} — moe_router_enable_expert_bias: false in the model's config.json: "
            "its routers ignore the bias — set it to 0, or enable the bias there"
        )


def sizes_text(number: int) -> str:
    """The expert-parallel sizes that divide a number, for the end of a message."""
    sizes = [str(size) for size in range(1, number + 1) if number % size == 0]
    return " or ".join(filter(None, (", ".join(sizes[:-1]), sizes[-1])))


def _model_problems(cfg: RunConfig, config: "U2Config") -> Iterator[str]:
    size = cfg.parallel.expert_parallel_size
    if not config.num_moe_layers:
        yield f"{SIZE_KEY} — {size} — the model has no routed experts: every layer is dense — use 1"
        return
    if config.num_experts % size:
        fitting = sizes_text(math.gcd(cfg.parallel.ranks, config.num_experts))
        yield f"{SIZE_KEY} — {size} — must divide the model's num_experts={config.num_experts} — use {fitting}"


def _load(source: Path | str) -> "U2Config":
    from lumina_ft.models.u2_config import U2Config

    return U2Config.load(source)
