"""`token-files`: codes that the official encoder wrote ahead of time, `.pkl`/`.pt` files made by `torch.save`.

A row names such a file where other codecs expect an image. The file is a dict with `indices` [n, C] and `coords` [n, 4]
(b, t, h, w) or [n, 5] (b, t, h, w, z); other keys are ignored (spec §4). Files are loaded without running pickled code:
torch's restricted unpickler, plus the few numpy constructors that older files need.
"""

import pickle
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from lumina_ft.data.codecs import CodeGrid, header_counts, write_header
from lumina_ft.data.images import check_file
from lumina_ft.errors import ConfigError, DataError

IMAGE_COORD_COLUMNS = (4, 5)
ROW, COLUMN = 2, 3
"""Columns of `coords` that hold the vertical and the horizontal place."""
MAX_ROWS = 1 << 20
"""More rows than any model's context; also stops a tiny file that expands to terabytes."""

_NUMPY_CLASSES = [np.dtypes.Int8DType, np.dtypes.Int16DType, np.dtypes.Int32DType, np.dtypes.Int64DType] + [
    np.dtypes.UInt8DType,
    np.dtypes.UInt16DType,
    np.dtypes.UInt32DType,
    np.dtypes.UInt64DType,
    np.dtypes.BoolDType,
    np.dtypes.Float32DType,
    np.dtypes.Float64DType,
]


@dataclass(frozen=True)
class TokenFileCodec:
    """Reads token files; has no pixels, so it can neither encode nor decode images."""

    num_codebooks: int
    codes_per_codebook: int
    kind: str = "token-files"

    @property
    def identity(self) -> str:
        return f"token-files:{self.num_codebooks}x{self.codes_per_codebook}"

    def read(self, path: Path) -> CodeGrid:
        """Codes of one image token file.

        Raises:
            DataError: unsafe or damaged pickle, or contents that break a rule of spec §4.
        """
        check_file(path, "token file")
        try:
            return image_grid(
                load_token_file(path), num_codebooks=self.num_codebooks, codes_per_codebook=self.codes_per_codebook
            )
        except DataError as exc:
            raise DataError(f"token file {path} — {exc}") from exc

    def encode(self, images: Sequence[Image.Image]) -> list[CodeGrid]:
        """Not possible: the encoder that made the files is a separate program."""
        raise ConfigError(
            "codec.kind=token-files — can't encode pixels — needs token files — write them with the official encoder"
        )

    def decode(self, codes: NDArray[np.integer], height: int, width: int) -> Image.Image:
        """Not possible: the decoder is a separate program."""
        raise ConfigError(
            "codec.kind=token-files — can't decode to pixels — needs the official decoder — "
            "take the codes from Sampler.image_codes instead"
        )

    def save(self, directory: Path) -> None:
        """Write `codec.json`."""
        header = {
            "kind": self.kind,
            "num_codebooks": self.num_codebooks,
            "codes_per_codebook": self.codes_per_codebook,
        }
        write_header(directory, header)

    @classmethod
    def load(cls, directory: Path, header: dict[str, Any]) -> "TokenFileCodec":
        """Load a saved codec; `header` is its parsed `codec.json`.

        Raises:
            DataError: a number is missing.
        """
        num_codebooks, codes = header_counts(directory, header, ("num_codebooks", "codes_per_codebook"))
        return cls(num_codebooks, codes)


def load_token_file(path: Path) -> Any:
    """Unpickle a `torch.save` file without executing anything it names.

    Raises:
        DataError: it names a class or function outside the allow-list, or isn't such a file.
    """
    try:
        with torch.serialization.safe_globals(_numpy_constructors()), warnings.catch_warnings():
            # Only said of files that are refused anyway.
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as exc:
        # The rest of torch's message advises to load the file unsafely.
        named = re.search(r"GLOBAL (\S+)|but got <class '(\S+)'>", str(exc))
        found = f"names {named[1] or named[2]}, which isn't plain data" if named else "isn't a torch.save file"
        raise DataError(
            f"refused: {found} — may only hold tensors, numbers and strings — write it again with the official encoder"
        ) from exc
    except Exception as exc:  # torch raises many kinds on damaged archives
        raise DataError(
            f"unreadable: {type(exc).__name__} {' '.join(str(exc).split()[:12])} — must be a torch.save file — "
            "write it again"
        ) from exc


def image_grid(payload: Any, *, num_codebooks: int, codes_per_codebook: int) -> CodeGrid:
    """Check a loaded payload and read it as one image.

    Raises:
        DataError: says which rule of spec §4 is broken; the caller adds the file.
    """
    if not isinstance(payload, dict):
        raise DataError(f"holds a {type(payload).__name__} — must be a dict with indices and coords")
    indices = _integers(payload, "indices", (num_codebooks,))
    coords = _integers(payload, "coords", IMAGE_COORD_COLUMNS)
    if len(indices) != len(coords):
        raise DataError(f"{len(indices)} indices and {len(coords)} coords — must have equal rows")
    bad = (indices < 0) | (indices >= codes_per_codebook)
    if bad.any():
        row, column = (int(v) for v in np.argwhere(bad)[0])
        raise DataError(
            f"indices[{row}, {column}] — {int(indices[row, column])} — codes must be in 0..{codes_per_codebook - 1}"
        )
    if (coords < 0).any():
        row, column = (int(v) for v in np.argwhere(coords < 0)[0])
        raise DataError(f"coords[{row}, {column}] — {int(coords[row, column])} — must be at least 0")
    height, width = _grid_size(coords)
    return CodeGrid(indices.astype(np.uint16), height, width)


def _grid_size(coords: NDArray[np.int64]) -> tuple[int, int]:
    """Height and width of raster-ordered image coords [n, 4 or 5], every other column constant."""
    for column, name in ((0, "batch ids"), (1, "time steps"), (4, "depths")):
        if column < coords.shape[1] and len(found := np.unique(coords[:, column])) > 1:
            raise DataError(
                f"coords column {column} — {len(found)} {name} — an image has one — split the file, one image each"
            )
    height, width = int(coords[:, ROW].max()) + 1, int(coords[:, COLUMN].max()) + 1
    if height > MAX_ROWS or width > MAX_ROWS:
        raise DataError(f"coords — reach to row {height - 1}, column {width - 1} — must be below {MAX_ROWS}")
    places = coords[:, ROW] * width + coords[:, COLUMN]
    order = np.sort(places)
    if (twice := np.flatnonzero(order[1:] == order[:-1])).size:
        row, column = divmod(int(order[twice[0]]), width)
        raise DataError(f"coords — row {row}, column {column} occurs twice — every place must occur once")
    if len(coords) != height * width:
        raise DataError(f"{len(coords)} rows — for a grid of {height} x {width} — must be {height * width}")
    if (wrong := np.flatnonzero(places != np.arange(height * width))).size:
        found = coords[wrong[0], [ROW, COLUMN]].tolist()
        raise DataError(
            f"coords[{int(wrong[0])}] — row {found[0]}, column {found[1]} — rows must be in raster order — sort them"
        )
    return height, width


def _integers(payload: dict[Any, Any], key: str, columns: tuple[int, ...]) -> NDArray[np.int64]:
    """One array of the payload as [n, columns] int64, after the checks on type, shape and dtype."""
    if key not in payload:
        raise DataError(f"has the keys {sorted(map(str, payload))} — must have indices and coords — {key} is missing")
    value = payload[key]
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise DataError(f"{key} — a {value.layout} tensor — must be a plain dense tensor")
        shape, kind = tuple(value.shape), str(value.dtype).removeprefix("torch.")
        integral = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    elif isinstance(value, np.ndarray):
        shape, kind = value.shape, str(value.dtype)
        integral = value.dtype.kind in "iu"
    else:
        raise DataError(f"{key} — a {type(value).__name__} — must be a tensor or array")
    allowed = " or ".join(map(str, columns))
    if len(shape) != 2 or shape[1] not in columns:
        raise DataError(f"{key} — shape {list(shape)} — must be [n, {allowed}]")
    if not 0 < shape[0] <= MAX_ROWS:
        raise DataError(f"{key} — {shape[0]} rows — must be 1..{MAX_ROWS}")
    if not integral:
        raise DataError(f"{key} — dtype {kind} — must be an integer dtype")
    array = value.numpy() if isinstance(value, torch.Tensor) else value
    if array.max() > np.iinfo(np.int64).max:
        raise DataError(f"{key} — value {array.max()} — is far out of range")
    return array.astype(np.int64)


def _numpy_constructors() -> list[Any]:
    """What unpickling a numpy array of numbers calls, under its names in numpy 1 and 2. None of it runs foreign code.

    The array class itself is only built empty and then filled with bytes; arrays of objects would need the object
    dtype, which isn't listed.
    """
    reconstruct = np.zeros(0).__reduce__()[0]
    scalar = np.int64(0).__reduce__()[0]
    names = [(reconstruct, "_reconstruct"), (scalar, "scalar")]
    aliases = [(function, f"numpy.{core}.multiarray.{name}") for function, name in names for core in ("core", "_core")]
    return [*aliases, np.ndarray, np.dtype, *_NUMPY_CLASSES]
