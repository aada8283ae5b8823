"""Batches: joining, the padding tail, the pack without samples, and the checks before a model (T2, T3, T6, T7, T8)."""

from dataclasses import fields, replace

import pytest
import torch

from lumina_ft.batch import Batch
from lumina_ft.config.schema import NoiseConfig
from lumina_ft.data.collate import DTYPES, collate, empty_batch
from lumina_ft.data.layout import layout_sample
from lumina_ft.data.noise import apply_noise
from lumina_ft.data.validate import validate_batch
from lumina_ft.errors import DataError

MASK_ALL = NoiseConfig(text_sigma=(1.0, 1.0), image_ratio="uniform", image_ratio_range=(1.0, 1.0))


def noised(make, sample):
    layout = layout_sample(sample, make.spec, block_tokens=4, answer_tail="eoa", drop_condition=False)
    return apply_noise(layout, MASK_ALL, make.spec, key=(0, 0, sample.index))


@pytest.fixture
def samples(make):
    """Rows: 4 + 1 + 8 text (sample 5), 3 + 4 + 6 image (sample 9)."""
    return [noised(make, make.text_sample(5, 2, 3)), noised(make, make.t2i_sample(9, 1))]


@pytest.fixture
def batch(make, samples):
    return collate(samples, make.spec, 30, tasks=("t2i", "text"))


def test_every_field_has_its_dtype_and_length(batch):
    rows = {"cu_seqlens": 3, "sample_ids": 2, "task_ids": 2}
    for field in fields(Batch):
        tensor = getattr(batch, field.name)
        assert tensor.dtype == DTYPES[field.name] and len(tensor) == rows.get(field.name, 30), field.name
    assert batch.input_ids.shape == batch.labels.shape == (30, 2)


def test_samples_stand_one_after_the_other_with_their_own_positions(batch, samples):
    assert batch.cu_seqlens.tolist() == [0, 13, 26]
    assert batch.sample_ids.tolist() == [5, 9] and batch.task_ids.tolist() == [1, 0]
    for number, sample in enumerate(samples):
        span = slice(13 * number, 13 * number + 13)
        assert batch.input_ids[span].tolist() == sample.input_ids.tolist()
        assert batch.labels[span].tolist() == sample.labels.tolist()
        assert batch.noised[span].tolist() == sample.noised.tolist()
        for name in ("type_ids", "position_ids", "turn_ids", "block_ids", "is_clean"):
            assert getattr(batch, name)[span].tolist() == getattr(sample.layout, name).tolist(), name


def test_the_padding_tail_is_invalid_and_unsupervised(batch):
    """T6: the tail has type 0, no block, no label, and belongs to no sample."""
    tail = slice(26, None)
    assert batch.valid.tolist() == [True] * 26 + [False] * 4
    assert (batch.input_ids[tail] == 217).all() and (batch.labels[tail] == -100).all()
    assert (batch.type_ids[tail] == 0).all() and (batch.block_ids[tail] == -1).all()
    assert not batch.is_clean[tail].any() and not batch.noised[tail].any()


def test_without_pad_to_there_is_no_tail(make, samples):
    assert collate(samples, make.spec, None).valid.all()


def test_supervised_counts_are_answers_and_codes_times_codebooks(batch):
    assert batch.supervised_counts() == {"text": 4, "image": 4 * 2, "balance": 26}


def test_a_pack_over_its_room_is_refused(make, samples):
    with pytest.raises(DataError, match="pack of 26 tokens — over pad_to=20"):
        collate(samples, make.spec, 20)


@pytest.mark.parametrize("pad_to", [None, 16])
def test_the_pack_without_samples_passes_every_check_and_counts_nothing(make, pad_to):
    batch = empty_batch(make.spec, pad_to)
    validate_batch(batch, make.spec, vocab_rows=218)
    assert batch.num_tokens == (pad_to or 1) and batch.num_valid == 0
    assert batch.cu_seqlens.tolist() == [0, 1] and batch.sample_ids.tolist() == [-1]
    assert batch.supervised_counts() == {"text": 0, "image": 0, "balance": 0}


def test_good_batches_pass(make, batch, samples):
    validate_batch(batch, make.spec, vocab_rows=218)
    validate_batch(collate(samples, make.spec, None), make.spec)


def put(batch: Batch, name: str, index, value) -> Batch:
    tensor = getattr(batch, name).clone()
    tensor[index] = value
    return replace(batch, **{name: tensor})


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        # Rows 4..7: noisy text answer; 18 and 19: first image codes; 20: newline; 0: prompt; 8: clean memory.
        ("labels", (18, 1), -100, "all 2 codebooks of an image row are labelled or none.*rebuild"),
        ("labels", (18, 0), -7, "a label is an id >= 0"),
        ("labels", (5, 0), -1, "a label is an id >= 0"),
        ("labels", 18, 32, "image labels are below the codebook size 32"),
        ("labels", 5, 218, "labels are below 218"),
        ("labels", 0, 3, "only answer rows"),
        ("labels", 28, 3, "only answer rows"),
        ("labels", 9, 3, "clean rows are given"),
        ("input_ids", (19, 1), 40, "media rows hold codes below 32 or media control ids"),
        ("input_ids", 1, 218, "text ids are below 218"),
        ("input_ids", 1, -1, "text ids are not negative"),
        ("input_ids", (1, 1), 4, "text rows repeat one id"),
        ("type_ids", 3, 5, "type 1, 2, 3 or 4"),
        ("type_ids", 3, 0, "type 1, 2, 3 or 4"),
        ("type_ids", 27, 1, "a padding row has type 0"),
        ("position_ids", 3, -1, "positions start at 0"),
        ("turn_ids", 3, -1, "turns start at 0"),
        ("block_ids", 3, -2, "blocks start at 0"),
    ],
)
def test_t2_t3_a_wrong_value_is_refused_with_sample_and_position(make, batch, name, index, value, message):
    row = index[0] if isinstance(index, tuple) else index
    place = (
        f"sample {5 if row < 13 else 9}, position {row % 13} \\(pack row {row}\\)"
        if row < 26
        else f"padding tail, pack row {row}"
    )
    with pytest.raises(DataError, match=rf"batch\.{name} — .* at {place}.*{message}"):
        validate_batch(put(batch, name, index, value), make.spec, vocab_rows=218)


def test_t3_a_text_label_counts_by_column_zero(make, batch):
    """Text reads column 0; the other columns are not part of its label."""
    validate_batch(put(batch, "labels", (5, 1), -100), make.spec)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([1, 13, 26], r"\[1, 13, 26\] — must start at 0"),
        ([0, 13, 31], r"\[0, 13, 31\] — .*end at or before 30"),
        ([0, 13, 13], "entries 1 and 2 are 13 and 13 — .*increase strictly"),
        ([0, 26, 13], "entries 1 and 2 are 26 and 13"),
        ([0, 13, 20], "row 20 is valid but lies behind the last sample, which ends at 20"),
    ],
)
def test_t7_bounds_are_checked_strictly(make, batch, bounds, message):
    with pytest.raises(DataError, match=message):
        validate_batch(replace(batch, cu_seqlens=torch.tensor(bounds, dtype=torch.int32)), make.spec)


def test_t7_no_bounds_at_all_is_refused(make, batch):
    none = replace(
        batch,
        cu_seqlens=torch.zeros(1, dtype=torch.int32),
        sample_ids=batch.sample_ids[:0],
        task_ids=batch.task_ids[:0],
    )
    with pytest.raises(DataError, match=r"batch\.cu_seqlens — \[0\] — .*at least one sample"):
        validate_batch(none, make.spec)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32])
def test_t2_labels_of_another_dtype_are_refused_by_name(make, batch, dtype):
    with pytest.raises(DataError, match=rf"batch\.labels — dtype {dtype} — must be torch\.int64"):
        validate_batch(replace(batch, labels=batch.labels.to(dtype)), make.spec)


@pytest.mark.parametrize("name", ["position_ids", "type_ids", "turn_ids", "block_ids", "is_clean", "noised", "valid"])
def test_t8_a_length_other_than_s_is_refused_with_both_numbers(make, batch, name):
    with pytest.raises(DataError, match=rf"batch\.{name} — shape \[28\] — must be \[30\]"):
        validate_batch(replace(batch, **{name: getattr(batch, name)[:28]}), make.spec)


def test_t3_labels_of_another_number_of_codebooks_are_refused(make, batch):
    with pytest.raises(DataError, match=r"batch\.labels — shape \[30, 1\] — must be \[30, 2\]"):
        validate_batch(replace(batch, labels=batch.labels[:, :1]), make.spec)
