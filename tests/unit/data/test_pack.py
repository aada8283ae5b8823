"""Packing: every sample once, nothing split, little room wasted, time near linear."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumina_ft.data.pack import plan_packs, token_use
from lumina_ft.errors import DataError

METHODS = ("best_fit", "greedy", "none")


def log_normal(count: int, seed: int = 0) -> np.ndarray:
    lengths = np.random.default_rng(seed).lognormal(np.log(600), 0.8, count)
    return np.clip(lengths, 1, 4096).astype(np.int64)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), max_size=60),
    method=st.sampled_from(METHODS),
    seed=st.integers(0, 2**63),
)
def test_every_sample_sits_in_exactly_one_pack_that_holds_it(lengths, method, seed):
    packs = plan_packs(np.array(lengths, np.int64), 64, method, seed)
    assert sorted(i for pack in packs for i in pack.tolist()) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in pack) <= 64 for pack in packs)
    assert all(len(pack) == 1 for pack in packs if method == "none")


@pytest.mark.parametrize("seed", range(3))
def test_best_fit_uses_over_99_percent_of_8192_on_log_normal_lengths(seed):
    lengths = log_normal(10_000, seed)
    assert token_use(plan_packs(lengths, 8192, "best_fit", seed), lengths, 8192) >= 0.995


def test_best_fit_needs_hardly_more_packs_than_the_lower_bound_for_few_samples():
    for count in (50, 300, 1000):
        lengths = log_normal(count)
        assert len(plan_packs(lengths, 8192, "best_fit", 0)) <= -(-int(lengths.sum()) // 8192) + 1


def test_best_fit_mixes_lengths_inside_a_pack():
    """Two tasks of different length must not fall into packs of their own: a step would train on one of them."""
    lengths = np.repeat([25, 80], 3000)
    packs = plan_packs(lengths, 2048, "best_fit", 0)
    shares = np.array([(lengths[pack] == 80).mean() for pack in packs])
    assert token_use(packs, lengths, 2048) > 0.985
    assert ((shares > 0.2) & (shares < 0.8)).mean() > 0.95


def test_greedy_packs_neighbours_of_the_shuffled_order():
    lengths = log_normal(2000)
    packs = plan_packs(lengths, 8192, "greedy", 0)
    assert 0.8 < token_use(packs, lengths, 8192) < 0.99


@pytest.mark.parametrize("method", METHODS)
def test_plans_repeat_for_a_seed_and_differ_between_seeds(method):
    lengths = log_normal(200)
    first, again, other = (plan_packs(lengths, 8192, method, seed) for seed in (1, 1, 2))
    assert [p.tolist() for p in first] == [p.tolist() for p in again]
    assert [p.tolist() for p in first] != [p.tolist() for p in other]


@pytest.mark.parametrize("lengths", [log_normal(120_000), np.full(120_000, 3000), np.full(120_000, 25)])
def test_planning_time_stays_near_linear(lengths):
    """Equal lengths that never fill a pack would make an unbounded carry quadratic."""

    def seconds(count: int) -> float:
        start = time.process_time()
        plan_packs(lengths[:count], 8192, "best_fit", 0)
        return time.process_time() - start

    small, large = min(seconds(15_000) for _ in range(3)), seconds(120_000)
    assert large < 8 * small * 4


@pytest.mark.parametrize("bad", [0, 9000])
def test_a_length_outside_the_pack_is_an_error_with_both_numbers(bad):
    with pytest.raises(DataError, match=rf"sample 1 .* {bad} tokens .* 1 to 8192 tokens .*max_pack_tokens"):
        plan_packs(np.array([5, bad]), 8192, "best_fit", 0)
