"""The demo's judge: nearest neighbours among real training digits decide which digit a picture shows.

It never sees a generated picture, an answer or a code before judging, and its own accuracy on held-out real digits is
reported next to its verdicts.

Shape legend: n pictures of 8 x 8 pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier

from lumina_ft.errors import DataError

NEIGHBOURS = 3
SIDE = 8
WHITE = 255
NOT_INVERTED = -1
"""What the judge reads in a picture that should be inverted and isn't."""


@dataclass(frozen=True)
class Digits:
    """Real digits of one split, as `lumina_ft.data.digits.write_digits` stored them.

    Attributes:
        paths: PNG files, sorted by name.
        pixels: [n, 64] float64, 0..255.
        labels: [n] int64, 0..9.
    """

    paths: tuple[Path, ...]
    pixels: NDArray[np.float64]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class DrawingVerdict:
    """What the judge makes of generated pictures.

    Attributes:
        read: [n] the digit it sees in each picture, or NOT_INVERTED.
        recognised: share of pictures that show the digit asked for.
        distinct: number of different pictures.
        copies: pictures that equal the given real ones pixel by pixel.
    """

    read: NDArray[np.int64]
    recognised: float
    distinct: int
    copies: int


def load_split(digits: Path, split: str) -> Digits:
    """Read the real digits of `train` or `heldout`.

    Raises:
        DataError: no picture there.
    """
    paths = tuple(sorted((digits / "images" / split).glob("*.png")))
    if not paths:
        raise DataError(f"{digits / 'images' / split} — no PNG file — must hold digits — run `lumina-ft data digits`")
    # The name is "<row>-<digit>.png".
    labels = np.array([int(path.stem.rsplit("-", 1)[1]) for path in paths], dtype=np.int64)
    return Digits(paths, to_pixels([Image.open(path) for path in paths]), labels)


def to_pixels(pictures: Sequence[Image.Image]) -> NDArray[np.float64]:
    """[n, 64] grey values, 0..255.

    Raises:
        DataError: a picture of another size.
    """
    for picture in pictures:
        if picture.size != (SIDE, SIDE):
            raise DataError(f"picture of {picture.size} pixels — must be {SIDE}x{SIDE}, like the real digits")
    return np.stack([np.asarray(picture.convert("L"), dtype=np.float64).reshape(-1) for picture in pictures])


class DigitJudge:
    """A nearest-neighbour classifier of real digits."""

    def __init__(self, train: Digits) -> None:
        """Fit on `train`; nothing else may be added later."""
        self._classifier = KNeighborsClassifier(NEIGHBOURS).fit(train.pixels, train.labels)

    def read(self, pixels: NDArray[np.float64]) -> NDArray[np.int64]:
        """The digit in each of n pictures. pixels: [n, 64]. Returns [n] int64."""
        return np.asarray(self._classifier.predict(pixels), dtype=np.int64)

    def accuracy(self, pixels: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
        """Share of n pictures with a known digit that the judge reads right."""
        return float((self.read(pixels) == labels).mean())

    def judge_drawings(
        self, pictures: Sequence[Image.Image], wanted: NDArray[np.int64], known: NDArray[np.float64]
    ) -> DrawingVerdict:
        """Judge generated pictures.

        Args:
            pictures: n of them.
            wanted: [n] digit that each prompt asked for.
            known: [m, 64] pictures whose repetition counts as a copy: the training digits after the codec.
        """
        pixels = to_pixels(pictures)
        return _verdict(self.read(pixels), wanted, pixels, known)

    def judge_inverted(
        self, pictures: Sequence[Image.Image], wanted: NDArray[np.int64], known: NDArray[np.float64]
    ) -> DrawingVerdict:
        """Judge pictures that should show a digit dark on bright: a bright picture, read as its negative.

        Args:
            pictures, wanted: see `judge_drawings`. known: [m, 64] ordinary pictures, whose negatives count as copies.
        """
        negatives = WHITE - to_pixels(pictures)
        read = np.where(is_ordinary(negatives), self.read(negatives), NOT_INVERTED)
        return _verdict(read, wanted, negatives, known)


def is_ordinary(pixels: NDArray[np.float64]) -> NDArray[np.bool_]:
    """[n] whether each picture is dark on the whole, as every real digit is. pixels: [n, 64]."""
    return pixels.mean(axis=1) < WHITE / 2


def _verdict(
    read: NDArray[np.int64], wanted: NDArray[np.int64], pixels: NDArray[np.float64], known: NDArray[np.float64]
) -> DrawingVerdict:
    seen = {row.tobytes() for row in known}
    copies = sum(row.tobytes() in seen for row in pixels)
    return DrawingVerdict(read, float((read == wanted).mean()), len(np.unique(pixels, axis=0)), copies)


def judge_answers(answers: Sequence[str], expected: Sequence[str]) -> NDArray[np.bool_]:
    """[n] whether each answer is the expected word and nothing else, surrounding blanks aside."""
    assert len(answers) == len(expected)
    return np.array([a.strip() == e for a, e in zip(answers, expected, strict=True)], dtype=np.bool_)
