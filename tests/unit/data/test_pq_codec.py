"""The built-in product quantiser."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier

from lumina_ft.config.data_schema import CodecConfig
from lumina_ft.data.codecs import load_codec
from lumina_ft.data.codecs.pq import PqCodec, fit_pq, image_patches
from lumina_ft.data.digits import load_digits, split_digits
from lumina_ft.errors import ConfigError, DataError

GRAY = CodecConfig(channels="gray")


def fit(images: list[Image.Image], config: CodecConfig = GRAY, seed: int = 0) -> PqCodec:
    return fit_pq(images, config, num_images=len(images), seed=seed)


def noise_images(count: int, size: int, mode: str, seed: int = 0) -> list[Image.Image]:
    shape = (size, size) if mode == "L" else (size, size, 3)
    rng = np.random.default_rng(seed)
    return [Image.fromarray(rng.integers(0, 256, shape).astype(np.uint8)) for _ in range(count)]


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, PqCodec]:
    images, labels = load_digits()
    heldout = split_digits(labels, heldout_fraction=0.2, seed=0)
    return images, labels, heldout, fit([Image.fromarray(image) for image in images[~heldout]])


def test_heldout_digits_stay_recognisable_through_the_codec(digits) -> None:
    images, labels, heldout, codec = digits
    grids = codec.encode([Image.fromarray(image) for image in images[heldout]])
    assert {(g.height, g.width, g.codes.shape, g.codes.dtype.name) for g in grids} == {(2, 2, (4, 8), "uint16")}
    decoded = np.stack([np.asarray(codec.decode(g.codes, g.height, g.width)) for g in grids])
    judge = KNeighborsClassifier(3).fit(images[~heldout].reshape(-1, 64), labels[~heldout])
    assert judge.score(decoded.reshape(-1, 64), labels[heldout]) >= 0.95
    assert len({g.codes.tobytes() for g in grids}) > 0.9 * len(grids)


def test_every_codebook_is_used_and_improves_the_picture(digits) -> None:
    images, _, heldout, codec = digits
    sample = [Image.fromarray(image) for image in images[heldout][:100]]
    grids = codec.encode(sample)
    truth = np.stack([np.asarray(image, float) for image in sample])

    def error(change: int | None) -> float:
        total = 0.0
        for image, grid in zip(truth, grids, strict=True):
            codes = grid.codes.copy()
            if change is not None:
                codes[:, change] = (codes[:, change] + 7) % 32
            total += float(np.square(np.asarray(codec.decode(codes, 2, 2), float) - image).mean())
        return total / len(grids)

    assert all(error(codebook) > 1.5 * error(None) for codebook in range(8))
    assert all(len(np.unique([g.codes[:, c] for g in grids])) > 16 for c in range(8))


def test_codes_do_not_depend_on_the_other_images_of_the_call(digits) -> None:
    images, _, _, codec = digits
    sample = [Image.fromarray(image) for image in images[:20]]
    together = codec.encode(sample)
    for image, grid in zip(sample, together, strict=True):
        assert np.array_equal(codec.encode([image])[0].codes, grid.codes)


def test_equal_input_gives_equal_bytes_and_another_seed_another_identity(tmp_path: Path) -> None:
    images = noise_images(30, 8, "L")
    first, again, other = fit(images), fit(images), fit(images, seed=1)
    assert first.identity == again.identity != other.identity
    first.save(tmp_path / "a")
    again.save(tmp_path / "b")
    for name in ("codec.json", "codec.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_saved_codec_loads_with_equal_identity_codes_and_pixels(tmp_path: Path) -> None:
    config = CodecConfig(channels="rgb", image_size=12, patch_size=3, codes_per_codebook=16, num_codebooks=5)
    images = noise_images(12, 40, "RGB")
    codec = fit(images, config)
    codec.save(tmp_path / "data" / "codec")
    for place in (tmp_path / "data" / "codec", tmp_path / "data"):
        loaded = load_codec(place)
        assert loaded.identity == codec.identity and loaded.kind == "pq"
        grid = loaded.encode(images[:1])[0]
        assert (grid.height, grid.width, loaded.num_codebooks, loaded.codes_per_codebook) == (4, 4, 5, 16)
        picture = loaded.decode(grid.codes, 4, 4)
        assert picture.mode == "RGB" and picture.size == (12, 12)
        assert picture.tobytes() == codec.decode(grid.codes, 4, 4).tobytes()


def test_patches_are_in_raster_order_and_decode_puts_them_back() -> None:
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    patches = image_patches(Image.fromarray(pixels), 8, 4, "gray")
    assert np.array_equal(patches[1], pixels[:4, 4:].ravel()) and np.array_equal(patches[2], pixels[4:, :4].ravel())
    codec = fit([Image.fromarray(pixels)], CodecConfig(channels="gray", codes_per_codebook=4))
    grid = codec.encode([Image.fromarray(pixels)])[0]
    assert np.array_equal(np.asarray(codec.decode(grid.codes, 2, 2)), pixels)


def test_fewer_distinct_patches_than_codes_leaves_codes_unused_but_decodable() -> None:
    images = [Image.new("L", (8, 8), level) for level in (0, 255)]
    codec = fit(images)
    codes = np.concatenate([grid.codes for grid in codec.encode(images)])
    assert codes.max() == 1
    codec.decode(np.full((4, 8), 31), 2, 2)
    for image, grid in zip(images, codec.encode(images), strict=True):
        assert np.asarray(codec.decode(grid.codes, 2, 2)).tolist() == np.asarray(image).tolist()


def test_decode_refuses_separator_ids_and_wrong_shapes(digits) -> None:
    codec = digits[3]
    with pytest.raises(DataError, match="code 32 at place 3, codebook 7 — must be below 32"):
        codec.decode(np.array([[0] * 8] * 3 + [[0] * 7 + [32]]), 2, 2)
    with pytest.raises(DataError, match=r"shape \(6, 8\) — for a grid of 2 x 2 — must be \[4, 8\]"):
        codec.decode(np.zeros((6, 8), int), 2, 2)


def test_more_codebooks_than_numbers_per_patch_is_a_config_error() -> None:
    config = CodecConfig(channels="gray", image_size=4, patch_size=2)
    with pytest.raises(ConfigError, match="codec.num_codebooks=8 — a patch has 4 numbers"):
        fit(noise_images(2, 4, "L"), config)


def test_damaged_codecs_are_data_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no codec.json"):
        load_codec(tmp_path)
    fit(noise_images(4, 8, "L")).save(tmp_path)
    header = json.loads((tmp_path / "codec.json").read_text())
    for change, message in (
        ("{", "not JSON"),
        (json.dumps(header | {"kind": "vq"}), "kind — 'vq' — must be pq or token-files"),
        (json.dumps(header | {"patch_size": 0}), "patch_size — 0 — must be at least 1"),
        (json.dumps(header | {"patch_size": 2}), "tensor shapes — don't fit codec.json"),
        (json.dumps(header | {"channels": "cmyk"}), "channels — 'cmyk'"),
        (json.dumps(header | {"num_codebooks": 9}), "codec is damaged"),
    ):
        (tmp_path / "codec.json").write_text(change)
        with pytest.raises(DataError, match=message):
            load_codec(tmp_path)
    (tmp_path / "codec.json").write_text(json.dumps(header))
    (tmp_path / "codec.safetensors").write_bytes(b"short")
    with pytest.raises(DataError, match="codec is damaged"):
        load_codec(tmp_path)
