"""Safetensors directories: memory-mapped reading, and writing shards whose tensors arrive one at a time.

Neither direction holds more than the tensor in hand: reads are views of the mapped file, and a writer knows all
shapes beforehand, so it lays the shards out first and puts each tensor at its place.
"""

import json
import os
import re
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lumina_ft.errors import CheckpointError, ConfigError
from lumina_ft.models.json_files import write_json
from lumina_ft.models.tensor_bytes import write_at


def single_name(stem: str) -> str:
    """Name of the only file of an export."""
    return f"{stem}.safetensors"


def index_name(stem: str) -> str:
    """Name of the index of a sharded export."""
    return f"{stem}.safetensors.index.json"


SINGLE_FILE = single_name("model")
INDEX_FILE = index_name("model")
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

    Args:
        stem: first part of the file names.

    Attributes:
        directory: where the files are.
        tensors: every tensor by name, in file order.

    Raises:
        CheckpointError: no weights, a damaged or missing file, or an index that disagrees with its shards.
    """

    def __init__(self, directory: Path, stem: str = "model") -> None:
        self.directory = Path(directory)
        self.tensors: dict[str, StoredTensor] = {}
        self._index = self.directory / index_name(stem)
        self._files: dict[Path, Any] = {}
        self._stack = ExitStack()
        try:
            single = self.directory / single_name(stem)
            weight_map = _weight_map(self._index, single)
            names = dict.fromkeys(weight_map.values()) if weight_map else {single.name: None}
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
                f"{self._index} — {path.name!r} — every file that the index names must exist — "
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
        for key, name in weight_map.items():
            if key not in self.tensors or self.tensors[key].file.name != name:
                raise CheckpointError(
                    f"{self._index} — tensor {key!r} — must be in {name}, which the index names for it — "
                    "the index and the shards are of different exports: copy them again"
                )
        for key, stored in self.tensors.items():
            if key not in weight_map:
                raise CheckpointError(
                    f"{stored.file} — tensor {key!r} — is not listed in {self._index.name} — "
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

    def read_elements(self, key: str, start: int, stop: int) -> Tensor:
        """Elements start to stop of the flattened tensor, as a view: pages of no other elements are touched."""
        return self.read(key).view(-1)[start:stop]

    def close(self) -> None:
        """Close the files. Views that are still held stay valid."""
        self._files.clear()
        self._stack.close()

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None):
        self.close()


def _weight_map(index: Path, single: Path) -> dict[str, str]:
    """The index's map from tensor to file name; empty for a single-file checkpoint."""
    directory = index.parent
    if not directory.is_dir():
        raise CheckpointError(f"{directory} — is not a directory — a checkpoint is a directory — check the path")
    if not index.is_file():
        if not single.is_file():
            raise CheckpointError(
                f"{directory} — holds neither {single.name} nor {index.name} — weights are read from safetensors — "
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
    if single.is_file() and single.name not in weight_map.values():
        raise CheckpointError(
            f"{directory} — holds {single.name} and an {index.name} that doesn't name it — "
            "one of them is of another export — remove it"
        )
    return weight_map


class Shard(NamedTuple):
    """A file that is to be written, and the tensors in it, in file order."""

    name: str
    keys: tuple[str, ...]


def plan_shards(specs: Mapping[str, TensorSpec], max_shard_bytes: int, stem: str = "model") -> tuple[Shard, ...]:
    """Lay tensors out in files, filled in order: one file, or numbered shards.

    Args:
        max_shard_bytes: a shard is closed before it would exceed this; a larger tensor gets its own.

    Raises:
        ConfigError: a shard size below 1.
    """
    assert specs, "an export without tensors"
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes — {max_shard_bytes} — must be at least 1 — try {DEFAULT_SHARD_BYTES}")
    groups: list[list[str]] = [[]]
    size = 0
    for key, spec in specs.items():
        if groups[-1] and size + spec.num_bytes > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(key)
        size += spec.num_bytes
    names = [f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    # Wider dtypes first keeps every tensor of a file aligned.
    ordered = (tuple(sorted(keys, key=lambda key: -specs[key].dtype.itemsize)) for keys in groups)
    return tuple(map(Shard, names if len(groups) > 1 else [single_name(stem)], ordered))


class ShardWriter:
    """Writes tensors, in any order, into safetensors shards.

    Files get their final names in `close`, after an fsync; shards of an earlier export in the same directory that the
    new one doesn't replace are then removed. Leaving the `with` block by an exception removes what was written.

    Args:
        directory: created if needed.
        specs: every tensor of the export, in file order.
        max_shard_bytes: see `plan_shards`.
        stem: first part of the file names.
        own: names of the files that this process writes, where several processes share an export in a new directory;
            None: all of them.
        writes_index: this process writes the index, if there is one.
        metadata: strings for each file's header, besides the format.
        sync: flush files to the disk before they get their names; False if the caller does.

    Raises:
        ConfigError: a shard size below 1.
    """

    def __init__(
        self,
        directory: Path,
        specs: Mapping[str, TensorSpec],
        *,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
        stem: str = "model",
        own: Collection[str] | None = None,
        writes_index: bool = True,
        metadata: Mapping[str, str] | None = None,
        sync: bool = True,
    ) -> None:
        self.directory = Path(directory)
        self._specs = dict(specs)
        self._metadata = dict(metadata or {})
        self._sync = sync
        self._stem = stem
        self._shards = plan_shards(specs, max_shard_bytes, stem)
        self._shared = own is not None
        self._writes_index = writes_index
        self._names = [shard.name for shard in self._shards if own is None or shard.name in own]
        self._pending = {key for shard in self._shards if shard.name in self._names for key in shard.keys}
        self._missing_bytes = {key: specs[key].num_bytes for key in self._pending}
        self._places: dict[str, tuple[str, int]] = {}
        self._streams: dict[str, BinaryIO] = {}
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            for shard in self._shards:
                if shard.name in self._names:
                    self._begin_shard(*shard)
        except BaseException:
            self.discard()
            raise

    def _partial(self, name: str) -> Path:
        return self.directory / f"{name}.partial"

    def _begin_shard(self, name: str, keys: tuple[str, ...]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **self._metadata}}
        offset = 0
        for key in keys:
            spec = self._specs[key]
            header[key] = {
                "dtype": _DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + spec.num_bytes],
            }
            self._places[key] = (name, offset)
            offset += spec.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        start = 8 + len(text)
        stream = self._streams[name] = self._partial(name).open("wb")
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        stream.flush()
        stream.truncate(start + offset)
        for key in keys:
            self._places[key] = (name, start + self._places[key][1])

    def write(self, key: str, tensor: Tensor) -> None:
        """Put one tensor at its place. Its shape and dtype must be the announced ones."""
        spec = self._specs[key]
        assert (tuple(tensor.shape), tensor.dtype) == spec, f"{key}: {tensor.shape} {tensor.dtype}, announced {spec}"
        self._put(key, tensor, 0)

    def write_rows(self, key: str, first_row: int, rows: Tensor) -> None:
        """Put rows of one tensor at their place; together the calls for a tensor must bring every row once.

        Threads may call this (and `write`) for different tensors at the same time.
        """
        spec = self._specs[key]
        assert (tuple(rows.shape[1:]), rows.dtype) == (spec.shape[1:], spec.dtype), f"{key}: {rows.shape} {rows.dtype}"
        assert first_row + rows.shape[0] <= spec.shape[0], f"{key}: row {first_row + rows.shape[0]} of {spec.shape}"
        self._put(key, rows, first_row * (spec.num_bytes // max(1, spec.shape[0])))

    def _put(self, key: str, tensor: Tensor, offset: int) -> None:
        shard, start = self._places[key]
        assert key in self._pending and tensor.nbytes <= self._missing_bytes[key], f"{key} was written twice"
        self._missing_bytes[key] -= write_at(self._streams[shard].fileno(), start + offset, tensor)
        if not self._missing_bytes[key]:
            self._pending.remove(key)

    def close(self) -> None:
        """Flush, rename into place, write the index and remove shards of an earlier export."""
        assert not self._pending, f"never written: {sorted(self._pending)[:5]}"
        for stream in self._streams.values():
            stream.flush()
            if self._sync:
                os.fsync(stream.fileno())
            stream.close()
        for name in self._names:
            self._partial(name).replace(self.directory / name)
        index = self.directory / index_name(self._stem)
        if len(self._shards) > 1 and self._writes_index:
            write_json(index, self._index())
        if self._shared:
            return
        if len(self._shards) == 1:
            index.unlink(missing_ok=True)
        earlier = re.compile(rf"^{re.escape(self._stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors$")
        for path in self.directory.iterdir():
            if earlier.match(path.name) and path.name not in self._names:
                path.unlink()

    def _index(self) -> dict[str, Any]:
        total = sum(spec.num_bytes for spec in self._specs.values())
        weight_map = {key: shard.name for shard in self._shards for key in shard.keys}
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}

    def discard(self) -> None:
        """Remove what was written."""
        for stream in self._streams.values():
            # Closing flushes, which fails again where the disk is full.
            with suppress(OSError):
                stream.close()
        for name in self._names:
            self._partial(name).unlink(missing_ok=True)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None):
        if kind is None:
            self.close()
        else:
            self.discard()
