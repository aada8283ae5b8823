"""Image codecs: pixels or token files to a grid of codes, C codes per place, and back.

A fitted codec is saved as `codec/` next to the dataset, and its identity in `dataset.json`: codes mean nothing without
the codec that made them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lumina_ft.errors import DataError

CODEC_FILE = "codec.json"
CODEC_DIR = "codec"
"""Folder of a dataset or model directory that holds its codec."""

MAX_CODES = 1 << 16
"""Codes per codebook that a uint16 tells apart."""


@dataclass(frozen=True)
class CodeGrid:
    """One encoded image.

    Attributes:
        codes: [height * width, C] uint16 in raster order.
        height, width: of the grid, in code places.
        repaired: the image was a truncated JPEG, decoded tolerantly.
    """

    codes: NDArray[np.uint16]
    height: int
    width: int
    repaired: bool = False


class ImageCodec(Protocol):
    """What data build and sampling need of a codec. Instances are picklable."""

    @property
    def kind(self) -> str:
        """Name in `CodecConfig.kind`."""
        ...

    @property
    def num_codebooks(self) -> int:
        """C."""
        ...

    @property
    def codes_per_codebook(self) -> int:
        """Codes are below this."""
        ...

    @property
    def identity(self) -> str:
        """Text that is equal exactly for codecs with equal codes."""
        ...

    def read(self, path: Path) -> CodeGrid:
        """Codes of a file.

        Raises:
            DataError: the file isn't what this codec reads.
        """
        ...

    def encode(self, images: Sequence[Image.Image]) -> list[CodeGrid]:
        """Codes of images.

        Raises:
            ConfigError: this codec has no encoder here.
        """
        ...

    def decode(self, codes: NDArray[np.integer], height: int, width: int) -> Image.Image:
        """Image of [height * width, C] codes in raster order.

        Raises:
            ConfigError: this codec has no decoder here.
            DataError: wrong shape or codes out of range.
        """
        ...

    def save(self, directory: Path) -> None:
        """Write the codec into `directory`, which is created."""
        ...


def load_codec(directory: Path) -> ImageCodec:
    """Load what `ImageCodec.save` wrote; a dataset directory means its `codec/`.

    Raises:
        DataError: no codec there, unknown kind, or damaged.
    """
    if not (directory / CODEC_FILE).is_file() and (directory / CODEC_DIR / CODEC_FILE).is_file():
        directory = directory / CODEC_DIR
    path = directory / CODEC_FILE
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise DataError(
            f"codec {directory} — no {CODEC_FILE} — must be a saved codec or a built dataset with images — fix the path"
        ) from exc
    except ValueError as exc:
        raise DataError(f"{path} — not JSON: {exc} — the codec is damaged — copy it again") from exc
    kind = header.get("kind") if isinstance(header, dict) else None
    if kind == "pq":
        from lumina_ft.data.codecs.pq import PqCodec

        return PqCodec.load(directory, header)
    if kind == "token-files":
        from lumina_ft.data.codecs.token_files import TokenFileCodec

        return TokenFileCodec.load(directory, header)
    raise DataError(f"{path}: kind — {kind!r} — must be pq or token-files — written by a newer version?")


def write_header(directory: Path, header: dict[str, Any]) -> None:
    """Write `codec.json` into `directory`, which is created."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CODEC_FILE).write_text(json.dumps(header, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def header_counts(directory: Path, header: dict[str, Any], names: Sequence[str]) -> list[int]:
    """Positive integers of a parsed `codec.json`, in the order of `names`.

    Raises:
        DataError: one is missing or not a positive integer.
    """
    for name in names:
        value = header.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise DataError(f"{directory / CODEC_FILE}: {name} — {value!r} — must be at least 1 — the codec is damaged")
    return [header[name] for name in names]


def check_codes(
    codes: NDArray[np.integer], height: int, width: int, *, num_codebooks: int, codes_per_codebook: int
) -> None:
    """Refuse codes that don't fill the grid or lie outside the codebooks.

    Raises:
        DataError: says which.
    """
    if codes.shape != (height * width, num_codebooks):
        raise DataError(
            f"codes of shape {codes.shape} — for a grid of {height} x {width} — must be [{height * width}, "
            f"{num_codebooks}] — drop separator rows first"
        )
    bad = (codes < 0) | (codes >= codes_per_codebook)
    if bad.any():
        row, column = (int(v) for v in np.argwhere(bad)[0])
        raise DataError(
            f"code {int(codes[row, column])} at place {row}, codebook {column} — must be below {codes_per_codebook} — "
            "use the codec that made the codes"
        )
