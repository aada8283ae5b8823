"""Official token files: every check of spec §4, and no pickled code ever runs."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lumina_ft.data.codecs import load_codec
from lumina_ft.data.codecs.token_files import TokenFileCodec
from lumina_ft.errors import ConfigError, DataError

CODEC = TokenFileCodec(num_codebooks=8, codes_per_codebook=4096)
HEIGHT, WIDTH = 2, 3
COORDS = torch.tensor([[0, 1, h, w, 0] for h in range(HEIGHT) for w in range(WIDTH)], dtype=torch.int32)
INDICES = torch.arange(48, dtype=torch.int32).reshape(6, 8) * 85


class Payload:
    """Pickles to a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


def save(path: Path, payload: Any, **options: Any) -> Path:
    torch.save(payload, path, **options)
    return path


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("arrays", ["torch", "numpy", "numpy big-endian uint16"])
@pytest.mark.parametrize("columns", [4, 5])
def test_official_files_and_legacy_numpy_payloads_load(tmp_path: Path, zipped: bool, arrays: str, columns: int) -> None:
    indices, coords = INDICES, COORDS[:, :columns]
    extra: dict[str, Any] = {"image_width": 48, "object_id": "x", "source": "y", "voxel_resolution": 48}
    if arrays != "torch":
        kind = ">u2" if "big" in arrays else np.int64
        indices, coords = indices.numpy().astype(kind), coords.numpy().astype(kind)
        extra["image_height"] = np.int64(32)
    payload = {"indices": indices, "coords": coords, **extra}
    path = save(tmp_path / "image.pkl", payload, _use_new_zipfile_serialization=zipped)
    grid = CODEC.read(path)
    assert (grid.height, grid.width, grid.codes.dtype) == (HEIGHT, WIDTH, np.uint16)
    assert np.array_equal(grid.codes, INDICES.numpy())


@pytest.mark.parametrize("container", ["torch zip", "torch legacy", "plain pickle"])
def test_pickled_code_is_refused_and_not_executed(tmp_path: Path, container: str) -> None:
    proof = tmp_path / "executed"
    payload = {"indices": INDICES, "coords": COORDS, "extra": Payload(f"touch {proof}")}
    path = tmp_path / "evil.pkl"
    if container == "plain pickle":
        path.write_bytes(pickle.dumps(payload))
    else:
        save(path, payload, _use_new_zipfile_serialization=container == "torch zip")
    with pytest.raises(DataError, match=r"evil.pkl — refused: .* may only hold tensors") as caught:
        CODEC.read(path)
    assert not proof.exists()
    assert "weights_only" not in str(caught.value), "torch's advice to load unsafely must not be passed on"
    if container == "plain pickle":
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert proof.exists(), "the fixture would have executed code"


def test_object_arrays_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "o.pt", {"indices": INDICES.numpy().astype(object), "coords": COORDS})
    with pytest.raises(DataError, match="ObjectDType"):
        CODEC.read(path)


def replaced(tensor: torch.Tensor, row: int, column: int, value: int) -> torch.Tensor:
    changed = tensor.clone()
    changed[row, column] = value
    return changed


SWAPPED = COORDS[[1, 0, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ([INDICES, COORDS], "holds a list — must be a dict"),
        ({"indices": INDICES}, "coords is missing"),
        ({"coords": COORDS}, "indices is missing"),
        ({"indices": INDICES.ravel(), "coords": COORDS}, r"indices — shape \[48\] — must be \[n, 8\]"),
        ({"indices": INDICES[:, :7], "coords": COORDS}, r"indices — shape \[6, 7\] — must be \[n, 8\]"),
        ({"indices": INDICES, "coords": COORDS[:, :3]}, r"coords — shape \[6, 3\] — must be \[n, 4 or 5\]"),
        ({"indices": INDICES[:0], "coords": COORDS[:0]}, "indices — 0 rows — must be 1"),
        ({"indices": INDICES.float(), "coords": COORDS}, "indices — dtype float32 — must be an integer"),
        ({"indices": INDICES > 3, "coords": COORDS}, "indices — dtype bool — must be an integer"),
        ({"indices": INDICES, "coords": COORDS.numpy() / 1}, "coords — dtype float64 — must be an integer"),
        ({"indices": INDICES.tolist(), "coords": COORDS}, "indices — a list — must be a tensor"),
        ({"indices": INDICES.to_sparse(), "coords": COORDS}, "must be a plain dense tensor"),
        ({"indices": INDICES[:5], "coords": COORDS}, "5 indices and 6 coords — must have equal rows"),
        ({"indices": replaced(INDICES, 4, 2, 4096), "coords": COORDS}, r"indices\[4, 2\] — 4096 — .* 0..4095"),
        ({"indices": replaced(INDICES, 4, 2, -1), "coords": COORDS}, r"indices\[4, 2\] — -1"),
        ({"indices": INDICES, "coords": replaced(COORDS, 1, 3, -1)}, r"coords\[1, 3\] — -1 — must be at least 0"),
        ({"indices": INDICES, "coords": replaced(COORDS, 5, 0, 1)}, "column 0 — 2 batch ids"),
        ({"indices": INDICES, "coords": replaced(COORDS, 5, 1, 2)}, "column 1 — 2 time steps"),
        ({"indices": INDICES, "coords": replaced(COORDS, 5, 4, 2)}, "column 4 — 2 depths"),
        ({"indices": INDICES, "coords": replaced(COORDS, 2, 3, 0)}, "row 0, column 0 occurs twice"),
        ({"indices": INDICES[:5], "coords": COORDS[:5]}, "5 rows — for a grid of 2 x 3 — must be 6"),
        ({"indices": INDICES, "coords": replaced(COORDS, 5, 2, 2**31 - 1)}, "reach to row 2147483647"),
        ({"indices": INDICES, "coords": replaced(COORDS, 5, 2, 9)}, "6 rows — for a grid of 10 x 3 — must be 30"),
        ({"indices": INDICES, "coords": SWAPPED}, r"coords\[0\] — row 0, column 1 — rows must be in raster order"),
        (
            {"indices": INDICES.numpy().astype(np.uint64) + np.uint64(2**63), "coords": COORDS},
            "far out of range",
        ),
        ({"indices": INDICES[:1].expand(1 << 40, 8), "coords": COORDS}, "1099511627776 rows — must be 1..1048576"),
    ],
)
def test_contents_that_break_a_rule_are_named(tmp_path: Path, payload: Any, message: str) -> None:
    path = save(tmp_path / "t.pt", payload)
    with pytest.raises(DataError, match=rf"token file .*t\.pt — .*{message}"):
        CODEC.read(path)


@pytest.mark.parametrize("content", [b"<!DOCTYPE html><html>", b"PK\x03\x04 cut off", b"\x80\x02", os.urandom(64)])
def test_files_that_are_no_archive_are_data_errors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.pt").write_bytes(content)
    with pytest.raises(DataError, match="t.pt — "):
        CODEC.read(tmp_path / "t.pt")


def test_missing_and_empty_files_are_data_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        CODEC.read(tmp_path / "none.pt")
    (tmp_path / "t.pt").touch()
    with pytest.raises(DataError, match="empty, 0 bytes"):
        CODEC.read(tmp_path / "t.pt")


def test_codec_has_no_pixels_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't decode to pixels"):
        CODEC.decode(INDICES.numpy(), HEIGHT, WIDTH)
    with pytest.raises(ConfigError, match="can't encode pixels"):
        CODEC.encode([])
    CODEC.save(tmp_path)
    assert load_codec(tmp_path) == CODEC and load_codec(tmp_path).identity == "token-files:8x4096"
