"""Built datasets on disk: Arrow shards of samples with flat columns, and `dataset.json` that describes them.

    DIR/dataset.json        what `DatasetMeta` holds
    DIR/shards/*.arrow      one row per sample, readable with `datasets.Dataset.from_file`
    DIR/tokenizer/          copy of the tokenizer's files
    DIR/codec/              the fitted codec, if any row holds an image
    DIR/quarantine.jsonl    bad rows, if any were put aside

Lists are flat so that a row is read without Python objects per token: text ids and codes of all segments are
concatenated, `seg_len` cuts them apart.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value
from datasets.arrow_writer import ArrowWriter
from numpy.typing import NDArray

from lumina_ft.data.segments import Kind, Role, Sample, Segment
from lumina_ft.errors import DataError
from lumina_ft.tokens import MediaIds, TextIds, TokenSpec

FORMAT_VERSION = 1
META_FILE = "dataset.json"

LIST_COLUMNS: dict[str, tuple[str, type[np.generic]]] = {
    "seg_role": ("uint8", np.uint8),
    "seg_turn": ("int32", np.int32),
    "seg_kind": ("uint8", np.uint8),
    "seg_len": ("int32", np.int32),
    "seg_shape": ("int32", np.int32),
    "seg_coord_columns": ("uint8", np.uint8),
    "text_ids": ("int32", np.int32),
    "codes": ("uint16", np.uint16),
    "coords": ("int32", np.int32),
}
"""Per segment: role, turn, kind, rows (text ids or code rows), two numbers of shape (0 for all but images), columns of
its coords. Then the concatenated payloads; codes and coords are row-major."""

FEATURES = Features(
    {name: List(Value(kind)) for name, (kind, _) in LIST_COLUMNS.items()}
    | {"task": Value("string"), "source": Value("string")}
)
ROWS_PER_RECORD_BATCH = 1000


@dataclass(frozen=True)
class DatasetMeta:
    """Contents of `dataset.json`.

    Attributes:
        version: of this format.
        tasks: task names in the order that `Batch.task_ids` counts.
        counts: samples per task.
        num_samples: rows in all shards.
        spec: ids that the rows are made for.
        tokenizer_identity: `sha256:…` of the tokenizer.
        codec: `{kind, identity}` of the image codec, None without images.
        system_prompts: default prompt per task that was used.
        block_tokens: L of the packing report.
        shards: file name, rows and sha256 of each shard, in order.
        identity: `sha256:…` over the shards; equal for equal data.
    """

    version: int
    tasks: tuple[str, ...]
    counts: dict[str, int]
    num_samples: int
    spec: TokenSpec
    tokenizer_identity: str
    codec: dict[str, str] | None
    system_prompts: dict[str, str]
    block_tokens: int
    shards: tuple[dict[str, Any], ...]
    identity: str


class ShardWriter:
    """Writes samples to shards; equal samples give equal bytes."""

    def __init__(self, directory: Path, *, num_codebooks: int, max_shard_bytes: int = 256 * 1024 * 1024) -> None:
        """Create `directory/shards`.

        Args:
            directory: of the dataset.
            num_codebooks: C; segments with another number of code columns are our bug.
            max_shard_bytes: a shard is closed after the record batch that passes this.
        """
        self._directory = directory / "shards"
        self._directory.mkdir(parents=True)
        self._num_codebooks = num_codebooks
        self._max_shard_bytes = max_shard_bytes
        self._rows: list[Sample] = []
        self._writer: ArrowWriter | None = None
        self._bytes = 0
        self._counts: dict[str, int] = {}
        self._shards: list[dict[str, Any]] = []

    def add(self, sample: Sample) -> None:
        """Append a sample; its `index` must be the next row number."""
        assert sample.index == sum(self._counts.values()), f"row {sample.index} out of order"
        self._counts[sample.task] = self._counts.get(sample.task, 0) + 1
        self._rows.append(sample)
        if len(self._rows) == ROWS_PER_RECORD_BATCH:
            self._flush()

    def close(self) -> tuple[dict[str, int], tuple[dict[str, Any], ...]]:
        """Finish the last shard.

        Returns:
            Samples per task; the `shards` entry of the meta.
        """
        self._flush()
        self._finish_shard()
        return self._counts, tuple(self._shards)

    def _flush(self) -> None:
        if not self._rows:
            return
        if self._writer is None:
            name = f"shard-{len(self._shards):05d}.arrow"
            self._shards.append({"file": name, "rows": 0})
            self._writer = ArrowWriter(path=str(self._directory / name), features=FEATURES)
        table = _to_table(self._rows, self._num_codebooks)
        self._writer.write_table(table)
        self._shards[-1]["rows"] += len(self._rows)
        self._bytes += table.nbytes
        self._rows = []
        if self._bytes >= self._max_shard_bytes:
            self._finish_shard()

    def _finish_shard(self) -> None:
        if self._writer is None:
            return
        self._writer.finalize()
        self._writer.close()
        self._shards[-1]["sha256"] = file_sha256(self._directory / self._shards[-1]["file"])
        self._writer, self._bytes = None, 0


def _to_table(rows: list[Sample], num_codebooks: int) -> pa.Table:
    """One record batch of flat columns."""
    lists: dict[str, list[NDArray[Any]]] = {name: [] for name in LIST_COLUMNS}
    for sample in rows:
        segments = sample.segments
        empty = np.zeros((0, 0), dtype=np.int32)
        for segment in segments:
            is_text = segment.kind is Kind.TEXT
            assert segment.codes.shape[1] == num_codebooks and (len(segment.codes) == 0 or not is_text)
        coords = [empty if s.coords is None else s.coords for s in segments]
        shapes = [s.shape if s.kind is Kind.IMAGE else (0, 0) for s in segments]
        lengths = [len(s.text_ids) if s.kind is Kind.TEXT else len(s.codes) for s in segments]
        lists["seg_role"].append(np.array([s.role for s in segments]))
        lists["seg_turn"].append(np.array([s.turn for s in segments]))
        lists["seg_kind"].append(np.array([s.kind for s in segments]))
        lists["seg_len"].append(np.array(lengths))
        lists["seg_shape"].append(np.array(shapes).ravel())
        lists["seg_coord_columns"].append(np.array([c.shape[1] for c in coords]))
        lists["text_ids"].append(np.concatenate([s.text_ids for s in segments]))
        lists["codes"].append(np.concatenate([s.codes.ravel() for s in segments]))
        lists["coords"].append(np.concatenate([c.ravel() for c in coords]))
    columns: dict[str, pa.Array] = {}
    for name, (_, dtype) in LIST_COLUMNS.items():
        offsets = np.cumsum([0, *(len(part) for part in lists[name])], dtype=np.int32)
        values = np.concatenate(lists[name]).astype(dtype)
        columns[name] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
    columns["task"] = pa.array([s.task for s in rows], type=pa.string())
    columns["source"] = pa.array([s.source for s in rows], type=pa.string())
    return pa.table(columns, schema=FEATURES.arrow_schema)


def make_meta(
    *,
    counts: dict[str, int],
    shards: tuple[dict[str, Any], ...],
    spec: TokenSpec,
    tokenizer_identity: str,
    codec: dict[str, str] | None,
    system_prompts: dict[str, str],
    block_tokens: int,
) -> DatasetMeta:
    """Describe what a `ShardWriter` wrote; tasks are sorted by name."""
    content = json.dumps([[s["rows"], s["sha256"]] for s in shards])
    return DatasetMeta(
        version=FORMAT_VERSION,
        tasks=tuple(sorted(counts)),
        counts=dict(sorted(counts.items())),
        num_samples=sum(counts.values()),
        spec=spec,
        tokenizer_identity=tokenizer_identity,
        codec=codec,
        system_prompts=system_prompts,
        block_tokens=block_tokens,
        shards=shards,
        identity="sha256:" + hashlib.sha256(content.encode()).hexdigest(),
    )


def write_meta(directory: Path, meta: DatasetMeta) -> None:
    """Write `dataset.json`."""
    (directory / META_FILE).write_text(json.dumps(asdict(meta), indent=2) + "\n", encoding="utf-8")


def read_meta(directory: Path) -> DatasetMeta:
    """Read `dataset.json`.

    Raises:
        DataError: missing, broken, or of another version.
    """
    path = directory / META_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise DataError(
            f"dataset {directory} — no {META_FILE} — must be a directory written by `lumina-ft data build` — build it"
        ) from exc
    except ValueError as exc:
        raise DataError(f"{path} — not JSON: {exc} — the dataset is damaged — build it again") from exc
    version = raw.get("version") if isinstance(raw, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(f"{path}: version — {version!r} — must be {FORMAT_VERSION} — build the dataset again")
    lacking = [field.name for field in fields(DatasetMeta) if field.name not in raw]
    if lacking:
        raise DataError(f"{path} — lacks {', '.join(lacking)} — the dataset is damaged — build it again")
    try:
        spec = TokenSpec(
            text=TextIds(**raw["spec"]["text"]),
            media=MediaIds(**raw["spec"]["media"]),
            num_codebooks=raw["spec"]["num_codebooks"],
        )
    except (KeyError, TypeError) as exc:
        raise DataError(f"{path}: spec — {exc} — the dataset is damaged — build it again") from exc
    values = {field.name: raw[field.name] for field in fields(DatasetMeta)}
    return DatasetMeta(**values | {"spec": spec, "tasks": tuple(raw["tasks"]), "shards": tuple(raw["shards"])})


@dataclass(frozen=True)
class _Chunk:
    """One record batch as memory-mapped numpy views: per list column its offsets and its values."""

    lists: dict[str, tuple[NDArray[np.int32], NDArray[Any]]]
    task: pa.StringArray
    source: pa.StringArray


class ShardReader:
    """Random access to the samples of a built dataset. Arrays are read-only views of the mapped files.

    Attributes:
        directory: of the dataset.
        meta: its description.
    """

    def __init__(self, directory: Path) -> None:
        """Map the shards of `directory`.

        Raises:
            DataError: the meta is unreadable, or a shard is missing, damaged or has another number of rows.
        """
        self.directory = directory
        self.meta = read_meta(directory)
        self._chunks: list[_Chunk] = []
        sizes = []
        for shard in self.meta.shards:
            path = directory / "shards" / shard["file"]
            table = _map_shard(path)
            if table.num_rows != shard["rows"]:
                raise DataError(
                    f"{path} — {table.num_rows} rows — {META_FILE} says {shard['rows']} — build the dataset again"
                )
            for batch in table.to_batches():
                self._chunks.append(_views(batch))
                sizes.append(batch.num_rows)
        self._starts = np.cumsum([0, *sizes])

    def __len__(self) -> int:
        return self.meta.num_samples

    def __getitem__(self, index: int) -> Sample:
        """The sample in row `index`, 0 <= index < len."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a dataset with {len(self)}")
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        chunk, row = self._chunks[number], int(index - self._starts[number])
        return _to_sample(chunk, row, int(index), self.meta.spec.num_codebooks)


def open_dataset(directory: Path) -> ShardReader:
    """Open a directory written by `lumina-ft data build`.

    Raises:
        DataError: see `ShardReader`.
    """
    return ShardReader(Path(directory))


def _map_shard(path: Path) -> pa.Table:
    try:
        return Dataset.from_file(str(path)).data.table
    except (OSError, pa.ArrowException) as exc:
        raise DataError(f"{path} — {exc} — the shard is missing or damaged — build the dataset again") from exc


def _views(batch: pa.RecordBatch) -> _Chunk:
    lists = {}
    for name in LIST_COLUMNS:
        column = batch.column(name)
        lists[name] = (column.offsets.to_numpy(), column.values.to_numpy(zero_copy_only=True))
    return _Chunk(lists, batch.column("task"), batch.column("source"))


def _to_sample(chunk: _Chunk, row: int, index: int, num_codebooks: int) -> Sample:
    def part(name: str) -> NDArray[Any]:
        offsets, values = chunk.lists[name]
        return values[offsets[row] : offsets[row + 1]]

    text_ids, codes, coords = part("text_ids"), part("codes").reshape(-1, num_codebooks), part("coords")
    shapes = part("seg_shape").tolist()
    text_at = code_at = coord_at = 0
    segments = []
    meta = (part(name).tolist() for name in ("seg_role", "seg_turn", "seg_kind", "seg_len", "seg_coord_columns"))
    for number, (role, turn, kind, length, width) in enumerate(zip(*meta, strict=True)):
        is_text = kind == Kind.TEXT
        text_end = text_at + length * is_text
        code_end = code_at + length * (not is_text)
        own_coords = None
        if width:
            own_coords = coords[coord_at : coord_at + length * width].reshape(length, width)
            coord_at += length * width
        segments.append(
            Segment(
                role=Role(role),
                turn=turn,
                kind=Kind(kind),
                text_ids=text_ids[text_at:text_end],
                codes=codes[code_at:code_end],
                shape=tuple(shapes[2 * number : 2 * number + 2]) if kind == Kind.IMAGE else (),
                coords=own_coords,
            )
        )
        text_at, code_at = text_end, code_end
    return Sample(
        index=index,
        task=chunk.task[row].as_py(),
        segments=tuple(segments),
        source=chunk.source[row].as_py(),
    )


def file_sha256(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
