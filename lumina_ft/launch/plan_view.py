"""What `sft --dry-run` shows: the resolved run, stage by stage."""

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from lumina_ft.config.groups import GROUPS_U2
from lumina_ft.config.schema import RunConfig
from lumina_ft.launch.checks import check_run, choose_port
from lumina_ft.stages import ParamInfo, plan_stage


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
                "steps": stage.steps,
                "epochs": stage.epochs,
                "schedule": stage.schedule or cfg.optim.schedule,
                "data": str(data.path),
                "tasks": list(data.tasks) if data.tasks else None,
                "max_pack_tokens": data.max_pack_tokens,
            }
        )
    return {"config": cfg.model_dump(mode="json"), "stages": stages}


def print_run(cfg: RunConfig) -> None:
    """Print the stages as a table on stdout."""
    plan = describe_run(cfg)
    table = Table(title=f"{cfg.output_dir}: {cfg.parallel.ranks} rank(s), {cfg.parallel.zero}")
    for heading in ("stage", "length", "trained groups", "lr", "data"):
        table.add_column(heading)
    for stage in plan["stages"]:
        length = f"{stage['steps']} steps" if stage["steps"] else f"{stage['epochs']:g} epochs"
        by_rate: dict[float, list[str]] = {}
        for group, rate in stage["groups"].items():
            by_rate.setdefault(rate, []).append(group)
        groups = "\n".join(", ".join(names) for names in by_rate.values())
        rates = "\n".join(f"{rate:g}" for rate in by_rate)
        table.add_row(stage["name"], length, groups, rates, stage["data"])
    Console(file=sys.stdout).print(table)
