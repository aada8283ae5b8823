"""The demo's second task, which the base model has never seen: digits drawn dark on bright.

Its rows ask for them in words of their own, beside rows of the first task: the adapter has to learn what the word
"inverted" asks for, not to invert everything.
"""

import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from lumina_ft.data.digits import DIGIT_WORDS

INVERTED_PROMPTS = (
    "draw an inverted {word}",
    "please draw the digit {word} inverted",
    "an inverted handwritten {word}",
    "write {word} inverted",
)
"""Phrasings of a request for an inverted digit; one for each of `lumina_ft.data.digits.DRAW_PROMPTS`."""


def inverted_prompt(digit: int, phrasing: int = 0) -> str:
    """A prompt for an inverted `digit` (0..9)."""
    return INVERTED_PROMPTS[phrasing].format(word=DIGIT_WORDS[digit])


def write_inverted(digits: Path, *, phrasings: int, seed: int) -> Path:
    """Write the negative of every training picture and `phrasings` text-to-image rows for it.

    Args:
        digits: directory written by `lumina_ft.data.digits.write_digits`.
        phrasings: rows per picture, each with another of `INVERTED_PROMPTS`.
        seed: chooses them.

    Returns:
        The JSONL file, `t2i_train_inverted.jsonl` in `digits`.
    """
    folder = digits / "images" / "train_inverted"
    folder.mkdir()
    rng = np.random.default_rng([seed, 2])
    rows = []
    for source in sorted((digits / "images" / "train").glob("*.png")):
        target = folder / source.name
        with Image.open(source) as picture:
            ImageOps.invert(picture).save(target)
        digit = int(source.stem.rsplit("-", 1)[1])
        for phrasing in rng.permutation(len(INVERTED_PROMPTS))[:phrasings].tolist():
            prompt = inverted_prompt(digit, phrasing)
            rows.append({"task": "t2i", "prompt": prompt, "image": str(target.relative_to(digits))})
    path = digits / "t2i_train_inverted.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
