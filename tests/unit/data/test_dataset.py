"""The global pack sequence: nothing lost, nothing twice, the same for any number of ranks, exact after a resume."""

from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lumina_ft.batch import Batch
from lumina_ft.config.schema import DataConfig
from lumina_ft.data.dataset import PackedDataset, check_meta, held_out
from lumina_ft.data.shards import ShardWriter, write_meta
from lumina_ft.errors import ConfigError, DataError

UNCOND = 204


def config(**changes) -> DataConfig:
    return DataConfig.model_validate({"path": Path("ds"), "max_pack_tokens": 96, "block_tokens": 4, **changes})


@pytest.fixture(scope="module")
def reader(make):
    """Even rows text of 5..20 rows of answer, odd rows images; 120 in all."""
    return make.reader(
        [make.t2i_sample(i, 1 + i % 9) if i % 2 else make.text_sample(i, 1 + i % 5, 1 + i % 7) for i in range(120)]
    )


@pytest.fixture
def dataset(make, reader):
    def build(*, seed=0, split="train", **changes) -> PackedDataset:
        return PackedDataset(config(**changes), spec=make.spec, seed=seed, split=split, reader=reader)

    return build


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(Batch))


def rows_of(packs) -> list[int]:
    return [row for pack in packs if pack is not None for row in pack.indices.tolist()]


@settings(max_examples=25, deadline=None)
@given(world=st.integers(1, 4), per_rank=st.integers(1, 5), count=st.integers(1, 60), seed=st.integers(0, 99))
def test_each_sample_appears_once_per_epoch_for_any_world_size(make, world, per_rank, count, seed):
    samples = [make.text_sample(i, 1 + i % 5, 1 + i % 11) for i in range(count)]
    data = PackedDataset(config(), spec=make.spec, seed=seed, reader=make.reader(samples))
    packs_per_step = world * per_rank
    steps = [data.steps_per_epoch(packs_per_step, epoch) for epoch in range(2)]
    for epoch, first in ((0, 0), (1, steps[0])):
        seen: list[int] = []
        for step in range(first, first + steps[epoch]):
            packs = data.packs_of_step(step, packs_per_step)
            assert len(packs) == packs_per_step
            shares = [data.rank_packs(packs, rank, world) for rank in range(world)]
            assert {len(share) for share in shares} == {per_rank}
            assert sorted(rows_of(packs)) == sorted(row for share in shares for row in rows_of(share))
            seen += rows_of(packs)
        assert sorted(seen) == list(range(count))


def test_the_order_of_packs_is_the_same_for_one_and_two_ranks(dataset):
    """Two runs of the same step size: what rank 0 of 1 reads is what ranks 0 and 1 of 2 read together."""
    one, two = dataset(), dataset()
    for step in range(one.steps_per_epoch(4) * 2):
        alone = one.rank_packs(one.packs_of_step(step, 4), 0, 1)
        shared = [two.rank_packs(two.packs_of_step(step, 4), rank, 2) for rank in range(2)]
        together = [pack for pair in zip(*shared, strict=True) for pack in pair]
        assert [rows_of([pack]) for pack in alone] == [rows_of([pack]) for pack in together]


def test_only_the_last_step_of_an_epoch_holds_fillers_and_ranks_share_them(dataset):
    data = dataset()
    steps = data.steps_per_epoch(10)
    fillers = [sum(pack is None for pack in data.packs_of_step(step, 10)) for step in range(steps)]
    assert fillers[:-1] == [0] * (steps - 1) and fillers[-1] == steps * 10 - len(data.packs(0)) > 1
    last = data.packs_of_step(steps - 1, 10)
    counts = [sum(pack is None for pack in data.rank_packs(last, rank, 2)) for rank in range(2)]
    assert abs(counts[0] - counts[1]) <= 1


def test_a_step_that_ranks_cannot_share_is_refused(dataset):
    with pytest.raises(ConfigError, match=r"train\.packs_per_step=4 — must be a multiple of the 3 ranks — use 6"):
        PackedDataset.rank_packs(dataset().packs_of_step(0, 4), 0, 3)


def test_batches_after_a_resume_are_bit_identical(dataset):
    """A fresh object that starts at any step gives what the first one gave on its way."""
    first = dataset(seed=3)
    steps = first.steps_per_epoch(4) + 3
    want = {step: [first.batch(pack) for pack in first.packs_of_step(step, 4)] for step in range(steps)}
    for start in (2, steps - 1):
        got = [dataset(seed=3).batch(pack) for pack in dataset(seed=3).packs_of_step(start, 4)]
        assert all(same(a, b) for a, b in zip(want[start], got, strict=True))


def test_noise_is_fresh_each_epoch_and_depends_on_the_seed_not_on_the_pack(dataset):
    def rows(data: PackedDataset, epoch: int) -> dict[int, torch.Tensor]:
        found = {}
        for pack in data.packs(epoch):
            batch = data.batch(pack)
            for number, row in enumerate(batch.sample_ids.tolist()):
                found[row] = batch.noised[batch.cu_seqlens[number] : batch.cu_seqlens[number + 1]]
        return found

    plain = rows(dataset(condition_drop=0), 0)
    repacked = rows(dataset(condition_drop=0, packing="none"), 0)
    assert all(torch.equal(plain[row], repacked[row]) for row in plain)
    for other in (rows(dataset(condition_drop=0), 1), rows(dataset(condition_drop=0, seed=1), 0)):
        assert sum(not torch.equal(plain[row], other[row]) for row in plain) > 60


def test_condition_drop_hits_its_share_of_image_samples_only_and_packs_stay_within_bounds(dataset):
    data = dataset(condition_drop=0.3)
    dropped: Counter[int] = Counter()
    epochs = 20
    for epoch in range(epochs):
        for pack in data.packs(epoch):
            batch = data.batch(pack)
            assert batch.num_tokens <= 96
            for number, row in enumerate(batch.sample_ids.tolist()):
                span = batch.input_ids[batch.cu_seqlens[number] : batch.cu_seqlens[number + 1], 0]
                dropped[row] += int((span == UNCOND).any())
    assert all(dropped[row] == 0 for row in range(0, 120, 2))
    odd = [dropped[row] for row in range(1, 120, 2)]
    assert abs(np.mean(odd) / epochs - 0.3) < 0.05 and max(odd) < epochs


def test_lengths_are_the_rows_of_the_batches(dataset):
    data = dataset(condition_drop=0)
    sizes = dict(zip(data.indices.tolist(), data.lengths.tolist(), strict=True))
    for pack in data.packs(0):
        batch = data.batch(pack)
        assert np.diff(batch.cu_seqlens.numpy()).tolist() == [sizes[row] for row in pack.indices.tolist()]


def test_held_out_samples_are_the_same_for_every_seed_and_never_trained(dataset):
    splits = {}
    for seed in (0, 1):
        train = dataset(seed=seed, eval_fraction=0.2)
        held = dataset(seed=seed, eval_fraction=0.2, split="eval")
        splits[seed] = held.indices.tolist()
        assert sorted([*train.indices.tolist(), *held.indices.tolist()]) == list(range(120))
        assert sorted(rows_of(held.packs(0))) == splits[seed]
    assert splits[0] == splits[1] and 10 <= len(splits[0]) <= 40
    tasks = dataset(eval_fraction=0.2, split="eval", tasks=["t2i"])
    assert tasks.indices.tolist() == [row for row in splits[0] if row % 2]


def test_held_out_share_follows_the_fraction():
    assert abs(held_out(np.arange(20000), 0.1).mean() - 0.1) < 0.01
    assert not held_out(np.arange(100), 0.0).any()


def test_held_out_batches_are_fixed_and_keep_their_condition(dataset):
    """The same noise for every seed and epoch, so that held-out losses compare; no drops."""
    first, second = (dataset(seed=seed, eval_fraction=0.3, condition_drop=1.0, split="eval") for seed in (0, 9))
    for a, b in zip(first.packs(0), second.packs(0), strict=True):
        batch = first.batch(a)
        assert same(batch, second.batch(b)) and same(batch, first.batch(replace(a, epoch=5)))
        assert not (batch.input_ids == UNCOND).any()


def test_without_held_out_data_the_eval_split_is_empty(dataset):
    data = dataset(split="eval")
    assert data.num_samples == 0 and data.packs(0) == [] and data.steps_per_epoch(4) == 0


def test_steps_of_fractional_epochs(dataset):
    data = dataset()
    one, two = data.steps_per_epoch(2, 0), data.steps_per_epoch(2, 1)
    assert data.steps_of_epochs(1, 2) == one
    assert data.steps_of_epochs(1.5, 2) == one + round(two / 2)
    assert data.steps_of_epochs(0.0001, 2) == 1
    assert data.locate(one - 1, 2) == (0, one - 1) and data.locate(one, 2) == (1, 0)


def test_padded_packs_have_one_shape(dataset):
    data = dataset(pad_packs=True)
    sizes = {data.batch(pack).num_tokens for pack in [*data.packs(0), None]}
    assert sizes == {96}


def test_a_cached_layout_gives_the_batch_of_a_fresh_one(dataset, monkeypatch):
    cached, fresh = dataset(), dataset()
    monkeypatch.setattr("lumina_ft.data.dataset.LAYOUT_CACHE_BYTES", 0)
    packs = cached.packs(0)
    want = [fresh.batch(pack) for pack in packs]
    monkeypatch.undo()
    for _ in range(2):
        assert all(same(cached.batch(pack), batch) for pack, batch in zip(packs, want, strict=True))


def test_task_ids_count_the_tasks_of_the_dataset(dataset):
    data = dataset(tasks=["text"])
    batch = data.batch(data.packs(0)[0])
    assert data.tasks == ("t2i", "text") and set(batch.task_ids.tolist()) == {1}
    assert all(row % 2 == 0 for row in data.indices)


def test_unknown_task_is_refused_with_a_suggestion(dataset):
    with pytest.raises(ConfigError, match=r"data\.tasks — 'tex' — .*t2i, text; did you mean 'text'"):
        dataset(tasks=["tex"])


def test_a_sample_over_the_pack_is_refused_with_its_place(make):
    reader = make.reader([make.sample(make.text(0, [1]), make.text(1, [2] * 60), source="rows.jsonl:31")])
    with pytest.raises(DataError, match=r"rows\.jsonl:31 — 132 tokens — .*data\.max_pack_tokens=96"):
        PackedDataset(config(), spec=make.spec, seed=0, reader=reader)


def test_an_empty_split_is_refused(make):
    reader = make.reader([make.text_sample(0, 1, 1)])
    with pytest.raises(DataError, match="no sample for (train|eval) among 1"):
        for split in ("train", "eval"):
            PackedDataset(config(eval_fraction=0.5), spec=make.spec, seed=0, split=split, reader=reader)


def write_dataset(make, directory: Path, samples, codec: str) -> Path:
    writer = ShardWriter(directory, num_codebooks=2)
    for sample in samples:
        writer.add(sample)
    counts, shards = writer.close()
    meta = make.reader(samples).meta
    write_meta(directory, replace(meta, counts=counts, shards=shards, num_samples=len(samples), codec={"kind": codec}))
    return directory


def test_a_built_directory_gives_the_batches_of_the_samples_in_memory(make, reader, tmp_path):
    path = write_dataset(make, tmp_path / "train", reader.samples, "pq")
    own_eval = write_dataset(make, tmp_path / "eval", reader.samples[:10], "pq")
    memory = PackedDataset(config(), spec=make.spec, seed=0, reader=reader)
    cfg = config(path=path, eval_path=own_eval, eval_fraction=0.5)
    train = PackedDataset(cfg, spec=make.spec, seed=0)
    assert train.num_samples == 120
    assert all(same(memory.batch(a), train.batch(b)) for a, b in zip(memory.packs(0), train.packs(0), strict=True))
    held = PackedDataset(cfg, spec=make.spec, seed=0, split="eval")
    assert sorted(rows_of(held.packs(0))) == list(range(10))


def test_held_out_data_of_another_codec_is_refused(make, reader, tmp_path):
    path = write_dataset(make, tmp_path / "train", reader.samples[:4], "pq")
    other = write_dataset(make, tmp_path / "eval", reader.samples[:4], "token-files")
    with pytest.raises(DataError, match=r"data\.eval_path=.*image codec .*token-files.*codec\.path"):
        PackedDataset(config(path=path, eval_path=other), spec=make.spec, seed=0, split="eval")


def test_a_dataset_for_other_ids_or_another_tokenizer_is_refused(make, reader):
    text = replace(make.spec, text=replace(make.spec.text, boa=230))
    media = replace(make.spec, media=replace(make.spec.media, newline=60))
    for spec, message in [
        (text, "text_ids.boa is 209 in the dataset and 230 in the model"),
        (media, "media_ids.newline is 51 in the dataset and 60 in the model"),
        (replace(make.spec, num_codebooks=8), "num_codebooks is 2 in the dataset and 8 in the model"),
    ]:
        with pytest.raises(DataError, match=message):
            PackedDataset(config(), spec=spec, seed=0, reader=reader)
    with pytest.raises(DataError, match="built with tokenizer sha256:abc, the model's is sha256:zzz"):
        PackedDataset(config(), spec=make.spec, seed=0, reader=reader, tokenizer_identity="sha256:zzz")
    # Rows without media fit any codebooks.
    check_meta(replace(reader.meta, codec=None), replace(media, num_codebooks=1), "sha256:abc", "data")


def test_codes_outside_the_codebook_are_refused_when_the_pack_is_built(make):
    sample = make.sample(make.text(0, [1]), make.image(1, [[1, 40]], 1, 1), source="rows.jsonl:4")
    data = PackedDataset(config(), spec=make.spec, seed=0, reader=make.reader([sample]))
    with pytest.raises(
        DataError, match=r"rows\.jsonl:4 — code 40 at media row 0, codebook 1 — .*below the codebook size 32"
    ):
        data.batch(data.packs(0)[0])


def test_ids_outside_the_vocabulary_are_refused(make):
    reader = make.reader([make.sample(make.text(0, [300]), make.text(1, [1]))])
    data = PackedDataset(config(), spec=make.spec, seed=0, reader=reader, vocab_rows=218)
    with pytest.raises(DataError, match=r"batch\.input_ids — 300 at sample 0, position 1 .*below 218"):
        data.batch(data.packs(0)[0])
