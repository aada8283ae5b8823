"""Pictures of a run, made from what it wrote; no torch here."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray

from lumina_ft.monitor.expert_load import load_shares
from lumina_ft.monitor.metrics import read_metrics

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.colors import TwoSlopeNorm  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

_SMOOTHING_STEPS = 50
"""Curves with more points than this get a running mean on top."""


def plot_losses(run_dir: Path) -> Path | None:
    """Draw every loss of `metrics.jsonl` over the steps of all stages to `plots/losses.png`.

    A loss and its held-out value (`eval_…`) share a panel.

    Returns:
        The picture, or None when nothing with a loss has been logged yet.
    """
    records = read_metrics(run_dir)
    logged = {name.removeprefix("eval_") for record in records for name in record if "loss" in name}
    names = sorted(logged, key=lambda name: (name != "loss", name))
    if not names:
        return None
    starts = _stage_starts(records)
    figure, axes_grid = plt.subplots(len(names), 1, figsize=(9, 2.6 * len(names)), sharex=True, squeeze=False)
    for axes, name in zip(axes_grid[:, 0], names, strict=True):
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        for stage, start in starts.items():
            _draw_curve(axes, _points(records, stage, name, start))
            held_out = _points(records, stage, f"eval_{name}", start)
            axes.plot(held_out[:, 0], held_out[:, 1], marker="o", markersize=4, linewidth=1, color="tab:orange")
            axes.axvline(start, color="0.7", linewidth=0.8)
            axes.annotate(stage, (start, 1.0), xycoords=("data", "axes fraction"), fontsize=7, va="bottom")
    axes_grid[0, 0].set_title("blue: training, orange: held out", fontsize=9, pad=14)
    axes_grid[-1, 0].set_xlabel("optimizer step")
    return _save(figure, run_dir / "plots" / "losses.png")


def plot_expert_load(counts: NDArray[np.int64], path: Path) -> Path:
    """Draw expert load as a heat map (layers x experts) and a histogram (M8).

    Args:
        counts: [L, E] tokens routed to each expert, one row per MoE layer.
        path: PNG to write.
    """
    shares = load_shares(counts)
    figure, (heat, histogram) = plt.subplots(1, 2, figsize=(11, 3.4), width_ratios=(3, 1))
    # 1 is an even spread: it sits in the middle of the colour range whatever the largest share is.
    limit = max(2.0, float(shares.max(initial=0.0)))
    colours = TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=limit)
    image = heat.imshow(shares, aspect="auto", cmap="coolwarm", norm=colours, interpolation="nearest")
    heat.set(xlabel="expert", ylabel="MoE layer", title="tokens per expert, 1 = even spread")
    heat.set_yticks(range(len(counts)))
    figure.colorbar(image, ax=heat)
    histogram.hist(shares.ravel(), bins=min(30, max(5, shares.size // 4)), color="0.4")
    histogram.axvline(1.0, color="tab:red", linewidth=1)
    histogram.set(xlabel="share, 1 = even spread", ylabel="experts", title=f"{int((counts == 0).sum())} idle")
    return _save(figure, path)


def _stage_starts(records: list[dict[str, Any]]) -> dict[str, int]:
    """Steps that lie before each stage, in order of first appearance."""
    lengths: dict[str, int] = {}
    for record in records:
        lengths[record["stage"]] = max(lengths.get(record["stage"], 0), record["step"])
    starts: dict[str, int] = {}
    done = 0
    for stage, length in lengths.items():
        starts[stage] = done
        done += length
    return starts


def _points(records: list[dict[str, Any]], stage: str, name: str, start: int) -> NDArray[np.float64]:
    """[n, 2] of step in the run and value."""
    points = [(start + r["step"], float(r[name])) for r in records if name in r and r["stage"] == stage]
    return np.array(points, dtype=np.float64).reshape(-1, 2)


def _draw_curve(axes: Axes, points: NDArray[np.float64]) -> None:
    """One stage of one loss; means never reach over a stage boundary."""
    steps, values = points[:, 0], points[:, 1]
    crowded = len(values) > _SMOOTHING_STEPS
    marker = "" if crowded else "."
    axes.plot(steps, values, marker=marker, linewidth=0.8, alpha=0.35 if crowded else 1.0, color="tab:blue")
    if crowded:
        window = max(5, len(values) // _SMOOTHING_STEPS)
        mean = np.convolve(values, np.ones(window) / window, mode="valid")
        axes.plot(steps[window - 1 :], mean, linewidth=1.4, color="tab:blue")


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
