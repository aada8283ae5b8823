"""Segmented attention against the dense reference: values, gradients, buckets, padding (T6, T7)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lumina_ft.kernels import DensePlan, allowed_mask, attend, plan_segments
from lumina_ft.kernels.attention.segmented import group_by_length

HEADS, KEY_HEADS, DIM = 4, 2, 8
TOLERANCE = 2e-6


def metadata(lengths, tail, seed, *, invalid=0):
    gen = torch.Generator().manual_seed(seed)
    tokens = sum(lengths) + tail
    meta = {
        "type_ids": torch.randint(1, 5, (tokens,), generator=gen),
        "turn_ids": torch.randint(0, 3, (tokens,), generator=gen),
        "block_ids": torch.randint(-1, 3, (tokens,), generator=gen),
        "is_clean": torch.rand(tokens, generator=gen) < 0.5,
        "valid": torch.ones(tokens, dtype=torch.bool),
    }
    meta["valid"][sum(lengths) :] = False
    for _ in range(invalid):
        meta["valid"][int(torch.randint(0, sum(lengths), (1,), generator=gen))] = False
    return meta


def plans(lengths, meta, *, has_metadata=True):
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    kept = meta if has_metadata else {"type_ids": meta["type_ids"], "valid": meta["valid"]}
    dense = DensePlan(allowed_mask(**kept, cu_seqlens=bounds).unsqueeze(0))
    segmented = plan_segments(bounds[:-1].tolist(), lengths, **meta, has_metadata=has_metadata, dtype=torch.float32)
    return dense, segmented


def attention(plan, tokens, seed):
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, h, DIM, generator=gen).requires_grad_() for h in (HEADS, KEY_HEADS, KEY_HEADS))
    upstream = torch.randn(tokens, HEADS, DIM, generator=gen)
    out = attend(q, k, v, plan)
    out.backward(upstream)
    return out.detach(), q.grad, k.grad, v.grad


def assert_same(lengths, meta, *, has_metadata=True, seed=0):
    dense, segmented = plans(lengths, meta, has_metadata=has_metadata)
    tokens = meta["type_ids"].shape[0]
    for name, got, want in zip("oqkv", attention(segmented, tokens, seed), attention(dense, tokens, seed), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")
    return segmented


@pytest.mark.parametrize(
    ("lengths", "tail", "invalid"),
    [
        pytest.param([5], 0, 0, id="one sample"),
        pytest.param([1, 1, 1], 0, 0, id="single tokens"),
        pytest.param([30, 7, 19, 32], 3, 2, id="one bucket with padding"),
        pytest.param([90, 33, 70, 5, 64], 4, 3, id="several buckets"),
    ],
)
@pytest.mark.parametrize("has_metadata", [True, False])
def test_equals_dense_with_all_gradients(lengths, tail, invalid, has_metadata):
    assert_same(lengths, metadata(lengths, tail, seed=1, invalid=invalid), has_metadata=has_metadata)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    tail=st.integers(0, 3),
    invalid=st.integers(0, 4),
    seed=st.integers(0, 10_000),
)
def test_equals_dense_on_random_packs(lengths, tail, invalid, seed):
    assert_same(lengths, metadata(lengths, tail, seed, invalid=invalid), seed=seed)


def test_coarse_rule_is_chosen_per_sample():
    lengths = [6, 6]
    meta = metadata(lengths, 0, seed=4)
    meta["type_ids"][:] = 3
    meta["block_ids"] = torch.tensor([-1] * 6 + [0, 0, 0, 1, 1, 1])
    assert_same(lengths, meta)


def test_t7_padding_gets_zero_and_sends_nothing_back():
    lengths = [9, 12]
    meta = metadata(lengths, 5, seed=2, invalid=3)
    segmented = plans(lengths, meta)[1]
    out, *grads = attention(segmented, 26, seed=0)
    assert (out[~meta["valid"]] == 0).all()
    assert all((grad[~meta["valid"]] == 0).all() for grad in grads)


@pytest.mark.parametrize("lengths", [[4, 6], [6, 4]])
def test_t6_a_sample_is_untouched_by_non_finite_neighbours(lengths):
    first = lengths[0]
    segmented = plans(lengths, metadata(lengths, 0, seed=2), has_metadata=False)[1]
    q, k, v = (torch.randn(10, h, DIM) for h in (HEADS, KEY_HEADS, KEY_HEADS))
    want = attend(q, k, v, segmented)[first:]
    for x in (q, k, v):
        x[:first] = float("nan")
    assert torch.equal(attend(q, k, v, segmented)[first:], want)


def test_work_follows_the_sum_of_squares():
    lengths = [24 + i % 8 for i in range(100)]
    segmented = plans(lengths, metadata(lengths, 0, seed=0))[1]
    assert len(segmented.buckets) == 1
    scores = sum(b.samples * b.length**2 for b in segmented.buckets)
    assert scores <= 1.4 * sum(n * n for n in lengths)
    assert scores < sum(lengths) ** 2 / 50


def test_buckets_hold_similar_lengths():
    groups = group_by_length([1000, 900, 20, 30, 760, 300, 8])
    assert groups == [[0, 1, 4], [5], [2, 3, 6]]
