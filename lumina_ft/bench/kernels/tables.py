"""Results of `lumina-ft bench kernels` as tables on stderr."""

from typing import Any


def print_kernels(result: dict[str, Any]) -> None:
    """One table per contest, then shares and targets."""
    from rich.console import Console

    console = Console(stderr=True, width=120)
    ceilings = result["ceilings"]
    console.print(
        f"{result['device']}, torch {result['torch']}, {result['clock']}; measured here: "
        f"{ceilings['tflop_s']:.3g} TFLOP/s, {ceilings['gb_s']:.0f} GB/s"
    )
    for contest in result["contests"]:
        console.print(_contest_table(contest))
    if "shares" in result:
        console.print(_shares_table(result["shares"]))
    for target in result.get("targets", ()):
        verdict = "met" if target["met"] else "missed"
        console.print(f"{target['what']}: {target['value']:.2f}, target {target['bound']} {verdict}")


def _contest_table(contest: dict[str, Any]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    sizes = " ".join(f"{name}={value}" for name, value in contest["sizes"].items())
    missing = [
        f"{name}: {side.get('wrong') or side['unavailable']}"
        for name, side in contest["sides"].items()
        if "forward_ms" not in side
    ]
    table = Table(
        title=f"{contest['operation']}, {contest['case']}: {sizes} {contest['dtype']}",
        title_justify="left",
        caption="\n".join(missing),
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("", no_wrap=True)
    for unit in ("ms", "TFLOP/s", "GB/s", "of limit"):
        table.add_column(f"forward\n{unit}", justify="right")
    for unit in ("ms", "TFLOP/s", "GB/s", "of limit"):
        table.add_column(f"backward\n{unit}", justify="right")
    table.add_column("peak\nMB", justify="right")
    table.add_column("plan\nms", justify="right")
    for name, side in contest["sides"].items():
        if "forward_ms" in side:
            table.add_row(name, *_figures(side))
    return table


def _figures(side: dict[str, Any]) -> list[str]:
    """The limit is whichever ceiling is nearer: of products, or of memory."""
    cells: list[str] = []
    for part in ("forward", "backward"):
        if f"{part}_ms" not in side:
            cells += [""] * 4
            continue
        share = max(side[f"{part}_tflop_share"], side[f"{part}_gb_share"])
        cells += [f"{side[f'{part}_{unit}']:.3g}" for unit in ("ms", "tflop_s", "gb_s")]
        cells.append(f"{100 * share:.0f} %")
    cells.append(f"{side['peak_bytes'] / 1e6:.0f}")
    return [*cells, f"{side['prepare_ms']:.3g}" if "prepare_ms" in side else ""]


def _shares_table(shares: dict[str, Any]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"share of the S x S pairs in packs of 16384 tokens, tiles of {shares['tiles_of']}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("pack", no_wrap=True)
    columns = {"exact": "allowed", "tiles": "tiles", "tiles_dq": "tiles dQ", "tiles_dkv": "tiles dK dV"}
    for column in (*columns.values(), "tiles / allowed", "whole samples"):
        table.add_column(column, justify="right")
    for layout, share in shares.items():
        if layout != "tiles_of":
            percent = (f"{100 * share[name]:.2f} %" for name in columns)
            table.add_row(layout, *percent, f"{share['tiles_over_exact']:.2f}", f"{100 * share['segmented']:.2f} %")
    return table
