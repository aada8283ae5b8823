"""Sharing a checkpoint's files out over the ranks: every file has one writer, and large checkpoints have several."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from typing import NamedTuple

from torch import Tensor

from lumina_ft.checkpoint import commit as commit_points
from lumina_ft.checkpoint.commit import Commit
from lumina_ft.models.identity import TensorHasher
from lumina_ft.models.tensor_files import Shard, ShardWriter, TensorSpec, plan_shards
from lumina_ft.parallel.progress import SAVE

SHARD_BYTES = 2_000_000_000
"""Largest shard of a checkpoint. Smaller ones spread over more ranks, larger ones make fewer files."""


class FilePlan(NamedTuple):
    """The files of an export and who writes them.

    Attributes:
        stem: first part of the file names.
        specs: every tensor.
        shard_bytes: what the files were laid out for.
        shards: the files.
        owners: rank that writes each file.
    """

    stem: str
    specs: Mapping[str, TensorSpec]
    shard_bytes: int
    shards: tuple[Shard, ...]
    owners: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of tensor data."""
        return sum(spec.num_bytes for spec in self.specs.values())

    def files_of(self, rank: int) -> dict[str, dict[str, TensorSpec]]:
        """Names of a rank's files, and what is in them."""
        return {
            shard.name: {key: self.specs[key] for key in shard.keys}
            for shard, owner in zip(self.shards, self.owners, strict=True)
            if owner == rank
        }

    def destinations(self) -> dict[str, int]:
        """Writer of each tensor. Writers take turns, so that one writes while the next tensor is being gathered."""
        queues: dict[int, list[str]] = {}
        for shard, owner in zip(self.shards, self.owners, strict=True):
            queues.setdefault(owner, []).extend(shard.keys)
        owner_of = {key: owner for owner, keys in queues.items() for key in keys}
        turns = zip_longest(*queues.values())
        return {key: owner_of[key] for turn in turns for key in turn if key is not None}


def plan_files(specs: Mapping[str, TensorSpec], num_ranks: int, stem: str) -> FilePlan:
    """Lay tensors out in files, and give each file to the rank that has least to write so far, the first of those."""
    shards = plan_shards(specs, SHARD_BYTES, stem)
    load = [0] * num_ranks
    owners = []
    for shard in shards:
        owner = load.index(min(load))
        owners.append(owner)
        load[owner] += max(1, sum(specs[key].num_bytes for key in shard.keys))
    return FilePlan(stem, specs, SHARD_BYTES, shards, tuple(owners))


class Lane:
    """Writes this rank's files of an export in a thread, a tensor at a time, while the ranks gather the next tensor.

    Failures end up in the commit: a lane whose disk is full swallows what else comes, so that its rank goes on taking
    part in the gathering.

    Args:
        commit: what the files belong to.
        folder: of the export, inside the commit's.
        plan: which files are this rank's.
        hashed: also compute each tensor's part in the identity of a model.
        metadata: for the files' headers.

    Attributes:
        hashes: by tensor, where they are wanted and count.
    """

    def __init__(
        self,
        commit: Commit,
        folder: str,
        plan: FilePlan,
        *,
        hashed: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.hashes: dict[str, str] = {}
        self._commit = commit
        self._plan = plan
        self._hashed = hashed
        self._pool = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None
        own = plan.files_of(commit.rank)
        self._writer = (
            commit.attempt(
                lambda: ShardWriter(
                    commit.folder / folder,
                    plan.specs,
                    max_shard_bytes=plan.shard_bytes,
                    stem=plan.stem,
                    own=own,
                    writes_index=commit.rank == 0,
                    metadata=metadata,
                )
            )
            if own or commit.rank == 0
            else None
        )

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a whole tensor that nobody changes from now on. At most one is waiting meanwhile."""
        self._wait()
        self._commit.world.progress.mark(SAVE)
        if self._writer is not None and not self._commit.failed:
            self._last = self._pool.submit(self._write, self._writer, name, tensor)

    def _write(self, writer: ShardWriter, name: str, tensor: Tensor) -> None:
        host = tensor.detach().cpu().contiguous()

        def write() -> None:
            try:
                writer.write(name, host)
            except OSError as error:
                file = next(shard.name for shard in self._plan.shards if name in shard.keys)
                error.filename = str(writer.directory / file)
                raise

        self._commit.attempt(write)
        if self._hashed:
            hasher = TensorHasher(name, self._plan.specs[name])
            hasher.update(host)
            if (result := hasher.result()) is not None:
                self.hashes[name] = result
        commit_points.reached("tensor_written")

    def _wait(self) -> None:
        if self._last is not None:
            self._last.result()
            self._last = None

    def close(self) -> None:
        """Finish the files, all ranks together; or drop them if this rank has failed.

        Raises:
            LuminaError: on every rank, if writing has failed on any.
        """
        self._wait()
        self._pool.shutdown()
        writer = self._writer
        if writer is not None and self._commit.failed:
            writer.discard()
        self._commit.together(lambda: writer.close() if writer is not None else None)
