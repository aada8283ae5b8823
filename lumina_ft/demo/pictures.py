"""Pictures of the demo's results: what was drawn and what was read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lumina_ft.data.digits import DIGIT_WORDS

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

_WRONG = "#ff5555"
_TILE = 48
"""Pixels of a picture with its frame in the grid."""
_TILE_GREY = (170, 170, 170)
_TILE_RED = (255, 85, 85)


@dataclass(frozen=True)
class Panel:
    """Generated digits under a title.

    Attributes:
        title: `{share}` stands for the share of pictures that were read as asked.
        pictures: n grey ones. read: [n] what the judge reads in each.
    """

    title: str
    pictures: Sequence[Image.Image]
    read: NDArray[np.int64]


def draw_grids(panels: Sequence[Panel], wanted: NDArray[np.int64], path: Path, *, columns: int = 20) -> Path:
    """Generated digits, one row per digit asked for; a red frame marks those that the judge didn't read as asked.

    Args:
        panels: side by side.
        wanted: [n] digit asked for, the same in all panels.
        path: PNG to write.
        columns: at most so many pictures per digit are shown in a panel.
    """
    columns = min(columns, max(int((wanted == digit).sum()) for digit in range(10)))
    size = (len(panels) * (columns * 0.42 + 0.2) + 0.7, 10 * 0.42 + 0.6)
    figure, grid = plt.subplots(1, len(panels), figsize=size, squeeze=False)
    for number, (axes, panel) in enumerate(zip(grid[0], panels, strict=True)):
        axes.imshow(_canvas(panel, wanted, columns), interpolation="nearest")
        axes.set_xticks([])
        axes.set_yticks([_TILE * (digit + 0.5) for digit in range(10)], DIGIT_WORDS if number == 0 else [""] * 10)
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.set_title(panel.title.format(share=f"{float((panel.read == wanted).mean()):.1%}"), fontsize=10)
    return _save(figure, path)


def _canvas(panel: Panel, wanted: NDArray[np.int64], columns: int) -> NDArray[np.uint8]:
    """[height, width, 3] the framed pictures of a panel."""
    canvas = np.full((10 * _TILE, columns * _TILE, 3), 255, dtype=np.uint8)
    for digit in range(10):
        for column, index in enumerate(np.flatnonzero(wanted == digit)[:columns].tolist()):
            tile = canvas[digit * _TILE : (digit + 1) * _TILE, column * _TILE : (column + 1) * _TILE]
            tile[1:-1, 1:-1] = _TILE_GREY if panel.read[index] == digit else _TILE_RED
            shown = panel.pictures[index].convert("RGB").resize((_TILE - 8, _TILE - 8), Image.Resampling.NEAREST)
            tile[4:-4, 4:-4] = np.asarray(shown)
    return canvas


def draw_answers(
    paths: Sequence[Path], answers: Sequence[str], right: NDArray[np.bool_], path: Path, *, columns: int = 12
) -> Path:
    """Held-out digits with the model's answer below; wrong answers are red and come first.

    Args:
        paths: n pictures. answers: n words. right: [n] bool.
        path: PNG to write.
        columns: per row; three rows are shown.
    """
    wrong, correct = np.flatnonzero(~right), np.flatnonzero(right)
    order = np.concatenate([wrong[: 2 * columns], correct])[: 3 * columns].tolist()
    figure, grid = plt.subplots(3, columns, figsize=(columns * 0.75, 3 * 1.15), squeeze=False)
    for axes in grid.ravel():
        axes.axis("off")
    for axes, index in zip(grid.ravel(), order, strict=False):
        axes.axis("on")
        axes.imshow(np.asarray(Image.open(paths[index]).convert("L")), cmap="gray", vmin=0, vmax=255)
        _frame(axes, ok=bool(right[index]))
        axes.set_xlabel(answers[index][:12], fontsize=8, color="black" if right[index] else _WRONG)
    figure.suptitle(f"answers on held-out digits, wrong ones first: {float(right.mean()):.1%} right", fontsize=10)
    return _save(figure, path)


def _frame(axes: Axes, *, ok: bool) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set(color="0.6" if ok else _WRONG, linewidth=0.5 if ok else 2.0)


def _save(figure: Figure, path: Path) -> Path:
    figure.tight_layout(pad=0.4, h_pad=0.6, w_pad=0.2)
    figure.savefig(path, dpi=110, bbox_inches="tight", pad_inches=0.05)
    plt.close(figure)
    return path
