"""Tables of `lumina-ft plan`."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from lumina_ft.plan.model import print_plan

_MIB, _GIB = 2**20, 2**30
_STATES = ("parameters", "gradients", "optimizer")


def print_all(description: dict[str, Any], console: Console | None = None) -> None:
    """Print a model's description, with `memory` of a run or `layouts` of the model if it has them."""
    console = console or Console()
    print_plan(description, console)
    if "memory" in description:
        print_run_memory(description["memory"], console)
    if "layouts" in description:
        print_layouts(description["layouts"], console)


def print_run_memory(memory: dict[str, Any], console: Console | None = None) -> None:
    """Print what `describe_run_memory` returns as tables."""
    console = console or Console()
    title = f"MiB per rank: {memory['ranks']} ranks, {memory['zero']}, {memory['dtype']}"
    if memory["expert_parallel_size"] > 1:
        title += f", experts over {memory['expert_parallel_size']}"
    table = _table(("stage", "ranks"), title)
    for stage in memory["stages"]:
        for first, last, held in _equal_ranks(stage["ranks"]):
            table.add_row(stage["name"], f"{first}-{last}" if last > first else str(first), *_cells(held))
    console.print(table)
    if any(stage["peak"] is None for stage in memory["stages"]):
        console.print("No estimate of the peak: it needs the data set, which isn't there yet.")
        return
    peaks = Table(title="Estimate of the peak, GiB")
    for heading in ("stage", "when", "states", "gathered", "activations", "gradients", "libraries", "peak"):
        peaks.add_column(heading, justify="left" if heading in ("stage", "when") else "right")
    for stage in memory["stages"]:
        peak = stage["peak"]
        parts = [peak[part] for part in ("states", "gathered", "activations", "gradients", "libraries", "total")]
        peaks.add_row(stage["name"], peak["phase"], *(f"{part / _GIB:.2f}" for part in parts))
    console.print(peaks)


def print_layouts(layouts: dict[str, Any], console: Console | None = None) -> None:
    """Print what `describe_layouts` returns as a table."""
    console = console or Console()
    title = f"MiB per rank: {layouts['ranks']} ranks, {layouts['dtype']}"
    table = _table(("trained", "ZeRO", "experts over"), title)
    for row in layouts["rows"]:
        table.add_row(row["trained"], row["zero"], str(row["expert_parallel_size"]), *_cells(row))
    console.print(table)


def _table(labels: tuple[str, ...], title: str) -> Table:
    table = Table(*labels, title=title)
    for heading in (*_STATES, "total"):
        table.add_column(heading, justify="right")
    for column in table.columns:
        column.no_wrap = True
    return table


def _cells(held: dict[str, Any]) -> list[str]:
    return [f"{held[name] / _MIB:,.1f}" for name in (*_STATES, "total")]


def _equal_ranks(ranks: Sequence[dict[str, Any]]) -> list[tuple[int, int, dict[str, Any]]]:
    """Runs of neighbouring ranks that hold the same: first, last, and what they hold."""
    runs: list[tuple[int, int, dict[str, Any]]] = []
    for held in ranks:
        same = runs and all(runs[-1][2][name] == held[name] for name in _STATES)
        if same:
            runs[-1] = (runs[-1][0], held["rank"], runs[-1][2])
        else:
            runs.append((held["rank"], held["rank"], held))
    return runs
