"""Stored samples come back unchanged, for every task that the schema must carry."""

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from lumina_ft.data.segments import Kind, Role, Sample, Segment
from lumina_ft.data.shards import META_FILE, ShardWriter, make_meta, open_dataset, read_meta, write_meta
from lumina_ft.data.token_spec import demo_spec
from lumina_ft.errors import DataError

C = 8
NO_IDS = np.zeros(0, np.int32)
NO_CODES = np.zeros((0, C), np.uint16)


def text(role: Role, turn: int, ids: list[int]) -> Segment:
    return Segment(role, turn, Kind.TEXT, np.array(ids, np.int32), NO_CODES)


def codes(count: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 65536, (count, C)).astype(np.uint16)


def every_kind(index: int) -> Sample:
    """A multi-turn conversation with images on both sides, a video and a 3D object."""
    rng = np.random.default_rng(index)
    coords5 = rng.integers(0, 9, (4, 5)).astype(np.int32)
    coords3 = rng.integers(0, 9, (3, 3)).astype(np.int32)
    segments = (
        text(Role.SYSTEM, 0, []),
        Segment(Role.USER, 0, Kind.IMAGE, NO_IDS, codes(6, rng), (2, 3)),
        text(Role.USER, 0, [1, 2, 511]),
        Segment(Role.USER, 0, Kind.VIDEO, NO_IDS, codes(4, rng), (), coords5),
        text(Role.ASSISTANT, 1, [5]),
        Segment(Role.USER, 2, Kind.OBJECT_3D, NO_IDS, codes(3, rng), (), coords3),
        text(Role.USER, 2, list(range(index % 5))),
        Segment(Role.ASSISTANT, 3, Kind.IMAGE, NO_IDS, codes(2, rng), (1, 2)),
    )
    return Sample(index, ("text", "t2i")[index % 2], segments, f"rows.jsonl:{index + 1}")


def write(directory: Path, count: int, max_shard_bytes: int = 1 << 28) -> None:
    writer = ShardWriter(directory, num_codebooks=C, max_shard_bytes=max_shard_bytes)
    for index in range(count):
        writer.add(every_kind(index))
    counts, shards = writer.close()
    meta = make_meta(
        counts=counts,
        shards=shards,
        spec=demo_spec(),
        tokenizer_identity="sha256:x",
        codec={"kind": "pq", "identity": "pq:y"},
        system_prompts={"text": "S"},
        block_tokens=32,
    )
    write_meta(directory, meta)


def assert_same(left: Sample, right: Sample) -> None:
    assert (left.index, left.task, left.source) == (right.index, right.task, right.source)
    assert len(left.segments) == len(right.segments)
    for a, b in zip(left.segments, right.segments, strict=True):
        assert (a.role, a.turn, a.kind, a.shape) == (b.role, b.turn, b.kind, b.shape)
        assert a.text_ids.dtype == b.text_ids.dtype and np.array_equal(a.text_ids, b.text_ids)
        assert a.codes.dtype == b.codes.dtype and a.codes.shape == b.codes.shape and np.array_equal(a.codes, b.codes)
        assert (a.coords is None) == (b.coords is None)
        assert a.coords is None or np.array_equal(a.coords, b.coords if b.coords is not None else [])


def test_samples_of_every_kind_and_role_round_trip_across_record_batches_and_shards(tmp_path: Path) -> None:
    count = 2300
    write(tmp_path, count, max_shard_bytes=1)
    reader = open_dataset(tmp_path)
    assert len(reader) == count and [s["rows"] for s in reader.meta.shards] == [1000, 1000, 300]
    for index in (0, 1, 999, 1000, 1999, 2000, count - 1, 17):
        assert_same(reader[index], every_kind(index))
    for outside in (-1, count):
        with pytest.raises(IndexError):
            reader[outside]


def test_shards_are_flat_columns_that_the_datasets_library_reads(tmp_path: Path) -> None:
    write(tmp_path, 3)
    rows = Dataset.from_file(str(tmp_path / "shards" / "shard-00000.arrow"))
    assert rows.num_rows == 3 and rows[1]["task"] == "t2i"
    assert str(rows.features["codes"].feature.dtype) == "uint16"
    assert len(rows[0]["codes"]) == (6 + 4 + 3 + 2) * C


def test_meta_round_trips_and_counts_tasks(tmp_path: Path) -> None:
    write(tmp_path, 5)
    meta = read_meta(tmp_path)
    assert meta.tasks == ("t2i", "text") and meta.counts == {"t2i": 2, "text": 3} and meta.num_samples == 5
    assert meta.spec == demo_spec() and meta.codec == {"kind": "pq", "identity": "pq:y"}


def test_equal_samples_give_equal_bytes_and_identity(tmp_path: Path) -> None:
    for name, count in (("a", 30), ("b", 30), ("c", 31)):
        write(tmp_path / name, count)
    files = [(tmp_path / name / "shards" / "shard-00000.arrow").read_bytes() for name in "abc"]
    identities = [read_meta(tmp_path / name).identity for name in "abc"]
    assert files[0] == files[1] and identities[0] == identities[1]
    assert files[0] != files[2] and identities[0] != identities[2]


def test_damaged_datasets_are_data_errors_that_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be a directory written by `lumina-ft data build`"):
        open_dataset(tmp_path)
    write(tmp_path / "d", 3)
    meta_path = tmp_path / "d" / META_FILE
    good = json.loads(meta_path.read_text())
    for change, message in (
        ("{", "not JSON"),
        (json.dumps(good | {"version": 99}), "version — 99 — must be 1"),
        (json.dumps({k: v for k, v in good.items() if k != "spec"}), "lacks spec"),
        (json.dumps(good | {"spec": {"text": {}}}), "spec — .* — the dataset is damaged"),
        (json.dumps(good | {"shards": [good["shards"][0] | {"rows": 4}]}), "3 rows — dataset.json says 4"),
    ):
        meta_path.write_text(change)
        with pytest.raises(DataError, match=message):
            open_dataset(tmp_path / "d")
    meta_path.write_text(json.dumps(good))
    shard = tmp_path / "d" / "shards" / "shard-00000.arrow"
    shard.write_bytes(b"not arrow")
    with pytest.raises(DataError, match="missing or damaged"):
        open_dataset(tmp_path / "d")
    shard.unlink()
    with pytest.raises(DataError, match="missing or damaged"):
        open_dataset(tmp_path / "d")
