"""Open image files the way training data needs it: strict about what is no image, tolerant with a cut-off JPEG."""

from pathlib import Path
from typing import Literal

from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from lumina_ft.errors import DataError

SNIFF_BYTES = 256
_TRANSPARENT = ("RGBA", "LA", "PA", "RGBa", "La")
_WIDE = ("I", "F")


def open_image(path: Path, channels: Literal["gray", "rgb"]) -> tuple[Image.Image, bool]:
    """Decode an image file: EXIF orientation applied, transparency laid on white, first frame of an animation.

    Args:
        path: the file.
        channels: result mode `L` or `RGB`.

    Returns:
        The image, and whether it is a JPEG that ends too early and was decoded tolerantly (V9).

    Raises:
        DataError: missing, empty, not an image, damaged, too large or with 32-bit pixels.
    """
    check_file(path, "image")
    try:
        image, repaired = _decode(path)
        image = ImageOps.exif_transpose(image)
    except UnidentifiedImageError as exc:
        raise DataError(f"image {path} — {_looks_like(path)} — must be an image file — replace it") from exc
    except Image.DecompressionBombError as exc:
        raise DataError(f"image {path} — {exc} — must be a reasonable size — shrink it") from exc
    except Exception as exc:  # Pillow's format plugins raise many kinds on damaged files
        raise DataError(f"image {path} — {_reason(exc)} — must be an undamaged image file — replace it") from exc
    return _to_mode(image, path, "L" if channels == "gray" else "RGB"), repaired


def check_file(path: Path, what: str) -> None:
    """Refuse a path that is no file with content; `what` names it in messages.

    Raises:
        DataError: missing, a directory or empty.
    """
    try:
        if path.is_file():
            if path.stat().st_size == 0:
                raise DataError(f"{what} {path} — empty, 0 bytes — must have content — replace it")
            return
        found = "is a directory" if path.is_dir() else "no such file"
    except (OSError, ValueError) as exc:
        found = str(exc)
    raise DataError(f"{what} {path} — {found} — must exist — fix the path or media_dir")


def _decode(path: Path) -> tuple[Image.Image, bool]:
    """Load all pixels; a truncated JPEG is read a second time with Pillow's tolerant mode, for this image only."""
    try:
        with Image.open(path) as image:
            image.load()
            return image, False
    except OSError as exc:
        if isinstance(exc, UnidentifiedImageError) or not _is_jpeg(path):
            raise
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    try:
        with Image.open(path) as image:
            image.load()
            return image, True
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def _reason(exc: Exception) -> str:
    return f"damaged: {' '.join(str(exc).split()) or type(exc).__name__}"


def _is_jpeg(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(3) == b"\xff\xd8\xff"


def _looks_like(path: Path) -> str:
    """What a file that is no image holds, as far as its first bytes tell."""
    with path.open("rb") as stream:
        head = stream.read(SNIFF_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if head.startswith((b"<!doctype html", b"<html", b"<head")):
        return "an HTML page, probably a failed download"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer"
    return f"not an image, starts with {head[:12]!r}"


def _to_mode(image: Image.Image, path: Path, mode: str) -> Image.Image:
    if image.mode.startswith("I;16"):
        # 16 bits per pixel: `convert` would clip at 255 instead of scaling.
        image = image.convert("I").point(lambda value: value / 257).convert("L")
    elif image.mode in _WIDE:
        raise DataError(f"image {path} — pixel mode {image.mode} — must have 8 or 16 bits per channel — convert it")
    if image.mode in _TRANSPARENT or "transparency" in image.info:
        layer = image.convert("RGBA")
        canvas = Image.new("RGBA", layer.size, "white")
        canvas.alpha_composite(layer)
        image = canvas.convert("RGB")
    return image.convert(mode)
