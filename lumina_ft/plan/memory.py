"""`lumina-ft plan`: memory of every stage of a run, or of the ways to lay a model out over ranks."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lumina_ft.config.load import load_run
from lumina_ft.config.lora_schema import LoraConfig
from lumina_ft.config.schema import RunConfig
from lumina_ft.data.dataset import PackedDataset
from lumina_ft.errors import ConfigError
from lumina_ft.models.u2_config import U2Config
from lumina_ft.plan.activations import Workload
from lumina_ft.plan.libraries import library_bytes
from lumina_ft.plan.model import describe_model
from lumina_ft.plan.peak import estimate_peak, measure_load
from lumina_ft.plan.states import StageStates, planned_params, stage_states
from lumina_ft.train.run import stage_seed

PRESETS = ("zero0", "zero1", "zero2", "zero3")
_TARGETS = (*LoraConfig().targets, "experts")


def describe_run(config: str, overrides: list[str]) -> dict[str, Any]:
    """`describe_model` of a run's model, and `memory`: see `describe_run_memory`.

    Args:
        config: YAML file or recipe. overrides: of its keys.
    """
    cfg = load_run(config, overrides)
    return {**describe_model(cfg.model.path or cfg.model.config or ""), "memory": describe_run_memory(cfg)}


def describe_run_memory(cfg: RunConfig) -> dict[str, Any]:
    """Memory of every stage of a run.

    Returns:
        The layout, and `stages`: `trained_parameters`; `ranks` with exact bytes of each rank; `workload`, the largest
        of the stage's first packs; and `peak`, an estimate for the rank with most bytes. Both are None where the data
        set isn't there yet.

    Raises:
        ConfigError: the run doesn't fit its model, or has a DeepSpeed key without memory arithmetic.
        DataError: the data set doesn't fit the model.
    """
    config = U2Config.load(cfg.model.path or cfg.model.config or "")
    cuda = torch.cuda.is_available()
    stages = []
    for index, stage in enumerate(cfg.stages):
        states = stage_states(cfg, index, config, cuda=cuda)
        load = _workload(cfg, index, config)
        described: dict[str, Any] = {
            "name": stage.name,
            "trained_parameters": sum(info.numel for info in states.plan.trained),
            "ranks": [{"rank": r, **held._asdict(), "total": held.total} for r, held in enumerate(states.ranks)],
            "workload": load._asdict() if load else None,
            "peak": None,
        }
        if load:
            # By now everything that a rank imports is imported here too.
            libraries = 0 if cuda else library_bytes(config, states, load, cfg.model.dtype)
            peak = estimate_peak(cfg, config, states, load, libraries)
            described["peak"] = {**peak._asdict(), "total": peak.total}
        stages.append(described)
    layout = cfg.parallel
    return {
        "ranks": layout.ranks,
        "zero": layout.zero,
        "expert_parallel_size": layout.expert_parallel_size,
        "dtype": cfg.model.dtype,
        "stages": stages,
    }


def _workload(cfg: RunConfig, index: int, config: U2Config) -> Workload | None:
    data_cfg = cfg.stage_data(index)
    if not data_cfg.path.is_dir():
        return None
    data = PackedDataset(data_cfg, spec=config.token_spec(), seed=stage_seed(cfg, index), split="train")
    return measure_load(data, cfg)


def describe_layouts(
    source: str | Path,
    *,
    ranks: int,
    zero: str | None = None,
    expert_parallel_size: int | None = None,
    dtype: str | None = None,
    lora_rank: int | None = None,
    lora_targets: Sequence[str] | None = None,
) -> dict[str, Any]:
    """States per rank of a model laid out over ranks, with everything trained, and with an adapter alone.

    Args:
        source: of the model's configuration.
        zero: preset or DeepSpeed JSON; None: each preset.
        expert_parallel_size: None: each size that divides the ranks and the model's experts.
        dtype: None: bfloat16.
        lora_rank: None: without an adapter. lora_targets: as `lora.targets`; None: its default and the experts.

    Returns:
        `ranks`, `dtype`, and `rows`: one per layout that works, with the bytes of the rank that holds most.

    Raises:
        ConfigError: a size that doesn't divide, a target that matches nothing, a DeepSpeed key without arithmetic.
    """
    config, dtype = U2Config.load(source), dtype or "bfloat16"
    rows = []
    for adapter in (False, True) if lora_rank else (False,):
        lora = {"lora": {"rank": lora_rank, "targets": lora_targets or _TARGETS}} if adapter else {}
        for size in _sizes(config, ranks, expert_parallel_size):
            params = None
            for preset in (zero,) if zero else PRESETS:
                if preset == "zero0" and size > 1 and expert_parallel_size is None:
                    continue
                cfg = RunConfig.model_validate(
                    {
                        "output_dir": "plan",
                        "model": {"config": str(source), "random_init": True, "dtype": dtype},
                        "data": {"path": "plan"},
                        "train": {"packs_per_step": ranks},
                        "parallel": {"ranks": ranks, "zero": preset, "expert_parallel_size": size},
                        "stages": [{"name": "plan", "steps": 1}],
                        **lora,
                    }
                )
                params = params or planned_params(config, cfg.lora, size)
                states = stage_states(cfg, 0, config, params=params)
                rows.append(_layout_row(states, preset, size, adapter))
    return {"ranks": ranks, "dtype": dtype, "rows": rows}


def _sizes(config: U2Config, ranks: int, wanted: int | None) -> list[int]:
    experts = config.num_experts if config.num_moe_layers else 1
    fitting = [size for size in range(1, ranks + 1) if math.gcd(ranks, experts) % size == 0]
    if wanted is None:
        return fitting
    if wanted not in fitting:
        raise ConfigError(
            f"--expert-parallel-size — {wanted} — must divide --ranks={ranks} and the model's {experts} experts — use "
            f"{' or '.join(map(str, fitting))}"
        )
    return [wanted]


def _layout_row(states: StageStates, zero: str, size: int, adapter: bool) -> dict[str, Any]:
    most = max(states.ranks, key=lambda held: held.total)
    return {
        "trained": "adapter" if adapter else "all",
        "zero": zero,
        "expert_parallel_size": size,
        **most._asdict(),
        "total": most.total,
    }
