"""`lumina-ft merge-lora`: from what the user named to a merge, and its report."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from lumina_ft.adapters.combine import WeightedAdapter
from lumina_ft.adapters.merge import merge_adapters
from lumina_ft.checkpoint.adapter_source import adapter_of_run
from lumina_ft.checkpoint.directory import STATE_FILE
from lumina_ft.checkpoint.manifest import MARKER
from lumina_ft.config.load import load_run
from lumina_ft.errors import ConfigError
from lumina_ft.models.hf_keys import Layout
from lumina_ft.monitor.progress import counted

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def run_merge(
    config: str | None,
    overrides: Sequence[str],
    *,
    base: Path | None,
    adapters: Sequence[str],
    output: Path | None,
    layout: Layout | None,
    dtype: Literal["float32", "bfloat16"] | None,
    overwrite: bool,
    verify: bool,
    max_shard_bytes: int,
) -> dict[str, Any]:
    """Merge what a run has trained, or the adapters given; progress on stderr.

    Args:
        config, overrides: of a run; then `base` and `adapters` are its own.
        adapters: `DIR` or `DIR=WEIGHT`.

    Returns:
        `MergeSummary` as a dict, with the adapters.

    Raises:
        ConfigError: an incomplete or contradictory wish.
        CheckpointError, RunError: see `merge_adapters`, `adapter_of_run`.
    """
    if config is not None:
        if base is not None or adapters:
            raise ConfigError("--config — with --base or --adapter — the run names both — leave one of them out")
        run = load_run(config, list(overrides))
        source = adapter_of_run(run)
        base, chosen = source.base, [WeightedAdapter(source.adapter)]
        output = output or run.output_dir / "merged"
    else:
        chosen = [parse_adapter(text) for text in adapters]
    if base is None or not chosen or output is None:
        missing = "--base" if base is None else "--adapter" if not chosen else "--output"
        raise ConfigError(
            f"{missing} — missing — without --config a merge needs --base, --adapter and --output — add it"
        )
    _check_outside_checkpoints(output)
    with counted("MB") as advance:
        summary = merge_adapters(
            base,
            chosen,
            output,
            layout=layout,
            dtype=_DTYPES[dtype] if dtype else None,
            overwrite=overwrite,
            verify=verify,
            max_shard_bytes=max_shard_bytes,
            progress=lambda done, total: advance(done // 10**6, total // 10**6),
        )
    return {
        **asdict(summary),
        "base": base,
        "adapters": [{"path": str(path), "weight": weight} for path, weight in chosen],
        "lowest_delta_cosine": summary.check.lowest_cosine if summary.check else None,
        "verified": summary.check is not None,
    }


def _check_outside_checkpoints(output: Path) -> None:
    """Refuse an output inside a training checkpoint, whose files are listed with their hashes, and get deleted."""
    for folder in output.resolve().parents:
        if (folder / STATE_FILE).is_file() and (folder / MARKER).is_file():
            raise ConfigError(
                f"--output — {output} — lies in {folder}, a checkpoint of a run, which must stay as it was written — "
                "choose another directory"
            )


def parse_adapter(text: str) -> WeightedAdapter:
    """`DIR` or `DIR=WEIGHT`; a directory whose own name holds `=` is taken as it is.

    Raises:
        ConfigError: the weight is no number.
    """
    name, sign, weight = text.rpartition("=")
    if not sign or Path(text).is_dir():
        return WeightedAdapter(Path(text))
    try:
        return WeightedAdapter(Path(name), float(weight))
    except ValueError as error:
        raise ConfigError(f"--adapter — {text} — {weight!r} must be a number — write DIR=0.5, or DIR alone") from error


def _print_experts(console: Console, experts: dict[str, dict[str, Any]]) -> None:
    """One line about all adapted experts, if there are any."""
    if not experts:
        return
    trained, untrained = (sum(check[key] for check in experts.values()) for key in ("trained", "untrained"))
    worst = min(experts, key=lambda name: experts[name]["lowest_cosine"])
    without = f", {untrained} more have an update of zero" if untrained else ""
    console.print(
        f"experts: {trained} matrices in {len(experts)} tensors, lowest delta cosine "
        f"{experts[worst]['lowest_cosine']:.6f} ({worst} expert {experts[worst]['lowest']}){without}",
        soft_wrap=True,
    )


def print_merge(result: dict[str, Any]) -> None:
    """Print the report of a merge on stdout."""
    console = Console(file=sys.stdout)
    check = result["check"]
    if check is not None:
        kinds: dict[str, list[float]] = {}
        for name, value in check["cosines"].items():
            # Past model.layers.N, layers of a kind share their name.
            kinds.setdefault(name.split(".", 3)[-1].removesuffix(".weight"), []).append(value)
        table = Table("adapted", "tensors", "delta cosine: lowest", "median")
        for kind, values in kinds.items():
            table.add_row(kind, str(len(values)), f"{min(values):.6f}", f"{median(values):.6f}")
        console.print(table)
        console.print(
            f"proved: {check['adapted']} tensors are base + adapter to the last bit, {check['replaced']} the adapter's "
            f"own, {check['copied']} the base's",
            soft_wrap=True,
        )
        _print_experts(console, check["experts"])
    logits = result["logits"]
    if logits is not None:
        console.print(
            f"logits: merged differs from base with adapter by {logits['largest']:.1e} at most, the adapter changes "
            f"them by {logits['effect']:.1e}",
            soft_wrap=True,
        )
    console.print(
        f"{result['tensors']} tensors, {result['bytes'] / 1e9:.2f} GB in {result['shards']} files, {result['layout']}; "
        f"{result['seconds']:.1f} s",
        soft_wrap=True,
    )
    console.print(f"model: {result['output']}", soft_wrap=True)
