"""The demo's raw data: scikit-learn's 1,797 handwritten digits as PNG files and JSONL rows.

Two tasks share the images: text-to-image ("draw a seven" -> picture) and understanding (picture -> "seven"). The
train/held-out split is drawn once from `seed`, class by class, so no picture is on both sides.
"""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lumina_ft.errors import ConfigError, DataError

DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

DRAW_PROMPTS = ("draw {article} {word}", "please draw the digit {word}", "{article} handwritten {word}", "write {word}")
"""Phrasings of a text-to-image request."""

ASK_PROMPTS = ("which digit is this?", "what number do you see?", "read the digit in this image.")
"""Phrasings of an understanding question; the answer is the bare word."""

PIXEL_MAX = 16
"""Grey levels of the source are 0..16."""


def draw_prompt(digit: int, phrasing: int = 0) -> str:
    """A text-to-image prompt for `digit` (0..9)."""
    template = DRAW_PROMPTS[phrasing]
    word = DIGIT_WORDS[digit]
    noun = "handwritten" if "handwritten" in template else word
    return template.format(article="an" if noun[0] in "aeiou" and noun != "one" else "a", word=word)


def load_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The digits in their published order.

    Returns:
        images [1797, 8, 8] uint8 in 0..255, black background; labels [1797] in 0..9.
    """
    from sklearn.datasets import load_digits as load_bunch

    flat, labels = load_bunch(return_X_y=True)
    images = np.asarray(flat, dtype=np.float64).reshape(-1, 8, 8)
    return np.rint(images * (255 / PIXEL_MAX)).astype(np.uint8), np.asarray(labels, dtype=np.int64)


def split_digits(labels: NDArray[np.int64], *, heldout_fraction: float, seed: int) -> NDArray[np.bool_]:
    """Choose the held-out digits, the same share of every class.

    Returns:
        [n] bool, True where held out.
    """
    rng = np.random.default_rng(seed)
    heldout = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        rows = np.flatnonzero(labels == digit)
        chosen = rng.permutation(len(rows))[: round(len(rows) * heldout_fraction)]
        heldout[rows[chosen]] = True
    return heldout


def write_digits(output: Path, *, heldout_fraction: float = 0.2, seed: int = 0) -> dict[str, int]:
    """Write images and rows: `{t2i,understand}_{train,heldout}.jsonl` and `images/{train,heldout}/*.png`.

    Text-to-image rows are `pairs`, understanding rows are `messages`, so both formats are exercised.

    Args:
        output: directory to create.
        heldout_fraction: share of each class kept out of training, in [0, 1).
        seed: drives the split and the choice of phrasings.

    Returns:
        Number of digits per split.

    Raises:
        DataError: `output` exists and isn't an empty directory.
        ConfigError: `output` can't be created.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DataError(f"output={output} — exists and is not empty — digits are never overwritten — remove it first")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"output={output} — {exc.strerror} — must be writable — choose another directory") from exc
    images, labels = load_digits()
    heldout = split_digits(labels, heldout_fraction=heldout_fraction, seed=seed)
    rng = np.random.default_rng([seed, 1])
    draws = rng.integers(len(DRAW_PROMPTS), size=len(labels))
    asks = rng.integers(len(ASK_PROMPTS), size=len(labels))
    counts = {}
    for split, rows in (("train", np.flatnonzero(~heldout)), ("heldout", np.flatnonzero(heldout))):
        (output / "images" / split).mkdir(parents=True, exist_ok=True)
        t2i, understand = [], []
        for row in rows:
            digit = int(labels[row])
            path = f"images/{split}/{row:04d}-{digit}.png"
            Image.fromarray(images[row]).save(output / path)
            t2i.append({"task": "t2i", "prompt": draw_prompt(digit, int(draws[row])), "image": path})
            question = {"role": "user", "content": f"<image>\n{ASK_PROMPTS[asks[row]]}"}
            answer = {"role": "assistant", "content": DIGIT_WORDS[digit]}
            understand.append({"task": "understand", "messages": [question, answer], "images": [path]})
        _write_jsonl(output / f"t2i_{split}.jsonl", t2i)
        _write_jsonl(output / f"understand_{split}.jsonl", understand)
        counts[split] = len(rows)
    return counts


def _write_jsonl(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
