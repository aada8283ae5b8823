"""What a finished run reports."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lumina_ft.checkpoint.directory import stage_end
from lumina_ft.config.schema import RunConfig
from lumina_ft.monitor.metrics import SUMMARY_FILE
from lumina_ft.monitor.progress import duration


def run_summary(cfg: RunConfig, seconds: float) -> dict[str, Any]:
    """The stages' own summaries, each with its checkpoint, and the model (with an adapter: its base) that came out.

    Args:
        seconds: wall time of this launch.
    """
    path = cfg.output_dir / SUMMARY_FILE
    entries = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    told = {entry["index"]: entry for entry in entries}
    stages: list[dict[str, Any]] = []
    model: Path | None = None
    adapter: Path | None = None
    for index in range(len(cfg.stages)):
        end = stage_end(cfg.output_dir, index)
        if end is None:
            continue
        # A stage whose ranks died between its checkpoint and its summary is known from the checkpoint alone.
        state = end.state
        known = {"index": index, "name": state.stage_name, "steps": state.stage_steps, "losses": {}}
        known |= {"seconds": state.seconds, "tokens": state.tokens} | told.get(index, {})
        known.pop("expert_counts", None)
        stages.append(known | {"checkpoint": str(end.path)})
        model, adapter = end.model_dir, end.adapter_dir
    return {
        "run_dir": str(cfg.output_dir),
        "stages": stages,
        "model": str(model) if model else None,
        "adapter": str(adapter) if adapter else None,
        "seconds": round(seconds, 1),
    }


def print_summary(summary: dict[str, Any]) -> None:
    """Print a summary as a table on stdout."""
    table = Table("stage", "steps", "loss", "held out", "time", "checkpoint")
    for stage in summary["stages"]:
        losses = (stage["losses"].get(name) for name in ("loss", "eval_loss"))
        shown = ("-" if loss is None else f"{loss:.4f}" for loss in losses)
        table.add_row(stage["name"], str(stage["steps"]), *shown, duration(stage["seconds"]), stage["checkpoint"])
    console = Console(file=sys.stdout)
    console.print(table)
    console.print(f"model: {summary['model']}", soft_wrap=True)
    if summary["adapter"]:
        console.print(f"adapter: {summary['adapter']}", soft_wrap=True)
