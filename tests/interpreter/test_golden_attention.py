"""Golden attention layouts through the Triton kernels: equal to dense attention on valid rows (T6, T7)."""

from pathlib import Path

import pytest
import torch
from attention_cases import attention_inputs, kernel, reference, starts_of
from parity import assert_close, assert_parity
from safetensors.torch import load_file
from torch import Tensor

from lumina_ft.kernels.attention.tile_plan import TilePlan, plan_causal, plan_tiles

GOLDEN = Path(__file__).parents[1] / "golden"
HEADS, HEAD_DIM = {"A": (4, 2), "B": (4, 4)}, 16
METADATA = ("turn_ids", "block_ids", "is_clean")
STORED = {"type_position_ids": "type_ids", "attention_mask": "valid"}
FAST = ("mixed_pack_tail",)
OTHERS = (
    "block_ids_all_negative",
    "inner_padding",
    "random_metadata_0",
    "segments_only",
    "text_multi_turn",
    "t2i",
    "understand",
    "edit",
    "edit_multi_turn",
    "legacy_no_block_ids",
    "turn_ids_without_is_clean",
    "is_clean_without_turn_ids",
    "short_metadata",
    "long_metadata",
    "cu_shorter_but_valid_tail",
    "cu_longer_than_sequence",
    "random_metadata_1",
)


def layout(golden: str, name: str) -> tuple[TilePlan, Tensor]:
    """Plan and stored mask. Malformed metadata is spelled out as the published code reads it: cut, or filled with 0."""
    stored = load_file(GOLDEN / golden / "attention_mask.safetensors")
    given = {k.removeprefix(f"{name}."): v.flatten() for k, v in stored.items() if k.startswith(f"{name}.")}
    given = {STORED.get(key, key): value for key, value in given.items()}
    allowed = stored[f"{name}.allowed"]
    tokens = allowed.shape[0]
    columns = {}
    for key in METADATA:
        columns[key] = torch.full((tokens,), -1 if key == "block_ids" else 0)
        if key in given:
            value = given[key][:tokens].long()
            columns[key] = torch.cat((value, value.new_zeros(tokens - value.numel())))
    bounds = given["cu_seqlens"].tolist()
    if name in ("cu_shorter_but_valid_tail", "cu_longer_than_sequence"):
        bounds[-1] = tokens
    lengths = [end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
    plan = plan_tiles(
        starts_of(lengths),
        lengths,
        type_ids=given["type_ids"].long(),
        **(columns | {"is_clean": columns["is_clean"].bool()}),
        valid=given["valid"].bool(),
        has_metadata="turn_ids" in given or "is_clean" in given,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        heads_per_key=HEADS[golden][0] // HEADS[golden][1],
    )
    return plan, allowed


@pytest.mark.parametrize("golden", ["A", "B"])
@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_golden_layout(golden, name):
    plan, allowed = layout(golden, name)
    check(plan, allowed, golden)


@pytest.mark.slow
@pytest.mark.parametrize("golden", ["A", "B"])
def test_every_gradient_of_a_pack_with_a_tail(golden):
    plan, allowed = layout(golden, "mixed_pack_tail")
    inputs = attention_inputs(allowed.shape[0], HEADS[golden], HEAD_DIM)
    assert_parity(kernel(plan), reference(allowed), inputs, ("q", "k", "v"))


@pytest.mark.parametrize("golden", ["A", "B"])
def test_the_causal_layout_of_a_mask_without_bounds(golden):
    """The published code turns causal there; the same mask is what the causal plan computes on valid rows."""
    stored = load_file(GOLDEN / golden / "attention_mask.safetensors")
    valid = stored["no_cu_with_zeros.attention_mask"].flatten().bool()
    tokens = valid.numel()
    sizes = {"head_dim": HEAD_DIM, "dtype": torch.float32, "heads_per_key": HEADS[golden][0] // HEADS[golden][1]}
    plan = plan_causal([0], [tokens], valid=valid, **sizes)
    check(plan, stored["no_cu_with_zeros.allowed"] & valid.unsqueeze(1), golden)


def check(plan: TilePlan, allowed: Tensor, golden: str) -> None:
    """The kernel's output against float64 under the stored mask."""
    inputs = attention_inputs(allowed.shape[0], HEADS[golden], HEAD_DIM)
    exact = reference(allowed)(**{name: value.double() for name, value in inputs.items() if value is not None})
    with torch.no_grad():
        assert_close({"out": kernel(plan)(**inputs)}, {"out": exact})
