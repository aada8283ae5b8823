"""Opening image files: what is refused, what is repaired (V9)."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from lumina_ft.data.images import open_image
from lumina_ft.errors import DataError


def jpeg_bytes(size: int = 64) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3)).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=95)
    return stream.getvalue()


def test_truncated_jpeg_is_repaired_for_this_image_only_and_the_flag_is_restored(tmp_path: Path) -> None:
    whole = jpeg_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "whole.jpg").write_bytes(whole)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    cut, repaired = open_image(tmp_path / "cut.jpg", "rgb")
    assert repaired and cut.size == (64, 64) and ImageFile.LOAD_TRUNCATED_IMAGES is False
    reference, untouched = open_image(tmp_path / "whole.jpg", "rgb")
    assert not untouched
    assert np.array_equal(np.asarray(cut)[:8], np.asarray(reference)[:8])


def test_flag_is_restored_when_the_second_try_fails_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cut.jpg").write_bytes(jpeg_bytes()[:900])
    seen = []

    def broken(self: ImageFile.ImageFile) -> None:
        seen.append(ImageFile.LOAD_TRUNCATED_IMAGES)
        raise OSError("image file is truncated")

    monkeypatch.setattr(ImageFile.ImageFile, "load", broken)
    with pytest.raises(DataError, match="image file is truncated"):
        open_image(tmp_path / "cut.jpg", "rgb")
    assert seen == [False, True] and ImageFile.LOAD_TRUNCATED_IMAGES is False


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty, 0 bytes"),
        (b"<!DOCTYPE html><html>404</html>", "an HTML page, probably a failed download"),
        (b"\xef\xbb\xbf\n  <HTML>404", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b"GIF", "not an image, starts with"),
        (b"\xff\xd8\xff\xe0", "must be an image file"),
    ],
)
def test_files_that_are_no_image_say_what_they_are(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"image {path} — .*{message}"):
        open_image(path, "rgb")


def test_missing_files_and_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file — must exist — fix the path or media_dir"):
        open_image(tmp_path / "none.png", "rgb")
    with pytest.raises(DataError, match="is a directory"):
        open_image(tmp_path, "rgb")
    with pytest.raises(DataError, match="image "):
        open_image(tmp_path / ("n" * 300), "rgb")


def test_truncated_png_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)).save(stream, "PNG")
    (tmp_path / "cut.png").write_bytes(stream.getvalue()[:3000])
    with pytest.raises(DataError, match="must be an undamaged image file"):
        open_image(tmp_path / "cut.png", "rgb")


def test_whatever_a_format_plugin_raises_on_damage_is_a_data_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to decode image:\n  Missing item")

    (tmp_path / "a.jpg").write_bytes(jpeg_bytes())
    for owner, name in ((Image, "open"), (ImageOps, "exif_transpose")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            with pytest.raises(DataError, match=r"a\.jpg — damaged: Failed to decode image: Missing item — must be"):
                open_image(tmp_path / "a.jpg", "rgb")


def test_pixels_are_brought_to_the_mode_asked_for(tmp_path: Path) -> None:
    Image.new("RGBA", (2, 2), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    Image.new("LA", (2, 2), (0, 0)).save(tmp_path / "la.png")
    Image.fromarray(np.full((2, 2), 257 * 100, np.uint16)).save(tmp_path / "deep.png")
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    palette.save(tmp_path / "palette.png")
    sideways = Image.new("RGB", (4, 2))
    exif = Image.Exif()
    exif[0x0112] = 6
    sideways.save(tmp_path / "sideways.jpg", exif=exif)
    assert open_image(tmp_path / "clear.png", "rgb")[0].getpixel((0, 0)) == (255, 255, 255)
    assert open_image(tmp_path / "la.png", "gray")[0].getpixel((0, 0)) == 255
    assert open_image(tmp_path / "deep.png", "gray")[0].getpixel((0, 0)) == 100
    assert open_image(tmp_path / "palette.png", "rgb")[0].getpixel((0, 0)) == (10, 20, 30)
    assert open_image(tmp_path / "sideways.jpg", "rgb")[0].size == (2, 4)


def test_float_pixels_and_decompression_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(np.zeros((2, 2), np.float32)).save(tmp_path / "float.tiff")
    with pytest.raises(DataError, match="pixel mode F"):
        open_image(tmp_path / "float.tiff", "rgb")
    Image.new("L", (100, 100)).save(tmp_path / "big.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(DataError, match="must be a reasonable size"):
        open_image(tmp_path / "big.png", "rgb")
