"""The ahead-of-time gate: every kernel in every form is compiled for each architecture, on a machine without a GPU."""

import importlib.metadata
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from rich.console import Console

from lumina_ft.bench.kernel_cases import TRITON, Case, kernel_cases
from lumina_ft.bench.tile_candidates import BLOCK_ORDER
from lumina_ft.kernels.aot import CAPABILITY, Compilation, Compiler, Verdict, compiler, record
from lumina_ft.kernels.tiles import CONFIGS, Tile, tiles_of

Key = tuple[str, str]
"""Kernel and variant: one tile in a file."""

_SHOWN = ("registers", "spill_bytes", "shared_bytes", "wgmma", "mma", "async_copies")
"""Resources that are printed."""

META = torch.device("meta")


def tiled_architectures() -> tuple[str, ...]:
    """Architectures that have a file of tiles."""
    return tuple(name for name in CAPABILITY if (CONFIGS / f"{name}.json").is_file())


def compilations(
    cases: Iterable[Case], architecture: str, override: dict[Key, Tile] | None = None
) -> dict[Key, list[Compilation]]:
    """All that the cases compile for an architecture, by the tile that decides it.

    Args:
        override: tiles to use instead of the architecture's own; all of them if it has no file.
    """
    found: dict[Compilation, None] = {}
    for case in cases:
        # Plans hold tile lists, so inputs are prepared under the same tiles.
        found |= dict.fromkeys(record(lambda case=case: case.prepare(META, TRITON)(), architecture, override))
    by_key: dict[Key, list[Compilation]] = defaultdict(list)
    for compilation in found:
        by_key[compilation.name, compilation.variant].append(compilation)
    return dict(by_key)


def unused_tiles(architecture: str, used: Iterable[Key]) -> list[str]:
    """Entries of an architecture's file that no case needs, so that nothing vouches for them."""
    listed = {(kernel, variant) for kernel, variants in tiles_of(architecture).items() for variant in variants}
    return sorted(f"{kernel} {variant}" for kernel, variant in listed - set(used))


def gate(compile_with: Compiler, architectures: Sequence[str], cases: Sequence[Case]) -> list[Verdict]:
    """Verdicts on the shipped tiles."""
    jobs = [
        (compilation, architecture)
        for architecture in architectures
        for found in compilations(cases, architecture).values()
        for compilation in found
    ]
    return compile_with.judge(jobs)


def bench_aot(architectures: Sequence[str], *, processes: int = 2) -> dict[str, Any]:
    """Compile every kernel with the shipped tiles and list what stands against shipping them.

    Args:
        architectures: of `tiled_architectures`.
        processes: that compile at the same time.

    Returns:
        `kernels`: one row a compiled kernel. `problems`: readable lines, among them tiles that nothing compiles.
        `triton`: its version. `seconds`.
    """
    start = time.perf_counter()
    with compiler(processes=processes) as compile_with:
        verdicts = gate(compile_with, architectures, kernel_cases())
    problems = [f"{describe(verdict)}: {text}" for verdict in verdicts for text in verdict.problems]
    for architecture in architectures:
        used = [(v.compilation.name, v.compilation.variant) for v in verdicts if v.architecture == architecture]
        problems += [f"{architecture} {entry}: no case compiles it" for entry in unused_tiles(architecture, used)]
    return {
        "kernels": [verdict.row() for verdict in verdicts],
        "problems": problems,
        "triton": importlib.metadata.version("triton"),
        "seconds": round(time.perf_counter() - start, 1),
    }


def print_aot(result: dict[str, Any]) -> None:
    """The result of `bench_aot`, a line a tile with the most that any of its forms needs."""
    console = Console(soft_wrap=True)
    for line, rows in groupby(result["kernels"], key=lambda row: _line(row["architecture"], row)):
        forms = list(rows)
        most = ", ".join(f"{name} {max(form.get(name, 0) for form in forms)}" for name in _SHOWN)
        console.print(f"{line}: forms {len(forms)}, {most}", markup=False, highlight=False)
    console.print(
        f"{len(result['kernels'])} kernels, {len(result['problems'])} problems, {result['seconds']} s, "
        f"triton {result['triton']}"
    )


def describe(verdict: Verdict) -> str:
    """One line for a compiled kernel."""
    return _line(verdict.architecture, verdict.row())


def _line(architecture: str, row: dict[str, Any]) -> str:
    tile = row["tile"]
    sizes = "x".join(str(tile[name]) for name in BLOCK_ORDER if name in tile)
    return f"{architecture} {row['kernel']} {row['variant']} {sizes} w{tile['num_warps']} s{tile['num_stages']}"
