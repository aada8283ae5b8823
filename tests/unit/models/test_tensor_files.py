"""Reading and writing of safetensors directories."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lumina_ft.errors import CheckpointError, ConfigError
from lumina_ft.models.tensor_files import (
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointReader,
    ShardWriter,
    TensorSpec,
)

TENSORS = {
    "a": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "odd": torch.arange(3, dtype=torch.bfloat16),
    "b": torch.linspace(0, 1, 5),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "big": torch.arange(100, dtype=torch.float32),
}


def write(directory: Path, *, max_shard_bytes: int = 10**9) -> None:
    specs = {key: TensorSpec(tuple(t.shape), t.dtype) for key, t in TENSORS.items()}
    with ShardWriter(directory, specs, max_shard_bytes=max_shard_bytes) as out:
        for key in reversed(TENSORS):
            out.write(key, TENSORS[key])


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    with CheckpointReader(directory) as reader:
        return {key: reader.read(key).clone() for key in reader.tensors}


@pytest.mark.parametrize("max_shard_bytes", [10**9, 60, 1])
def test_tensors_written_in_any_order_are_read_back_bit_for_bit(tmp_path: Path, max_shard_bytes: int):
    write(tmp_path, max_shard_bytes=max_shard_bytes)
    assert (tmp_path / INDEX_FILE).exists() == (max_shard_bytes != 10**9)
    got = read_all(tmp_path)
    assert got.keys() == TENSORS.keys()
    for key, tensor in TENSORS.items():
        assert got[key].dtype == tensor.dtype and torch.equal(got[key], tensor)


def test_files_are_what_the_safetensors_library_reads(tmp_path: Path):
    write(tmp_path)
    got = load_file(tmp_path / SINGLE_FILE)
    assert all(torch.equal(got[key], tensor) for key, tensor in TENSORS.items())


def test_a_shard_holds_no_more_than_asked_unless_one_tensor_is_larger(tmp_path: Path):
    write(tmp_path, max_shard_bytes=60)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    by_file: dict[str, list[str]] = {}
    for key, name in index["weight_map"].items():
        by_file.setdefault(name, []).append(key)
    sizes = {name: sum(TENSORS[k].numel() * TENSORS[k].itemsize for k in keys) for name, keys in by_file.items()}
    assert all(size <= 60 or by_file[name] == ["big"] for name, size in sizes.items())
    assert index["metadata"]["total_size"] == sum(sizes.values())


def test_a_new_export_removes_the_shards_of_the_old_one(tmp_path: Path):
    write(tmp_path, max_shard_bytes=1)
    write(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [SINGLE_FILE]
    write(tmp_path, max_shard_bytes=60)
    assert not (tmp_path / SINGLE_FILE).exists() and read_all(tmp_path).keys() == TENSORS.keys()


def test_an_interrupted_export_leaves_nothing(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), ShardWriter(tmp_path, {"a": TensorSpec((2,), torch.float32)}):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_shard_size_below_one_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="max_shard_bytes — 0 — must be at least 1"):
        ShardWriter(tmp_path, {"a": TensorSpec((2,), torch.float32)}, max_shard_bytes=0)


def test_truncated_shard_is_named(tmp_path: Path):
    write(tmp_path, max_shard_bytes=60)
    shard = sorted(tmp_path.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{shard.name} — .*must be a complete safetensors file"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", b"\x10\0\0\0\0\0\0\0{broken"])
def test_file_that_is_not_safetensors_is_named(tmp_path: Path, content: bytes):
    (tmp_path / SINGLE_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{SINGLE_FILE} — .*must be a complete safetensors file"):
        CheckpointReader(tmp_path)


def test_index_naming_a_missing_file(tmp_path: Path):
    write(tmp_path, max_shard_bytes=60)
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{INDEX_FILE} — '{shard.name}' — every file .* must exist"):
        CheckpointReader(tmp_path)


def test_index_naming_a_tensor_that_its_file_lacks(tmp_path: Path):
    write(tmp_path, max_shard_bytes=60)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    index["weight_map"]["ghost"] = index["weight_map"]["a"]
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="tensor 'ghost' — must be in"):
        CheckpointReader(tmp_path)


def test_shard_with_a_tensor_that_the_index_lacks(tmp_path: Path):
    write(tmp_path, max_shard_bytes=60)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    del index["weight_map"]["odd"]
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="tensor 'odd' — is not listed"):
        CheckpointReader(tmp_path)


def test_same_tensor_in_two_shards(tmp_path: Path):
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "y.safetensors")
    weight_map = {"a": "x.safetensors", "b": "y.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="y.safetensors — tensor 'a' — is in x.safetensors too"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": "../x.safetensors"}}']
)
def test_broken_index(tmp_path: Path, text: str):
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX_FILE):
        CheckpointReader(tmp_path)


def test_leftover_single_file_beside_an_index_is_ambiguous(tmp_path: Path):
    write(tmp_path, max_shard_bytes=60)
    save_file({"a": torch.zeros(1)}, tmp_path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match="one of them is of another export"):
        CheckpointReader(tmp_path)


def test_directory_without_weights(tmp_path: Path):
    with pytest.raises(CheckpointError, match=f"holds neither {SINGLE_FILE} nor {INDEX_FILE}"):
        CheckpointReader(tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        CheckpointReader(tmp_path / "nowhere")


def test_reads_are_views_of_the_mapped_file(tmp_path: Path):
    save_file({"a": torch.zeros(32, 1024, 1024)}, tmp_path / SINGLE_FILE)

    def anonymous_bytes() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    with CheckpointReader(tmp_path) as reader:
        before = anonymous_bytes()
        assert float(reader.read("a").sum()) == 0
        assert anonymous_bytes() - before < 16 << 20
