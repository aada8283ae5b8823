"""What `sft --dry-run` shows: the resolved run, stage by stage."""

import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lumina_ft.config.groups import GROUPS_U2
from lumina_ft.config.schema import RunConfig
from lumina_ft.launch.checks import check_run, choose_port
from lumina_ft.stages import ParamInfo, plan_stage

if TYPE_CHECKING:
    from lumina_ft.adapters.targets import TargetRow


def describe_run(cfg: RunConfig) -> dict[str, Any]:
    """The plan of a run after all checks that need no process.

    Raises:
        ConfigError: a check failed.
    """
    check_run(cfg)
    choose_port(cfg.parallel.master_port)
    stages: list[dict[str, Any]] = []
    for index, stage in enumerate(cfg.stages):
        # One stand-in per group: sizes need the model, the choice of groups and rates doesn't.
        plan = plan_stage(cfg, index, [ParamInfo(group, group, (1,)) for group in GROUPS_U2])
        data = cfg.stage_data(index)
        stages.append(
            {
                "name": stage.name,
                "groups": dict(plan.lr),
                "adapter": stage.lora,
                "adapter_at_end": None if stage.lora == "off" else stage.lora_at_end,
                "steps": stage.steps,
                "epochs": stage.epochs,
                "schedule": stage.schedule or cfg.optim.schedule,
                "data": str(data.path),
                "tasks": list(data.tasks) if data.tasks else None,
                "max_pack_tokens": data.max_pack_tokens,
            }
        )
    adapter = [row._asdict() for row in _adapter_rows(cfg)]
    return {"config": cfg.model_dump(mode="json"), "stages": stages, "adapter": adapter}


def print_run(cfg: RunConfig) -> None:
    """Print the stages, and what the adapter adapts, as tables on stdout."""
    plan = describe_run(cfg)
    size = cfg.parallel.expert_parallel_size
    spread = f", experts spread over {size}" if size > 1 else ""
    table = Table(title=f"{cfg.output_dir}: {cfg.parallel.ranks} rank(s), {cfg.parallel.zero}{spread}")
    for heading in ("stage", "length", "trained groups", "lr", *(("adapter",) if cfg.lora else ()), "data"):
        table.add_column(heading)
    for stage in plan["stages"]:
        length = f"{stage['steps']} steps" if stage["steps"] else f"{stage['epochs']:g} epochs"
        by_rate: dict[float, list[str]] = {}
        for group, rate in stage["groups"].items():
            by_rate.setdefault(rate, []).append(group)
        groups = "\n".join(", ".join(names) for names in by_rate.values())
        rates = "\n".join(f"{rate:g}" for rate in by_rate)
        course = stage["adapter"] + (f", {stage['adapter_at_end']}" if stage["adapter_at_end"] else "")
        table.add_row(stage["name"], length, groups, rates, *((course,) if cfg.lora else ()), stage["data"])
    console = Console(file=sys.stdout)
    console.print(table)
    if cfg.lora is not None:
        from lumina_ft.adapters.targets import targets_table

        console.print(targets_table(_adapter_rows(cfg)))


def _adapter_rows(cfg: RunConfig) -> "list[TargetRow]":
    """What the adapter adapts; finding it out takes the model's structure, which is built without weights.

    Raises:
        ConfigError: a target that matches nothing.
    """
    if cfg.lora is None:
        return []
    import torch

    from lumina_ft.adapters.targets import plan_targets, summarise_targets
    from lumina_ft.models.u2 import U2ForDiffusion
    from lumina_ft.models.u2_config import U2Config

    with torch.device("meta"):
        model = U2ForDiffusion(U2Config.load(cfg.model.path or cfg.model.config or ""))
    return summarise_targets(plan_targets(model, cfg.lora))
