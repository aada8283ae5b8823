"""Choose tile sizes offline: candidates that compile well, and on a GPU the fastest of them that computes right.

A kernel's tile is searched while all others are as shipped. Without a GPU the first candidate that passes the
ahead-of-time gate is taken; candidates are listed in order of preference.
"""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from lumina_ft.bench.aot import Key, compilations, describe
from lumina_ft.bench.kernel_cases import TORCH, TRITON, Case, Results, Run, kernel_cases
from lumina_ft.bench.tile_candidates import candidates
from lumina_ft.errors import ConfigError, RunError, nearest
from lumina_ft.kernels.aot import CAPABILITY, Compiler, Verdict, compiler
from lumina_ft.kernels.launch import use_tiles
from lumina_ft.kernels.tiles import CONFIGS, Tile, tiles_of

AGREEMENT = {torch.bfloat16: 1.2e-2, torch.float32: 1e-4}
"""Largest relative L2 difference between a kernel and the torch implementation, each with rounding of its own."""

PATTERN = "sm_80"
"""Architectures without a file start from the kernels and variants of this one."""

REPEATS = 20
"""Timed runs of a candidate; the median counts."""


def bench_tune(
    name: str, *, kernels: Sequence[str] = (), output: Path | None = None, results: Path | None = None
) -> dict[str, Any]:
    """Search tiles for one architecture and write its file.

    Args:
        name: key of `aot.CAPABILITY`.
        kernels: to search; all by default. Others keep their tiles.
        output: file to write; the shipped one by default.
        results: folder that keeps what compiling found.

    Returns:
        `tiles`, as the file holds them; `timed`, whether a GPU of the architecture chose; `milliseconds` of each
        candidate then; `rejected`, those that the gate turned down.

    Raises:
        ConfigError: unknown kernel.
        RunError: no candidate passes the gate.
    """
    known = tiles_of(name if (CONFIGS / f"{name}.json").is_file() else PATTERN)
    for kernel in kernels:
        if kernel not in known:
            raise ConfigError(
                f"--kernel — {kernel!r} — must be one of {', '.join(known)}{nearest(kernel, known)} — correct it"
            )
    keys = [(kernel, variant) for kernel in kernels or known for variant in known[kernel]]
    cases = kernel_cases()
    device = _device(name)
    with compiler(results) as compile_with:
        passing, rejected = _search(compile_with, name, cases, known, keys, first=device is None)
    times: dict[Key, list[float]] = {}
    if device is not None:
        times = {key: _times(device, cases, known, key, tiles) for key, tiles in passing.items()}
    chosen = {key: _fastest(key, tiles, times.get(key)) for key, tiles in passing.items()}
    path = CONFIGS / f"{name}.json" if output is None else output
    tiles = write_tiles(path, known, chosen)
    return {
        "architecture": name,
        "timed": device is not None,
        "output": str(path),
        "tiles": tiles,
        "milliseconds": {
            " ".join(key): {show(tile): ms for tile, ms in zip(passing[key], found, strict=True)}
            for key, found in times.items()
        },
        "rejected": [f"{describe(verdict)}: {', '.join(verdict.problems)}" for verdict in rejected],
    }


def print_tune(result: dict[str, Any]) -> None:
    """The result of `bench_tune` for readers."""
    console = Console(soft_wrap=True)
    for kernel, variants in result["tiles"].items():
        for variant, tile in variants.items():
            sizes = " ".join(f"{name}={size}" for name, size in tile.items())
            console.print(f"{kernel} {variant}: {sizes}", markup=False, highlight=False)
    how = (
        "the fastest on this GPU"
        if result["timed"]
        else f"the first in order of preference that passes the gate; no {result['architecture']} GPU here to time them"
    )
    console.print(f"{result['output']}: {how}", markup=False)


def show(tile: Tile) -> str:
    """As `tile_candidates` writes it."""
    return f"{'x'.join(map(str, tile.blocks.values()))} w{tile.num_warps} s{tile.num_stages}"


def entry(tile: Tile) -> dict[str, int]:
    """A tile as its file holds it."""
    return {**tile.blocks, "num_warps": tile.num_warps, "num_stages": tile.num_stages}


def write_tiles(path: Path, known: dict[str, dict[str, Tile]], chosen: dict[Key, Tile]) -> dict[str, Any]:
    """Write a file of tiles, those chosen in place of those known. Returns its content."""
    content = {
        kernel: {variant: entry(chosen.get((kernel, variant), tile)) for variant, tile in variants.items()}
        for kernel, variants in known.items()
    }
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return content


def _device(name: str) -> torch.device | None:
    """A GPU of the architecture, if there is one."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == divmod(CAPABILITY[name], 10):
        return torch.device("cuda")
    return None


def _by_key(known: dict[str, dict[str, Tile]]) -> dict[Key, Tile]:
    return {(kernel, variant): tile for kernel, variants in known.items() for variant, tile in variants.items()}


def _search(
    compile_with: Compiler,
    name: str,
    cases: Sequence[Case],
    known: dict[str, dict[str, Tile]],
    keys: Sequence[Key],
    *,
    first: bool,
) -> tuple[dict[Key, list[Tile]], list[Verdict]]:
    """Candidates that pass the gate in every form, and the verdicts on the others.

    One candidate of every kernel is compiled in each round, so that all processes have work.

    Args:
        known: tiles of the kernels that aren't searched.
        first: stop at the first one of each kernel.
    """
    left = {key: list(candidates(*key, name, known[key[0]][key[1]])) for key in keys}
    passing: dict[Key, list[Tile]] = {key: [] for key in keys}
    rejected: list[Verdict] = []
    while open_keys := [key for key in keys if left[key] and not (first and passing[key])]:
        tried = {key: left[key].pop(0) for key in open_keys}
        found = compilations(cases, name, _by_key(known) | tried)
        for key in open_keys:
            if key not in found:
                raise RunError(f"tune — {' '.join(key)} — no case runs this kernel — add one to kernel_cases")
        verdicts = iter(compile_with.judge([(c, name) for key in open_keys for c in found[key]]))
        for key in open_keys:
            own = [next(verdicts) for _ in found[key]]
            bad = [verdict for verdict in own if verdict.problems]
            rejected += bad[:1]
            if not bad:
                passing[key].append(tried[key])
    stuck = [" ".join(key) for key, tiles in passing.items() if not tiles]
    if stuck:
        why = "; ".join(f"{describe(verdict)}: {', '.join(verdict.problems)}" for verdict in rejected)
        raise RunError(
            f"tune — {', '.join(stuck)} on {name} — no candidate passes the gate ({why}) — list smaller tiles"
        )
    return passing, rejected


def _fastest(key: Key, tiles: Sequence[Tile], milliseconds: Sequence[float] | None) -> Tile:
    if milliseconds is None:
        return tiles[0]
    best = min(range(len(tiles)), key=milliseconds.__getitem__)
    if milliseconds[best] == float("inf"):
        raise RunError(f"tune — {' '.join(key)} — every candidate computes wrong results — report this bug")
    return tiles[best]


def _times(
    device: torch.device, cases: Sequence[Case], known: dict[str, dict[str, Tile]], key: Key, tiles: Sequence[Tile]
) -> list[float]:
    """Median time in ms of an operation with each tile of one of its kernels; infinite where it computes wrongly."""
    others = _by_key(known)
    case = next(case for case in cases if key in compilations([case], PATTERN, others))
    expected = _prepared(case, device, None)()
    return [_time(case, device, {**others, key: tile}, expected) for tile in tiles]


def _prepared(case: Case, device: torch.device, tiles: dict[Key, Tile] | None) -> Run:
    """The case with the same inputs each time; tiles None: in torch."""
    torch.manual_seed(0)
    return case.prepare(device, TORCH if tiles is None else TRITON)


def _time(case: Case, device: torch.device, tiles: dict[Key, Tile], expected: Results) -> float:
    with use_tiles(tiles):
        run = _prepared(case, device, tiles)
        if wrong(run(), expected, AGREEMENT[case.dtype]):
            return float("inf")
        return median(_milliseconds(run, device))


def wrong(results: Results, expected: Results, tolerance: float) -> list[str]:
    """Names of results that are further from the expected ones than the tolerance; integers must be equal."""
    return [
        name
        for name, value in expected.items()
        # Written so that NaN counts as wrong.
        if not _difference(results[name], value) <= (tolerance if value.is_floating_point() else 0.0)
    ]


def _difference(result: torch.Tensor, expected: torch.Tensor) -> float:
    result, expected = result.double(), expected.double()
    return float((result - expected).norm() / expected.norm().clamp_min(1e-30))


def _milliseconds(run: Run, device: torch.device) -> Iterator[float]:
    for _ in range(REPEATS):
        torch.cuda.synchronize(device) if device.type == "cuda" else None
        start = time.perf_counter()
        run()
        torch.cuda.synchronize(device) if device.type == "cuda" else None
        yield (time.perf_counter() - start) * 1e3
