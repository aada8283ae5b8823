"""Who writes which file, and writing in a lane beside the gathering."""

import errno
import os
import time
from pathlib import Path

import pytest
import torch

from lumina_ft.checkpoint import commit as commit_points
from lumina_ft.checkpoint import manifest, writers
from lumina_ft.checkpoint.commit import Commit
from lumina_ft.checkpoint.directory import TrainState, complete_checkpoints
from lumina_ft.checkpoint.manifest import hash_file, hash_files
from lumina_ft.checkpoint.verify import is_finite
from lumina_ft.checkpoint.writers import Lane, plan_files
from lumina_ft.errors import RunError
from lumina_ft.models.identity import model_identity
from lumina_ft.models.tensor_files import CheckpointReader, ShardWriter, TensorSpec
from lumina_ft.parallel.dist import World

SPECS = {f"t{i}": TensorSpec((100 + i, 3), torch.float32) for i in range(24)}


@pytest.fixture
def small_shards(monkeypatch) -> int:
    monkeypatch.setattr(writers, "SHARD_BYTES", 3000)
    return 3000


def test_a_small_checkpoint_is_one_file_of_rank_0():
    plan = plan_files(SPECS, 8, "model")
    assert [shard.name for shard in plan.shards] == ["model.safetensors"] and plan.owners == (0,)
    assert plan.files_of(1) == {} and set(plan.files_of(0)["model.safetensors"]) == set(SPECS)


@pytest.mark.parametrize("ranks", [1, 2, 5, 40])
def test_every_file_has_one_writer_and_every_tensor_one_place(small_shards, ranks):
    plan = plan_files(SPECS, ranks, "model")
    files = [name for rank in range(ranks) for name in plan.files_of(rank)]
    assert sorted(files) == sorted(shard.name for shard in plan.shards) and len(files) > 4
    destinations = plan.destinations()
    assert sorted(destinations) == sorted(SPECS)
    for rank in range(ranks):
        mine = {key for tensors in plan.files_of(rank).values() for key in tensors}
        assert mine == {key for key, owner in destinations.items() if owner == rank}
    written = [sum(s.num_bytes for t in plan.files_of(rank).values() for s in t.values()) for rank in range(ranks)]
    assert max(written) - min(written) <= small_shards
    assert plan.num_bytes == sum(written)


def test_writers_take_turns(small_shards):
    owners = list(plan_files(SPECS, 2, "model").destinations().values())
    assert owners[:8] == [0, 1] * 4


def test_the_layout_depends_on_nothing_but_sizes_and_ranks(small_shards):
    assert plan_files(SPECS, 3, "model") == plan_files(dict(SPECS), 3, "model")


def commit_of(run_dir: Path) -> Commit:
    state = TrainState(1, 0, "s", 1, 2, 1, 0.0, 0, {})
    commit = Commit(run_dir, state, World(0, 1, 0, torch.device("cpu")))
    assert commit.begin(needed=10, folders=("model",))
    return commit


def test_a_lane_writes_what_it_is_given_and_identifies_it(tmp_path, small_shards, monkeypatch):
    seen = []
    monkeypatch.setattr(commit_points, "reached", seen.append)
    commit = commit_of(tmp_path)
    plan = plan_files(SPECS, 1, "model")
    tensors = {name: torch.randn(spec.shape) for name, spec in SPECS.items()}
    lane = Lane(commit, "model", plan, hashed=True)
    for name in plan.destinations():
        lane.put(name, tensors[name])
    lane.close()
    with CheckpointReader(commit.folder / "model") as reader:
        assert all(torch.equal(reader.read(name), tensor) for name, tensor in tensors.items())
    assert lane.hashes == model_identity(commit.folder / "model").tensors
    assert seen.count("tensor_written") == len(tensors)


def test_a_lane_whose_disk_is_full_swallows_the_rest_and_says_so_at_its_end(tmp_path, small_shards, monkeypatch):
    commit = commit_of(tmp_path)
    plan = plan_files(SPECS, 1, "model")
    lane = Lane(commit, "model", plan)
    calls = []

    def write(self: ShardWriter, name: str, tensor: torch.Tensor) -> None:
        calls.append(name)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ShardWriter, "write", write)
    for name, spec in SPECS.items():
        lane.put(name, torch.zeros(spec.shape))
    assert len(calls) == 3
    with pytest.raises(RunError, match=r"rank 0 — .*/model/model-\d+-of-\d+\.safetensors — No space left on device"):
        lane.close()
    assert complete_checkpoints(tmp_path) == [] and not commit.folder.exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_finiteness_is_judged_value_by_value(dtype, bad):
    tensor = torch.full((5, 7), torch.finfo(dtype).max, dtype=dtype)
    tensor[::2] *= -1
    assert is_finite(tensor) and is_finite(tensor.abs()), "a sum that overflows is no fault of the values"
    tensor[3, 4] = bad
    assert not is_finite(tensor)
    assert is_finite(torch.zeros(0, dtype=dtype)) and is_finite(torch.arange(3))


def test_hashes_of_several_files_are_those_of_each(tmp_path, monkeypatch, capsys):
    """In chunks, in threads, and with progress where it takes long."""
    monkeypatch.setattr(manifest, "_CHUNK_BYTES", 64)
    monkeypatch.setattr(manifest, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr("lumina_ft.monitor.progress._PLAIN_INTERVAL_SECONDS", 0.0)
    for i in range(5):
        (tmp_path / f"f{i}").write_bytes(os.urandom(100 * i))
    found = hash_files(tmp_path, [f"f{i}" for i in range(5)], said="MiB verified")
    assert found == {f"f{i}": hash_file(tmp_path / f"f{i}") for i in range(5)}
    assert len({entry.xxh3 for entry in found.values()}) == 5
    assert "0/0 MiB verified" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        hash_files(tmp_path, ["absent"])


def test_a_verification_that_is_interrupted_reads_no_further_file(tmp_path, monkeypatch):
    """A file that is gone, or Ctrl-C: hundreds of GB more would be of no use."""
    read: list[str] = []

    def hash_slowly(path: Path, on_bytes: list[int] | None = None) -> manifest.FileEntry:
        read.append(path.name)
        time.sleep(0.05)
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(manifest, "hash_file", hash_slowly)
    monkeypatch.setattr(manifest, "_MAX_THREADS", 1)
    names = [f"f{i}" for i in range(40)]
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(OSError, match="Input/output error"):
        hash_files(tmp_path, names)
    assert len(read) < len(names)
