"""Memory arithmetic of ZeRO on hand-made parameters; `tests/dist/test_memory.py` compares it with engines."""

import pytest

from lumina_ft.errors import ConfigError
from lumina_ft.parallel.footprint import StoredParam, state_bytes, sub_groups

BF16, FP32 = 2, 4


def held(stage: int, params, width: int, **block):
    return tuple(state_bytes(params, {"zero_optimization": {"stage": stage, **block}}, width))


def divided(*sizes: int, ranks: int = 4, place: int = 0, frozen: int = 0):
    trained = [StoredParam(size, ranks, place, 0) for size in sizes]
    return trained + ([StoredParam(frozen, ranks, place, None)] if frozen else [])


def test_zero0_has_masters_in_bf16_only_and_a_step_counter_for_each_tensor():
    params = divided(10, 5, frozen=7)
    assert held(0, params, FP32) == (22 * 4, 15 * 4, 15 * 8 + 2 * 4)
    assert held(0, params, BF16) == (22 * 2, 15 * 2, 15 * 12 + 2 * 4)


def test_zero1_and_2_pad_a_group_to_twice_its_ranks():
    params = divided(10, 3, frozen=7)
    # 13 elements on 4 ranks: 16 in the flat group, 4 of them on each rank.
    assert held(1, params, BF16) == ((7 + 16) * 2, 16 * 4, 4 * 12 + 4)
    assert held(2, params, BF16) == ((7 + 16) * 2, 4 * 4, 4 * 12 + 4)


def test_zero2_in_fp32_keeps_whole_gradients_that_reach_into_the_partition():
    sizes = (10, 3)
    gradients = [held(2, divided(*sizes, place=place), FP32)[1] for place in range(4)]
    # Ranks hold elements 0-3, 4-7, 8-11 and 12-15 of 13; three zeros fill up the last one.
    assert gradients == [10 * 4, 10 * 4, 13 * 4, (3 + 3) * 4]


def test_groups_are_padded_one_by_one():
    params = [StoredParam(3, 2, 0, 0), StoredParam(3, 2, 0, 1)]
    assert held(2, params, BF16) == (8 * 2, 4 * 4, 4 * 12 + 2 * 4)


def test_zero3_pads_every_parameter_and_keeps_small_ones_whole_beside_their_partitions():
    params = divided(10, 5, frozen=7)
    partitions = 3 + 2 + 2
    assert held(3, params, BF16, stage3_param_persistence_threshold=0) == (partitions * 2, 5 * 4, 5 * 12 + 4)
    whole = 8 + 8
    assert held(3, params, BF16, stage3_param_persistence_threshold=7)[0] == (partitions + whole) * 2
    assert held(3, params, FP32, stage3_param_persistence_threshold=0)[2] == 5 * 12 + 4


def test_a_parameter_without_replicas_is_whole_without_a_copy():
    params = [StoredParam(6, 1, 0, 0)]
    assert held(3, params, BF16, stage3_param_persistence_threshold=100) == (12, 24, 6 * 12 + 4)


def test_zero3_updates_sub_groups_of_limited_size_apart_for_each_number_of_ranks():
    params = [StoredParam(8, 4, 0, 0), StoredParam(8, 4, 0, 0), StoredParam(5, 1, 0, 0), StoredParam(4, 4, 0, 1)]
    assert sub_groups(params, 100) == [[4], [5], [1]]
    assert sub_groups(params, 2) == [[2, 2], [5], [1]]


@pytest.mark.parametrize(
    ("block", "extra", "key"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, {}, "zero_optimization.offload_optimizer"),
        ({"round_robin_gradients": True}, {}, "zero_optimization.round_robin_gradients"),
        ({}, {"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype"),
    ],
)
def test_what_has_no_arithmetic_is_refused_by_name(block, extra, key):
    config = {"zero_optimization": {"stage": 2, **block}, **extra}
    with pytest.raises(ConfigError, match=f"{key} — .* has no memory arithmetic — plan without"):
        state_bytes(divided(8), config, BF16)
