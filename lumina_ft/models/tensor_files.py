"""Safetensors directories: memory-mapped reading, and writing shards whose tensors arrive one at a time.

Neither direction holds more than the tensor in hand: reads are views of the mapped file, and a writer knows all
shapes beforehand, so it lays the shards out first and puts each tensor at its place.
"""

import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lumina_ft.errors import CheckpointError, ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DEFAULT_SHARD_BYTES = 5_000_000_000

_DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_SHARD_NAME = re.compile(r"^model(-\d{5}-of-\d{5})?\.safetensors$")
_HEADER_ALIGNMENT = 8


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor that is to be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the data in a file."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


class StoredTensor(NamedTuple):
    """A tensor in a checkpoint: its header entry and the file that holds it. `dtype` is the file's own name for it."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


class CheckpointReader:
    """All tensors of a directory with `model.safetensors` or an index and its shards.

    Opening reads every header, so that a damaged or missing file is found before anything is loaded.

    Attributes:
        directory: where the files are.
        tensors: every tensor by name, in file order.

    Raises:
        CheckpointError: no weights, a damaged or missing file, or an index that disagrees with its shards.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self.tensors: dict[str, StoredTensor] = {}
        self._files: dict[Path, Any] = {}
        self._stack = ExitStack()
        try:
            weight_map = _weight_map(self.directory)
            names = dict.fromkeys(weight_map.values()) if weight_map else {SINGLE_FILE: None}
            for name in names:
                self._open(self.directory / name)
            if weight_map:
                self._check_index(weight_map)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, path: Path) -> None:
        if not path.is_file():
            raise CheckpointError(
                f"{self.directory / INDEX_FILE} — {path.name!r} — every file that the index names must exist — "
                "download or copy the missing file"
            )
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} — {error} — must be a complete safetensors file ({path.stat().st_size} bytes on disk) — "
                "download or copy it again"
            ) from error
        self._files[path] = file
        for key in file.keys():
            if key in self.tensors:
                raise CheckpointError(
                    f"{path} — tensor {key!r} — is in {self.tensors[key].file.name} too; a name occurs once — "
                    "remove the file that is not part of this checkpoint"
                )
            entry = file.get_slice(key)
            self.tensors[key] = StoredTensor(tuple(entry.get_shape()), entry.get_dtype(), path)

    def _check_index(self, weight_map: Mapping[str, str]) -> None:
        index = self.directory / INDEX_FILE
        for key, name in weight_map.items():
            if key not in self.tensors or self.tensors[key].file.name != name:
                raise CheckpointError(
                    f"{index} — tensor {key!r} — must be in {name}, which the index names for it — "
                    "the index and the shards are of different exports: copy them again"
                )
        for key, stored in self.tensors.items():
            if key not in weight_map:
                raise CheckpointError(
                    f"{stored.file} — tensor {key!r} — is not listed in {INDEX_FILE} — "
                    "the index and the shards are of different exports: copy them again"
                )

    def dtype(self, key: str) -> torch.dtype:
        """Dtype of a tensor.

        Raises:
            CheckpointError: a type that weights never have here (8-bit floats, packed integers).
        """
        stored = self.tensors[key]
        if stored.dtype not in _DTYPES:
            raise CheckpointError(
                f"{stored.file} — tensor {key!r} has dtype {stored.dtype} — quantised weights can't be read — "
                "use the bf16 or fp32 checkpoint"
            )
        return _DTYPES[stored.dtype]

    def read(self, key: str) -> Tensor:
        """The tensor as a view of the mapped file: pages are read when touched and belong to the page cache."""
        stored = self.tensors[key]
        return self._files[stored.file].get_tensor(key)

    def close(self) -> None:
        """Close the files. Views that are still held stay valid."""
        self._files.clear()
        self._stack.close()

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None):
        self.close()


def _weight_map(directory: Path) -> dict[str, str]:
    """The index's map from tensor to file name; empty for a single-file checkpoint."""
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if not directory.is_dir():
        raise CheckpointError(f"{directory} — is not a directory — a checkpoint is a directory — check the path")
    if not index.is_file():
        if not single.is_file():
            raise CheckpointError(
                f"{directory} — holds neither {SINGLE_FILE} nor {INDEX_FILE} — weights are read from safetensors — "
                "check the path, or convert other formats with transformers first"
            )
        return {}
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        weight_map = content["weight_map"]
        names_ok = all(isinstance(k, str) and isinstance(v, str) and Path(v).name == v for k, v in weight_map.items())
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} — {type(error).__name__}: {error} — must be a JSON object with a weight_map — copy it again"
        ) from error
    if not weight_map or not names_ok:
        raise CheckpointError(f"{index} — weight_map — must map tensor names to file names of this directory — fix it")
    if single.is_file() and SINGLE_FILE not in weight_map.values():
        raise CheckpointError(
            f"{directory} — holds {SINGLE_FILE} and an {INDEX_FILE} that doesn't name it — "
            "one of them is of another export — remove it"
        )
    return weight_map


class ShardWriter:
    """Writes tensors, in any order, into safetensors shards.

    Files get their final names in `close`, after an fsync; shards of an earlier export in the same directory that the
    new one doesn't replace are then removed. Leaving the `with` block by an exception removes what was written.

    Args:
        directory: created if needed.
        specs: every tensor that will be written, in file order.
        max_shard_bytes: a shard is closed before it would exceed this; a larger tensor gets its own.

    Raises:
        ConfigError: a shard size below 1.
    """

    def __init__(
        self, directory: Path, specs: Mapping[str, TensorSpec], *, max_shard_bytes: int = DEFAULT_SHARD_BYTES
    ) -> None:
        assert specs, "an export without tensors"
        if max_shard_bytes < 1:
            raise ConfigError(f"max_shard_bytes — {max_shard_bytes} — must be at least 1 — try {DEFAULT_SHARD_BYTES}")
        self.directory = Path(directory)
        self._specs = dict(specs)
        self._pending = set(specs)
        self._places: dict[str, tuple[int, int]] = {}
        self._streams: list[BinaryIO] = []
        self.directory.mkdir(parents=True, exist_ok=True)
        groups = _split_into_shards(self._specs, max_shard_bytes)
        self._names = (
            [SINGLE_FILE]
            if len(groups) == 1
            else [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
        )
        for shard, keys in enumerate(groups):
            self._begin_shard(shard, keys)

    def _partial(self, name: str) -> Path:
        return self.directory / f"{name}.partial"

    def _begin_shard(self, shard: int, keys: list[str]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for key in keys:
            spec = self._specs[key]
            header[key] = {
                "dtype": _DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + spec.num_bytes],
            }
            self._places[key] = (shard, offset)
            offset += spec.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        start = 8 + len(text)
        stream = self._partial(self._names[shard]).open("wb")
        self._streams.append(stream)
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        stream.truncate(start + offset)
        for key in keys:
            self._places[key] = (shard, start + self._places[key][1])

    def write(self, key: str, tensor: Tensor) -> None:
        """Put one tensor at its place. Its shape and dtype must be the announced ones."""
        spec = self._specs[key]
        assert key in self._pending, f"{key} was written twice"
        assert (tuple(tensor.shape), tensor.dtype) == spec, f"{key}: {tensor.shape} {tensor.dtype}, announced {spec}"
        shard, start = self._places[key]
        stream = self._streams[shard]
        stream.seek(start)
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        stream.write(raw.numpy().data)
        self._pending.remove(key)

    def close(self) -> None:
        """Flush, rename into place, write the index and remove shards of an earlier export."""
        assert not self._pending, f"never written: {sorted(self._pending)[:5]}"
        for stream in self._streams:
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()
        for name in self._names:
            self._partial(name).replace(self.directory / name)
        index = self.directory / INDEX_FILE
        if len(self._names) > 1:
            write_json(index, self._index())
        else:
            index.unlink(missing_ok=True)
        for path in self.directory.iterdir():
            if _SHARD_NAME.match(path.name) and path.name not in self._names:
                path.unlink()

    def _index(self) -> dict[str, Any]:
        total = sum(spec.num_bytes for spec in self._specs.values())
        weight_map = {key: self._names[shard] for key, (shard, _) in self._places.items()}
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None):
        if kind is None:
            self.close()
            return
        for stream in self._streams:
            stream.close()
        for name in self._names:
            self._partial(name).unlink(missing_ok=True)


def _split_into_shards(specs: Mapping[str, TensorSpec], max_bytes: int) -> list[list[str]]:
    """Names per shard, filled in order. Inside a shard wider dtypes come first, which keeps every tensor aligned."""
    groups: list[list[str]] = [[]]
    size = 0
    for key, spec in specs.items():
        if groups[-1] and size + spec.num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(key)
        size += spec.num_bytes
    return [sorted(keys, key=lambda key: -specs[key].dtype.itemsize) for keys in groups]


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file aside and rename it, so that readers see the old or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)
