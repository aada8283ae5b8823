"""Engines of every ZeRO stage on two ranks, judged against one process on the same packs.

ZeRO 2 and 3 as they are trained with; the other stages and layouts are `slow`. One launch for each set.
"""

from collections.abc import Callable
from functools import cache

import dist_tiny
import pytest
from dist_launch import launch_ranks, read_json

REST = pytest.mark.slow
DTYPES = ("float32", "bfloat16")
STAGES = [pytest.param(zero, marks=REST) if zero < 2 else zero for zero in range(4)]
PARITY = [
    pytest.param(case, zero, marks=REST if zero < 2 else ())
    for case in ("mixed", "split", "frozen")
    for zero in range(4)
]
PARITY.append(pytest.param("whole", 3))
ENGINES = [
    pytest.param(zero, dtype, "", marks=() if (zero, dtype) in ((2, "bfloat16"), (3, "float32")) else REST)
    for zero in range(4)
    for dtype in DTYPES
]
ENGINES += [pytest.param(*case, marks=REST) for case in ((3, "float32", "whole"), (2, "float32", "offload"))]
ENGINES.append(pytest.param(3, "float32", "offload"))


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict]]:
    work = tmp_path_factory.mktemp("zero")
    dist_tiny.prepare(work, samples=60)

    @cache
    def launch(part: str) -> list[dict]:
        launch_ranks("ranks_zero.py", work, part)
        return read_json(work / f"zero-{part}.json")

    return launch


@pytest.fixture
def records(request: pytest.FixtureRequest, launched: Callable[[str], list[dict]]) -> list[dict]:
    """What the launch that the test's case belongs to has found."""
    return launched("core" if request.node.get_closest_marker("slow") is None else "rest")


def find(records: list[dict], **wanted: object) -> dict:
    (record,) = [r for r in records if wanted.items() <= r.items()]
    return record


@pytest.mark.parametrize(("case", "zero"), PARITY)
def test_T1_gradients_equal_one_process_under_accumulation(records, case, zero):
    """`split`: text only on rank 0, images only on rank 1. Persistence threshold 0 at ZeRO-3, except in `whole`."""
    record = find(records, case=case, zero=zero)
    assert record["same_names"]
    assert record["worst_gradient"] <= 1e-6
    assert record["applied"]


@pytest.mark.parametrize(("case", "zero"), PARITY)
def test_reported_norm_is_that_before_clipping_and_the_step_is_the_clipped_one(records, case, zero):
    record = find(records, case=case, zero=zero)
    got, want = record["norm"]
    assert got == pytest.approx(want, rel=1e-5)
    assert want > 10 * 0.05, "the clip must be active"
    # Adam divides by the gradient's own size, which magnifies rounding where a gradient is tiny.
    assert record["worst_weight"] <= 1e-4
    assert record["frozen_moved"] == []


@pytest.mark.parametrize(("zero", "dtype", "layout"), ENGINES)
def test_state_moved_into_a_new_engine_continues_bit_for_bit(records, zero, dtype, layout):
    record = find(records, case="resume", zero=zero, dtype=dtype, layout=layout)
    assert record["steps"] == 2
    assert record["moved"]
    assert record["weights"]
    assert record["state"]


@pytest.mark.parametrize(("zero", "dtype", "layout"), ENGINES)
def test_T4_discarded_micro_batches_and_nonfinite_gradients_change_nothing(records, zero, dtype, layout):
    record = find(records, case="nonfinite", zero=zero, dtype=dtype, layout=layout)
    assert record["discard_leaves_no_trace"]
    assert record["applied"] == [True, False]
    assert record["unchanged"]


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_T1_parameters_without_signal_decay_only_if_asked_to(records, zero, dtype):
    record = find(records, case="idle_decay", zero=zero, dtype=dtype)
    assert record["image_heads_decayed"] == ["lm_img_head.0.weight"]
    assert record["image_heads_kept"]
    assert record["text_agrees"] <= (1e-6 if dtype == "float32" else 1e-2)


def test_M4_buffers_keep_dtype_and_bits_under_zero_init_in_bf16(records):
    record = find(records, case="buffers")
    assert record["parameters"] == ["torch.bfloat16"]
    assert record["dtypes"] == ["channel_mask:torch.bfloat16", "expert_bias:torch.float32"]
    assert record["equal"]


def test_M4_near_ties_between_experts_are_decided_by_the_fp32_bias(records):
    record = find(records, case="buffers")
    assert record["rounding_would_tie"]
    assert record["chosen"] == [[[6, 7]], [[6, 7]]]


@pytest.mark.parametrize("zero", (2, 3))
def test_T1_a_module_that_one_rank_skips_is_named(records, zero):
    message = find(records, case="participation", zero=zero, fault="skip")["message"]
    assert "rank 0 calls lm_img_head.0 (weight); rank 1 calls model.img_embeddings.0 (weight)" in message


@pytest.mark.parametrize("zero", (2, 3))
def test_T1_parameters_without_gradient_on_one_rank_are_named(records, zero):
    message = find(records, case="participation", zero=zero, fault="detach")["message"]
    assert "rank 0 lacks lm_img_head.0.weight, lm_img_head.1.weight" in message
    assert "rank 1" not in message
