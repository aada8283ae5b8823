"""More training rows out of the same training digits; held-out digits are never touched.

Understanding: turned, scaled and shifted copies of the pictures. 1,438 are few for a model that sees a picture as 32
code ids without any notion of which codes are alike. Text-to-image: the same pictures asked for in other words, which
balances the two tasks without teaching the model to draw distorted digits.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lumina_ft.data.digits import DRAW_PROMPTS, draw_prompt

MAX_TURN_DEGREES = 12.0
MAX_SHIFT_PIXELS = 0.7
MAX_SCALE = 0.1


def write_distorted(digits: Path, *, copies: int, seed: int) -> Path:
    """Write `copies` distorted variants of every training picture and its understanding row.

    Args:
        digits: directory written by `lumina_ft.data.digits.write_digits`.
        copies: variants per picture.
        seed: of the distortions.

    Returns:
        The JSONL file, `understand_train_distorted.jsonl` in `digits`.
    """
    folder = digits / "images" / "train_distorted"
    folder.mkdir()
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for row in _read(digits / "understand_train.jsonl"):
        source = Path(row["images"][0])
        picture = Image.open(digits / source)
        for copy in range(copies):
            target = folder / f"{source.stem}-{copy}.png"
            distort(picture, rng).save(target)
            rows.append({**row, "images": [str(target.relative_to(digits))]})
    return _write(digits / "understand_train_distorted.jsonl", rows)


def write_rephrased(digits: Path, *, copies: int, seed: int) -> Path:
    """Write every text-to-image row `copies` times more, in phrasings other than its own.

    Returns:
        The JSONL file, `t2i_train_rephrased.jsonl` in `digits`.
    """
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for row in _read(digits / "t2i_train.jsonl"):
        digit = int(Path(row["image"]).stem.rsplit("-", 1)[1])
        others = [prompt for i in range(len(DRAW_PROMPTS)) if (prompt := draw_prompt(digit, i)) != row["prompt"]]
        rows += [{**row, "prompt": others[i]} for i in rng.permutation(len(others))[:copies]]
    return _write(digits / "t2i_train_rephrased.jsonl", rows)


def distort(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
    """A grey picture turned, scaled and shifted at random about its centre, bilinearly; black comes in from outside."""
    turn = np.deg2rad(rng.uniform(-MAX_TURN_DEGREES, MAX_TURN_DEGREES))
    zoom = 1.0 + rng.uniform(-MAX_SCALE, MAX_SCALE)
    shift = rng.uniform(-MAX_SHIFT_PIXELS, MAX_SHIFT_PIXELS, size=2)
    centre = np.array(picture.size) / 2
    # Pillow wants the map from output to input: undo the shift, then turn and scale about the centre.
    matrix = np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]]) / zoom
    offset = centre - matrix @ (centre + shift)
    terms = (*matrix[0], offset[0], *matrix[1], offset[1])
    return picture.transform(picture.size, Image.Transform.AFFINE, terms, resample=Image.Resampling.BILINEAR)


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
