"""Dropout of routed experts: a fair draw that depends on a row's key, the projection and the column alone."""

import pytest
import torch

from lumina_ft.kernels.moe.dropout import draw_key, drop_, row_keys

CPU = torch.device("cpu")
TOKENS, SLOTS, COLUMNS = 256, 4, 192


def dropped(key=7, stream=0, probability=0.3, columns=COLUMNS, keys=None):
    keys = row_keys(key, TOKENS, SLOTS, CPU).view(-1, 1) if keys is None else keys
    return drop_(torch.ones(keys.shape[0], columns), keys, probability, stream) == 0


@pytest.mark.parametrize("probability", [0.05, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("key", [0, 1, 2**31, 2**62 - 1])
def test_the_share_of_dropped_entries_is_the_probability(key, probability):
    """Of all entries, of each row and of each column: binomial, so within five standard deviations."""
    got = dropped(key, probability=probability).double()
    for values, count in ((got.mean(), got.numel()), (got.mean(1), COLUMNS), (got.mean(0), TOKENS * SLOTS)):
        deviation = (probability * (1 - probability) / count) ** 0.5
        assert float((values - probability).abs().max()) <= 5 * deviation
    spread = got.mean(1).var() / (probability * (1 - probability) / COLUMNS)
    assert 0.8 <= float(spread) <= 1.2, "rows are drawn independently"


def test_rows_columns_streams_and_keys_are_uncorrelated():
    one = dropped().double() - 0.3
    others = {
        "next row": one.roll(1, 0),
        "next token": one.roll(SLOTS, 0),
        "next column": one.roll(1, 1),
        "diagonal": one.roll((1, 1), (0, 1)),
        "other projection": dropped(stream=1).double() - 0.3,
        "third projection": dropped(stream=2).double() - 0.3,
        "next key": dropped(key=8).double() - 0.3,
        "key with another high word": dropped(key=7 + 2**32).double() - 0.3,
    }
    deviation = 0.3 * 0.7 / one.numel() ** 0.5
    for name, other in others.items():
        assert abs(float((one * other).mean())) <= 5 * deviation, name


def test_pairs_of_rows_share_no_pattern():
    """Every pair of 64 rows agrees on about as many columns as chance has it."""
    got = dropped(probability=0.5, columns=1024)[:64].double() * 2 - 1
    agreement = (got @ got.t() / 1024).fill_diagonal_(0)
    assert float(agreement.abs().max()) <= 5.5 / 1024**0.5


def test_rows_are_dropped_alike_wherever_they_are_and_whatever_comes_with_them():
    keys = row_keys(99, TOKENS, SLOTS, CPU).view(-1, 1)
    order = torch.randperm(keys.shape[0], generator=torch.Generator().manual_seed(0))[:300]
    assert torch.equal(dropped(keys=keys)[order], dropped(keys=keys[order]))


def test_long_inputs_are_hashed_in_parts_with_the_same_result(monkeypatch):
    want = dropped()
    monkeypatch.setattr("lumina_ft.kernels.moe.dropout._ELEMENTS", 5 * COLUMNS + 1)
    assert torch.equal(dropped(), want)


def test_keys_are_distinct_and_kept_entries_are_untouched():
    keys = row_keys(3, 5000, 8, CPU)
    assert keys.shape == (5000, 8) and keys.unique().numel() == keys.numel()
    x = torch.randn(8, 16)
    got = drop_(x.clone(), keys[0].view(-1, 1), 0.5, 0)
    assert torch.equal(got, torch.where(got == 0, 0, x))


def test_the_key_comes_from_torchs_default_generator():
    torch.manual_seed(5)
    first = [draw_key(), draw_key()]
    torch.manual_seed(5)
    assert [draw_key(), draw_key()] == first and first[0] != first[1]
    assert all(0 <= key < 2**62 for key in first)
