"""`pq`: a product quantiser for small images, fitted in seconds on the user's own pictures.

Every patch is a vector; its principal axes are dealt to C sub-spaces, and each sub-space has its own k-means codebook
(product quantisation with eigenvalue allocation: Jegou et al. 2011, Ge et al. 2013). One patch is one place of the
code grid.

Shape legend: m patches, d numbers per patch (patch_size squared times channels), C codebooks, K codes, w axes per
sub-space.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from lumina_ft.config.data_schema import CodecConfig
from lumina_ft.data.codecs import CODEC_FILE, CodeGrid, check_codes, header_counts, write_header
from lumina_ft.data.images import open_image
from lumina_ft.errors import ConfigError, DataError

MAX_FIT_PATCHES = 1 << 17
"""k-means sees at most about this many patches, chosen by seed: more don't move the centres."""
MAX_FIT_NUMBERS = 1 << 25
"""Limit of patches times numbers per patch: 256 MB."""
KMEANS_ROUNDS = 30
TENSOR_FILE = "codec.safetensors"
_CHUNK = 1 << 18
"""Distances held at once: 2 MB, so that they stay in cache."""


@dataclass(frozen=True)
class PqCodec:
    """A fitted quantiser.

    Attributes:
        image_size, patch_size: pixels per side.
        channels: `gray` or `rgb`.
        mean: [d] float64, mean patch.
        axes: [d, d] float64, orthonormal columns in sub-space order.
        widths: axes per sub-space, sums to d.
        centres: C arrays [K, w] float64. Where there were fewer distinct points than K, the last centres repeat the
            first one, and the lower index wins: they are never chosen.
    """

    image_size: int
    patch_size: int
    channels: Literal["gray", "rgb"]
    mean: NDArray[np.float64]
    axes: NDArray[np.float64]
    widths: tuple[int, ...]
    centres: tuple[NDArray[np.float64], ...]
    kind: str = "pq"

    @property
    def num_codebooks(self) -> int:
        return len(self.centres)

    @property
    def codes_per_codebook(self) -> int:
        return len(self.centres[0])

    @property
    def grid(self) -> int:
        """Code places per side."""
        return self.image_size // self.patch_size

    @property
    def identity(self) -> str:
        digest = hashlib.sha256(repr(sorted(self._header().items())).encode())
        for name, tensor in sorted(self._tensors().items()):
            digest.update(name.encode() + np.ascontiguousarray(tensor).tobytes())
        return "pq:sha256:" + digest.hexdigest()

    def read(self, path: Path) -> CodeGrid:
        """Open and encode an image file; see `ImageCodec.read`."""
        image, repaired = open_image(path, self.channels)
        grid = self.encode([image])[0]
        return CodeGrid(grid.codes, grid.height, grid.width, repaired)

    def encode(self, images: Sequence[Image.Image]) -> list[CodeGrid]:
        """Nearest centre per sub-space; an image's codes don't depend on its neighbours in the list."""
        result = []
        for image in images:
            patches = image_patches(image, self.image_size, self.patch_size, self.channels)
            parts = _split((patches - self.mean) @ self.axes, self.widths)
            columns = [_nearest(part, book) for part, book in zip(parts, self.centres, strict=True)]
            result.append(CodeGrid(np.stack(columns, axis=1).astype(np.uint16), self.grid, self.grid))
        return result

    def decode(self, codes: NDArray[np.integer], height: int, width: int) -> Image.Image:
        """Place the centres' patches; mode L or RGB, any grid size."""
        values = np.asarray(codes)
        check_codes(
            values,
            height,
            width,
            num_codebooks=self.num_codebooks,
            codes_per_codebook=self.codes_per_codebook,
        )
        rotated = np.concatenate([book[values[:, c]] for c, book in enumerate(self.centres)], axis=1)
        patches = np.clip(np.rint(rotated @ self.axes.T + self.mean), 0, 255).astype(np.uint8)
        size, depth = self.patch_size, 1 if self.channels == "gray" else 3
        pixels = patches.reshape(height, width, size, size, depth).swapaxes(1, 2)
        pixels = pixels.reshape(height * size, width * size, depth)
        return Image.fromarray(pixels[:, :, 0] if depth == 1 else pixels)

    def save(self, directory: Path) -> None:
        """Write `codec.json` and `codec.safetensors`."""
        write_header(directory, self._header())
        save_file(self._tensors(), str(directory / TENSOR_FILE))

    @classmethod
    def load(cls, directory: Path, header: dict[str, Any]) -> "PqCodec":
        """Load a saved codec; `header` is its parsed `codec.json`.

        Raises:
            DataError: a number or tensor is missing or doesn't fit.
        """
        names = ("image_size", "patch_size", "num_codebooks", "codes_per_codebook")
        image_size, patch_size, num_codebooks, codes = header_counts(directory, header, names)
        channels = header.get("channels")
        if channels not in ("gray", "rgb"):
            raise DataError(f"{directory / CODEC_FILE}: channels — {channels!r} — must be gray or rgb")
        path = directory / TENSOR_FILE
        try:
            tensors = load_file(str(path))
            centres = tuple(tensors[f"centres.{c}"] for c in range(num_codebooks))
            mean, axes = tensors["mean"], tensors["axes"]
        except (OSError, SafetensorError, KeyError) as exc:
            raise DataError(f"{path} — {exc} — the codec is damaged — copy it again") from exc
        widths = tuple(book.shape[1] for book in centres)
        size = patch_size**2 * (1 if channels == "gray" else 3)
        fits = mean.shape == (size,) and axes.shape == (size, size) and sum(widths) == size
        if not fits or any(len(book) != codes for book in centres):
            raise DataError(f"{path} — tensor shapes — don't fit {CODEC_FILE} — the codec is damaged; copy it again")
        return cls(image_size, patch_size, channels, mean, axes, widths, centres)

    def _header(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "image_size": self.image_size,
            "patch_size": self.patch_size,
            "channels": self.channels,
            "num_codebooks": self.num_codebooks,
            "codes_per_codebook": self.codes_per_codebook,
        }

    def _tensors(self) -> dict[str, NDArray[Any]]:
        books = {f"centres.{c}": np.ascontiguousarray(book) for c, book in enumerate(self.centres)}
        return {"mean": self.mean, "axes": np.ascontiguousarray(self.axes)} | books


def fit_pq(images: Iterable[Image.Image], config: CodecConfig, *, num_images: int, seed: int) -> PqCodec:
    """Fit a quantiser; equal images, config and seed give equal bytes.

    Args:
        images: at least one, of any size.
        config: sizes, codebooks and channels.
        num_images: how many images there will be at most; patches are drawn evenly from all of them.
        seed: chooses patches and starting centres.

    Raises:
        ConfigError: a patch has fewer numbers than there are codebooks.
        DataError: no image.
    """
    depth = 1 if config.channels == "gray" else 3
    size = config.patch_size**2 * depth
    if size < config.num_codebooks:
        raise ConfigError(
            f"codec.num_codebooks={config.num_codebooks} — a patch has {size} numbers (codec.patch_size="
            f"{config.patch_size}, {config.channels}) — needs at least one per codebook — enlarge codec.patch_size"
        )
    rng = np.random.default_rng([seed, 0])
    quota = max(1, min(MAX_FIT_PATCHES, MAX_FIT_NUMBERS // size) // max(num_images, 1))
    stacks = []
    for image in images:
        patches = image_patches(image, config.image_size, config.patch_size, config.channels)
        if len(patches) > quota:
            patches = patches[np.sort(rng.choice(len(patches), quota, replace=False))]
        stacks.append(patches)
    if not stacks:
        raise DataError("codec pq — no image to fit on — needs at least one — give rows with images or codec.path")
    patches = np.concatenate(stacks)
    mean, axes, widths = _sub_spaces(patches, config.num_codebooks)
    parts = _split((patches - mean) @ axes, widths)
    return PqCodec(
        image_size=config.image_size,
        patch_size=config.patch_size,
        channels=config.channels,
        mean=mean,
        axes=axes,
        widths=widths,
        centres=tuple(_kmeans(part, config.codes_per_codebook, rng) for part in parts),
    )


def image_patches(
    image: Image.Image, image_size: int, patch_size: int, channels: Literal["gray", "rgb"]
) -> NDArray[np.float64]:
    """Resize to a square and cut it.

    Returns:
        [places, d] float64 holding integers 0..255, places in raster order, pixels of a patch in raster order.
    """
    image = image.convert("L" if channels == "gray" else "RGB")
    if image.size != (image_size, image_size):
        image = image.resize((image_size, image_size), Image.Resampling.LANCZOS)
    grid = image_size // patch_size
    pixels = np.asarray(image, dtype=np.float64).reshape(grid, patch_size, grid, patch_size, -1)
    return pixels.swapaxes(1, 2).reshape(grid * grid, -1)


def _sub_spaces(
    patches: NDArray[np.float64], num_codebooks: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], tuple[int, ...]]:
    """Principal axes, grouped so that the sub-spaces share the variance evenly.

    Returns:
        mean [d]; axes [d, d] in sub-space order; axes per sub-space.
    """
    # Pixels are integers, so these sums are exact and don't depend on the number of BLAS threads.
    total, products = patches.sum(axis=0), patches.T @ patches
    mean = total / len(patches)
    values, vectors = np.linalg.eigh(products / len(patches) - np.outer(mean, mean))
    order = np.argsort(-values, kind="stable")
    values, vectors = np.maximum(values[order], 0), vectors[:, order]
    largest = np.abs(vectors).argmax(axis=0)
    vectors = vectors * np.sign(vectors[largest, np.arange(len(values))])
    # Eigenvalue allocation: the next axis goes to the sub-space with the smallest product of variances so far.
    limits = [len(part) for part in np.array_split(np.arange(len(values)), num_codebooks)]
    members: list[list[int]] = [[] for _ in limits]
    load = np.zeros(num_codebooks)
    for axis, variance in enumerate(values):
        open_spaces = [c for c in range(num_codebooks) if len(members[c]) < limits[c]]
        target = min(open_spaces, key=lambda c: (load[c], c))
        members[target].append(axis)
        load[target] += np.log(variance + 1.0)
    return mean, vectors[:, [axis for space in members for axis in space]], tuple(limits)


def _split(rotated: NDArray[np.float64], widths: Sequence[int]) -> list[NDArray[np.float64]]:
    return np.split(rotated, np.cumsum(widths)[:-1], axis=1)


def _nearest(points: NDArray[np.float64], centres: NDArray[np.float64]) -> NDArray[np.int64]:
    """Index of the nearest centre per point [m, w]; the lowest index wins a tie.

    Differences, not the expanded square: no cancellation, and a row's result doesn't depend on the other rows.
    """
    found = np.empty(len(points), dtype=np.int64)
    step = max(1, _CHUNK // len(centres))
    for start in range(0, len(points), step):
        block = points[start : start + step]
        distance = np.zeros((len(block), len(centres)))
        for axis, column in enumerate(block.T):
            distance += np.square(column[:, None] - centres[:, axis])
        found[start : start + step] = distance.argmin(axis=1)
    return found


def _kmeans(points: NDArray[np.float64], num_centres: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Lloyd's algorithm from k-means++ starts (Arthur and Vassilvitskii 2007).

    Returns:
        [num_centres, w]; with fewer distinct points, the last ones repeat the first.
    """
    centres = _starts(points, num_centres, rng)
    for _ in range(KMEANS_ROUNDS):
        owner = _nearest(points, centres)
        counts = np.bincount(owner, minlength=len(centres))
        sums = np.stack([np.bincount(owner, weights=column, minlength=len(centres)) for column in points.T], axis=1)
        moved = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centres)
        if np.array_equal(moved, centres):
            break
        centres = moved
    return np.concatenate([centres, np.repeat(centres[:1], num_centres - len(centres), axis=0)])


def _starts(points: NDArray[np.float64], num_centres: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """k-means++: each next start is drawn in proportion to its squared distance from the nearest one so far."""
    chosen = [int(rng.integers(len(points)))]
    distance = np.square(points - points[chosen[0]]).sum(axis=1)
    # Rotating integers leaves rounding of about 1e-13 between equal points.
    while len(chosen) < num_centres and distance.max() > 1e-9:
        cumulative = np.cumsum(distance)
        pick = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
        chosen.append(min(pick, len(points) - 1))
        distance = np.minimum(distance, np.square(points - points[chosen[-1]]).sum(axis=1))
    return points[chosen]
