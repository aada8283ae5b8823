"""A built dataset as one global sequence of packs per epoch, the same for any number of ranks.

    reader → lengths of the epoch → packs → (per rank) layout → noise → collate → Batch

Everything is a function of (seed, epoch, step): nothing has to be saved or replayed to resume.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from lumina_ft.batch import Batch
from lumina_ft.config.schema import DataConfig
from lumina_ft.data.collate import collate, empty_batch
from lumina_ft.data.conversation import generates_image
from lumina_ft.data.draws import Stream, uniforms
from lumina_ft.data.layout import Layout, layout_sample, sample_length
from lumina_ft.data.noise import noise_layouts
from lumina_ft.data.pack import plan_packs
from lumina_ft.data.segments import Sample
from lumina_ft.data.shards import DatasetMeta, open_dataset, read_meta
from lumina_ft.data.validate import validate_batch
from lumina_ft.errors import ConfigError, DataError, nearest
from lumina_ft.tokens import MediaIds, TextIds, TokenSpec

LAYOUT_CACHE_BYTES = 256 * 1024 * 1024
"""Layouts of one rank that are kept; each epoch visits every sample once, so what is cached first stays."""

_EVAL_SEED = 0
"""Held-out noise is the same for every run, stage and evaluation, so that losses compare."""


class SampleReader(Protocol):
    """Random access to samples; `shards.ShardReader` is one."""

    meta: DatasetMeta

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


@dataclass(frozen=True)
class Pack:
    """Samples that share one Batch.

    Attributes:
        epoch: pass over the data that the pack belongs to; keys its noise.
        indices: dataset rows.
    """

    epoch: int
    indices: NDArray[np.int64]


class PackedDataset:
    """Packs of one split of a dataset.

    Attributes:
        spec: ids and codebooks of the model.
        tasks: task names of the dataset; `Batch.task_ids` counts them.
        indices: [n] dataset rows of this split.
        lengths: [n] rows of each sample when its condition is kept.
    """

    def __init__(
        self,
        cfg: DataConfig,
        *,
        spec: TokenSpec,
        seed: int,
        split: Literal["train", "eval"] = "train",
        reader: SampleReader | None = None,
        tokenizer_identity: str | None = None,
        vocab_rows: int | None = None,
    ) -> None:
        """Open the dataset and measure its samples.

        Args:
            cfg: what to read and how to lay it out.
            spec: ids of the model; the dataset's must agree.
            seed: of order, drops and noise; `eval` doesn't use it.
            split: `eval` reads `eval_path`, or the held-out share of `path`; with neither it has no samples.
            reader: samples to use in place of the configured directory.
            tokenizer_identity: of the model's tokenizer; the dataset's must agree. None: not compared.
            vocab_rows: rows of the model's text table; larger ids in a batch are errors. None: not checked.

        Raises:
            ConfigError: `data.tasks` names an unknown task.
            DataError: the dataset was built for other ids, tokenizer or codec, a sample is malformed or longer than a
                pack, or the split that training or evaluation asks for is empty.
        """
        self.spec = spec
        self._cfg = cfg
        self._train = split == "train"
        self._seed = seed if self._train else _EVAL_SEED
        own_eval = not self._train and cfg.eval_path is not None
        self._vocab_rows = vocab_rows
        self._name = f"data.eval_path={cfg.eval_path}" if own_eval else f"data.path={cfg.path}"
        if reader is None:
            reader = open_dataset(cfg.eval_path if own_eval and cfg.eval_path else cfg.path)
            if own_eval:
                _check_codecs(read_meta(cfg.path), reader.meta, self._name)
        self._reader = reader
        check_meta(reader.meta, spec, tokenizer_identity, self._name)
        self.tasks = tuple(reader.meta.tasks)
        self._measure(self._candidates(own_eval))
        wanted = self._train or own_eval or cfg.eval_fraction > 0
        if wanted and not len(self.indices):
            raise DataError(
                f"{self._name} — no sample for {split} among {len(reader)} with data.tasks={cfg.tasks} and "
                f"data.eval_fraction={cfg.eval_fraction} — a split needs at least one — use more data or another share"
            )
        self._plans: dict[int, list[Pack]] = {}
        self._num_packs: dict[int, int] = {}
        self._layouts: dict[tuple[int, bool], Layout] = {}
        self._layout_bytes = 0

    @property
    def num_samples(self) -> int:
        """Samples in this split."""
        return len(self.indices)

    def packs(self, epoch: int) -> list[Pack]:
        """The pack sequence of an epoch: every sample once. Empty for an empty split."""
        if epoch not in self._plans:
            lengths = np.where(self._drops(self.indices, epoch), self._dropped_lengths, self.lengths)
            # The plan's seed mixes both numbers so that neighbouring seeds don't share epochs.
            entropy = np.random.SeedSequence([self._seed, epoch]).generate_state(2, np.uint64)
            plan = plan_packs(lengths, self._cfg.max_pack_tokens, self._cfg.packing, int(entropy[0]))
            if len(self._plans) > 1:
                del self._plans[next(iter(self._plans))]
            self._plans[epoch] = [Pack(epoch, self.indices[places]) for places in plan]
            self._num_packs[epoch] = len(plan)
        return self._plans[epoch]

    def steps_per_epoch(self, packs_per_step: int, epoch: int = 0) -> int:
        """Optimizer steps of an epoch. Epochs can differ by a step: drops and order change how samples fill packs."""
        if epoch not in self._num_packs:
            self.packs(epoch)
        return -(-self._num_packs[epoch] // packs_per_step)

    def steps_of_epochs(self, epochs: float, packs_per_step: int) -> int:
        """Steps of a (fractional) number of passes, at least 1."""
        whole = int(epochs)
        steps = sum(self.steps_per_epoch(packs_per_step, epoch) for epoch in range(whole))
        if epochs > whole:
            steps += round((epochs - whole) * self.steps_per_epoch(packs_per_step, whole))
        return max(steps, 1)

    def locate(self, step: int, packs_per_step: int) -> tuple[int, int]:
        """Epoch of a step (0-based, counted from the stage's start) and its place in that epoch."""
        assert self.num_samples, "an empty split has no steps"
        epoch = 0
        while step >= (steps := self.steps_per_epoch(packs_per_step, epoch)):
            step -= steps
            epoch += 1
        return epoch, step

    def packs_of_step(self, step: int, packs_per_step: int) -> list[Pack | None]:
        """The packs of one optimizer step over all ranks; None fills up the last step of an epoch."""
        epoch, place = self.locate(step, packs_per_step)
        packs: list[Pack | None] = [*self.packs(epoch)[place * packs_per_step : (place + 1) * packs_per_step]]
        return packs + [None] * (packs_per_step - len(packs))

    @staticmethod
    def rank_packs(packs: Sequence[Pack | None], rank: int, world_size: int) -> list[Pack | None]:
        """A rank's share of a step: every `world_size`-th pack, so that the fillers at the end spread out.

        Raises:
            ConfigError: the packs don't divide evenly; ranks would run different numbers of forwards.
        """
        if len(packs) % world_size:
            raise ConfigError(
                f"train.packs_per_step={len(packs)} — must be a multiple of the {world_size} ranks — "
                f"use {-(-len(packs) // world_size) * world_size}"
            )
        return list(packs[rank::world_size])

    def batch(self, pack: Pack | None) -> Batch:
        """Lay out, noise and join the samples of a pack; None gives a pack without samples (`empty_batch`).

        Raises:
            DataError: a sample that the model can't take, named with its place in the raw file.
        """
        pad_to = self._cfg.max_pack_tokens if self._cfg.pad_packs else None
        if pack is None:
            return empty_batch(self.spec, pad_to)
        drops = self._drops(pack.indices, pack.epoch)
        layouts = [self._layout(index, drop) for index, drop in zip(pack.indices.tolist(), drops.tolist(), strict=True)]
        epoch = pack.epoch if self._train else 0
        noised = noise_layouts(layouts, self._cfg.noise, self.spec, seed=self._seed, epoch=epoch)
        batch = collate(noised, self.spec, pad_to, tasks=self.tasks)
        validate_batch(batch, self.spec, vocab_rows=self._vocab_rows)
        return batch

    def _candidates(self, own_eval: bool) -> NDArray[np.int64]:
        """Dataset rows of the split, before the choice of tasks."""
        rows = np.arange(len(self._reader), dtype=np.int64)
        if own_eval or (self._train and self._cfg.eval_path is not None):
            return rows
        return rows[held_out(rows, self._cfg.eval_fraction) != self._train]

    def _measure(self, rows: NDArray[np.int64]) -> None:
        """Fill `indices`, `lengths` and the lengths without condition."""
        cfg = self._cfg
        for task in cfg.tasks or ():
            if task not in self.tasks:
                raise ConfigError(
                    f"data.tasks — {task!r} — {self._name} has the tasks {', '.join(self.tasks)}"
                    f"{nearest(task, self.tasks)} — name one of them"
                )
        indices, lengths, dropped = [], [], []
        self._generates_image = np.zeros(len(self._reader), np.bool_)
        for index in rows.tolist():
            sample = self._reader[index]
            if cfg.tasks is not None and sample.task not in cfg.tasks:
                continue
            kept = sample_length(sample, block_tokens=cfg.block_tokens, answer_tail=cfg.answer_tail)
            bare = kept
            if generates_image(sample):
                self._generates_image[index] = True
                bare = sample_length(
                    sample, block_tokens=cfg.block_tokens, answer_tail=cfg.answer_tail, drop_condition=True
                )
            if max(kept, bare) > cfg.max_pack_tokens:
                raise DataError(
                    f"{sample.source or f'sample {index}'} — {max(kept, bare)} tokens — a sample must fit a pack of "
                    f"data.max_pack_tokens={cfg.max_pack_tokens} — raise it or remove the row"
                )
            indices.append(index)
            lengths.append(kept)
            dropped.append(bare)
        self.indices = np.array(indices, np.int64)
        self.lengths = np.array(lengths, np.int64)
        self._dropped_lengths = np.array(dropped, np.int64)

    def _drops(self, indices: NDArray[np.int64], epoch: int) -> NDArray[np.bool_]:
        """Which samples lose their condition in this epoch; held-out ones never do."""
        if not self._train or self._cfg.condition_drop == 0:
            return np.zeros(len(indices), np.bool_)
        return uniforms(Stream.CONDITION_DROP, seed=self._seed, epoch=epoch, samples=indices) < self._cfg.condition_drop

    def _layout(self, index: int, drop: bool) -> Layout:
        """Layout of a sample, kept while there is room: only drop and noise change between epochs."""
        layout = self._layouts.get((index, drop))
        if layout is None:
            layout = layout_sample(
                self._reader[index],
                self.spec,
                block_tokens=self._cfg.block_tokens,
                answer_tail=self._cfg.answer_tail,
                drop_condition=drop,
            )
            num_bytes = sum(v.nbytes for v in vars(layout).values() if isinstance(v, np.ndarray))
            if self._layout_bytes + num_bytes <= LAYOUT_CACHE_BYTES:
                self._layout_bytes += num_bytes
                self._layouts[index, drop] = layout
        return layout


def held_out(indices: NDArray[np.integer], fraction: float) -> NDArray[np.bool_]:
    """[n] whether a dataset row is held out: a hash of its number alone, so stages, seeds and ranks agree."""
    return uniforms(Stream.HOLD_OUT, seed=0, epoch=0, samples=indices) < fraction


def check_meta(meta: DatasetMeta, spec: TokenSpec, tokenizer_identity: str | None, name: str) -> None:
    """Compare a dataset's ids and tokenizer with the model's.

    Media ids and codebooks are compared only if the dataset holds media: text rows fit any number of codebooks.

    Raises:
        DataError: the first difference, with both values.
    """
    pairs = {
        f"text_ids.{f.name}": (getattr(meta.spec.text, f.name), getattr(spec.text, f.name)) for f in fields(TextIds)
    }
    if meta.codec is not None:
        pairs["num_codebooks"] = (meta.spec.num_codebooks, spec.num_codebooks)
        for f in fields(MediaIds):
            pairs[f"media_ids.{f.name}"] = (getattr(meta.spec.media, f.name), getattr(spec.media, f.name))
    for key, (theirs, ours) in pairs.items():
        if theirs != ours:
            raise DataError(
                f"{name} — {key} is {theirs} in the dataset and {ours} in the model — both must agree — "
                "build the dataset for this model"
            )
    if tokenizer_identity is not None and meta.tokenizer_identity != tokenizer_identity:
        raise DataError(
            f"{name} — built with tokenizer {meta.tokenizer_identity}, the model's is {tokenizer_identity} — "
            "both must agree — build the dataset with the model's tokenizer"
        )


def _check_codecs(train: DatasetMeta, held: DatasetMeta, name: str) -> None:
    """Codes of another codec mean other pixels, so a held-out loss on them would say nothing."""
    if train.codec is not None and held.codec is not None and train.codec != held.codec:
        raise DataError(
            f"{name} — image codec {held.codec}, that of data.path is {train.codec} — both must agree — "
            "build it with codec.path set to the codec of data.path"
        )
