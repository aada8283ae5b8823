"""Adapters of routed experts inside the Triton kernels, and their dropout (M5)."""

import expert_cases as cases
import pytest
import torch
from parity import assert_parity

from lumina_ft.kernels import Lora, row_keys
from lumina_ft.kernels.moe.dropout import drop_
from lumina_ft.kernels.moe.fused_forward import RoutedRows, Tiles, rank_sizes, shrink

ADAPTERS = ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")


def adapters(inputs):
    """What is trained with a frozen base: adapters, and what comes before the layer."""
    return tuple(name for name in ("x", "topk_weight", *ADAPTERS) if inputs[name] is not None)


@pytest.mark.parametrize(
    ("ranks", "dropout"),
    [
        pytest.param((16, 3, 1), 0.4, id="aligned and odd ranks, dropout"),
        pytest.param((0, 0, 17), 0.0, id="down alone"),
        pytest.param((0, 80, 0), 0.4, id="up alone, wider than the layer and than a block"),
    ],
)
def test_frozen_base(ranks, dropout):
    inputs = cases.expert_inputs(ranks=ranks)
    assert_parity(cases.kernel(dropout), cases.reference(dropout), inputs, adapters(inputs))


def test_bfloat16_is_as_near_to_float64_as_torch():
    inputs = cases.expert_inputs(ranks=(4, 16, 3), dtype=torch.bfloat16)
    assert_parity(cases.kernel(0.25), cases.reference(0.25), inputs, adapters(inputs))


def test_sorted_rows_of_other_ranks():
    inputs = cases.expert_inputs(top_k=1, ranks=(3, 4, 5))
    inputs["topk_idx"] = inputs["topk_idx"].sort(dim=0).values
    assert_parity(cases.sorted_rows(0.25), cases.reference(0.25), inputs, adapters(inputs))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("ranks", [(4, 4, 4), (1, 3, 6), (64, 65, 128), (9, 0, 0)])
def test_everything_trained(ranks, dropout, dtype):
    inputs = cases.expert_inputs(tokens=37, experts=5, hidden=80, width=48, ranks=ranks, dtype=dtype)
    assert_parity(cases.kernel(dropout), cases.reference(dropout), inputs, cases.floating(inputs))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tokens": 1, "experts": 6, "top_k": 3}, {"tokens": 13, "experts": 17, "top_k": 1}])
def test_ragged_groups(sizes):
    inputs = cases.expert_inputs(**sizes, ranks=(3, 4, 5))
    assert_parity(cases.kernel(0.25), cases.reference(0.25), inputs, cases.floating(inputs))


@pytest.mark.parametrize("probability", [1e-12, 0.05, 0.5, 0.75, 1 - 1e-6, 1 - 1e-12])
@pytest.mark.parametrize("stream", [0, 2])
def test_the_same_inputs_are_dropped_as_by_the_reference(probability, stream):
    tokens, features = 21, 48
    keys = row_keys(2**61 + 12345, tokens, 1, torch.device("cpu"))
    keys[0] = -keys[0]
    want = drop_(torch.ones(tokens, features), keys, probability, stream)
    # A is the identity: what is left of a row of ones shows which of its entries were kept.
    lora = Lora(torch.eye(features).unsqueeze(0), torch.empty(1, 16, features), 1.0 - probability, probability, stream)
    offsets = torch.tensor([tokens], dtype=torch.int32)
    rows = RoutedRows(offsets, torch.ones(tokens), keys.view(-1), None, None)
    got = shrink(torch.ones(tokens, features), rows, Tiles(rows), lora, gather=True)
    assert torch.equal(got[:, :features], want)
    assert (got[:, features:] == 0).all()


@pytest.mark.parametrize(
    ("rank", "sizes"),
    [(1, (16, 16)), (16, (16, 16)), (17, (32, 32)), (64, (64, 64)), (65, (128, 64)), (160, (192, 64))],
)
def test_ranks_are_rounded_up(rank, sizes):
    assert rank_sizes(rank) == sizes


def test_an_adapter_of_zeros_changes_no_bit():
    inputs = cases.expert_inputs(ranks=(3, 4, 8))
    plain = {name: None if name in ADAPTERS else value for name, value in inputs.items()}
    for name in ADAPTERS[1::2]:
        inputs[name].zero_()
    assert torch.equal(cases.kernel(0.5)(**inputs), cases.kernel(0.5)(**plain))
