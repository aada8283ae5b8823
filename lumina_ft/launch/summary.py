"""What a finished run reports."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lumina_ft.checkpoint.directory import stage_end
from lumina_ft.config.schema import RunConfig
from lumina_ft.launch.run_dir import SUMMARY_FILE
from lumina_ft.monitor.progress import duration


def run_summary(cfg: RunConfig, seconds: float) -> dict[str, Any]:
    """The stages' own summaries, each with its checkpoint, and the model that came out.

    Args:
        seconds: wall time of this launch.
    """
    path = cfg.output_dir / SUMMARY_FILE
    stages: list[dict[str, Any]] = []
    for entry in json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []:
        end = stage_end(cfg.output_dir, entry["index"])
        short = {name: value for name, value in entry.items() if name != "expert_counts"}
        stages.append(short | {"checkpoint": str(end.path) if end else None})
    models = [Path(stage["checkpoint"]) / "model" for stage in stages if stage["checkpoint"]]
    return {
        "run_dir": str(cfg.output_dir),
        "stages": stages,
        "model": str(models[-1]) if models else None,
        "seconds": round(seconds, 1),
    }


def print_summary(summary: dict[str, Any]) -> None:
    """Print a summary as a table on stdout."""
    table = Table("stage", "steps", "loss", "held out", "time", "checkpoint")
    for stage in summary["stages"]:
        losses = (stage["losses"].get(name) for name in ("loss", "eval_loss"))
        shown = ("-" if loss is None else f"{loss:.4f}" for loss in losses)
        table.add_row(
            stage["name"], str(stage["steps"]), *shown, duration(stage["seconds"]), stage["checkpoint"] or "-"
        )
    console = Console(file=sys.stdout)
    console.print(table)
    console.print(f"model: {summary['model']}", soft_wrap=True)
