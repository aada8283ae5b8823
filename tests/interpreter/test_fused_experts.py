"""Triton kernels of the routed experts against the reference in float64 (M5)."""

import expert_cases as cases
import pytest
import torch
from parity import assert_close, assert_parity, outputs_and_gradients, sparse_zeros

from lumina_ft.kernels import Experts, Projection, eager_experts
from lumina_ft.kernels.launch import Launch, record_launches
from lumina_ft.kernels.moe import fused, fused_forward
from lumina_ft.kernels.moe.fused import fused_experts, fused_mlp, fused_unsupported_reason
from lumina_ft.kernels.moe.fused_backward import Needs, backward_pass
from lumina_ft.kernels.moe.fused_forward import RoutedRows, forward_pass
from lumina_ft.kernels.tiles import Tile

SIZES = [
    pytest.param({"tokens": 37, "experts": 5}, id="ragged, several tiles an expert"),
    pytest.param({"tokens": 1, "experts": 6, "top_k": 3, "hidden": 16, "width": 16}, id="one token"),
    pytest.param({"tokens": 13, "experts": 7, "top_k": 3, "hidden": 80, "width": 48}, id="sizes that no tile divides"),
    pytest.param({"tokens": 33, "experts": 17, "top_k": 1, "busy": 1}, id="one expert has all rows"),
]


@pytest.mark.parametrize("sizes", SIZES)
def test_float32_equals_float64(sizes):
    inputs = cases.expert_inputs(**sizes)
    assert_parity(cases.kernel(), cases.reference(), inputs, cases.floating(inputs))


def test_bfloat16_is_as_near_to_float64_as_torch():
    inputs = cases.expert_inputs(tokens=37, hidden=64, width=48, dtype=torch.bfloat16)
    assert_parity(cases.kernel(), cases.reference(), inputs, cases.floating(inputs))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [{"tokens": 131, "experts": 11, "top_k": 4, "hidden": 144, "width": 80}])
def test_larger_layers(sizes, dtype):
    inputs = cases.expert_inputs(**sizes, dtype=dtype)
    assert_parity(cases.kernel(), cases.reference(), inputs, cases.floating(inputs))


@pytest.mark.slow
def test_512_experts_most_without_rows():
    inputs = cases.expert_inputs(tokens=23, experts=512, top_k=8, hidden=32, width=16)
    assert_parity(cases.kernel(), cases.reference(), inputs, cases.floating(inputs))


def test_sorted_rows_of_other_ranks():
    inputs = cases.expert_inputs(tokens=37, top_k=1)
    inputs["topk_idx"] = inputs["topk_idx"].sort(dim=0).values
    assert_parity(cases.sorted_rows(), cases.reference(), inputs, cases.floating(inputs))


def test_no_rows_at_all():
    inputs = cases.expert_inputs(tokens=0)
    got = outputs_and_gradients(cases.kernel(), inputs, cases.floating(inputs), torch.empty(0, 48))
    assert got.pop("out").shape == got.pop("grad x").shape == (0, 48)
    assert got.pop("grad topk_weight").shape == (0, 2)
    assert set(got) == {"grad gate", "grad up", "grad down"} and all((grad == 0).all() for grad in got.values())
    experts = cases.experts_of(inputs, 0.0)
    empty = fused_mlp(torch.empty(0, 48), experts, torch.empty(0, 1), torch.zeros(4, dtype=torch.int32))
    assert empty.shape == (0, 48)


def test_an_expert_without_rows_gets_zero_gradients():
    inputs = cases.expert_inputs(ranks=(3, 3, 3))
    upstream = torch.randn(19, 48, generator=torch.Generator().manual_seed(1))
    for name, grad in outputs_and_gradients(cases.kernel(), inputs, cases.floating(inputs), upstream).items():
        if name.removeprefix("grad ").startswith(cases.NAMES):
            assert (grad[-1] == 0).all() and (grad[0] != 0).any(), name


def test_two_runs_give_the_same_bits():
    inputs = cases.expert_inputs(ranks=(3, 0, 5))
    upstream = torch.randn(19, 48, generator=torch.Generator().manual_seed(1))
    runs = [outputs_and_gradients(cases.kernel(0.3), inputs, cases.floating(inputs), upstream) for _ in range(2)]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_a_token_without_finite_inputs_spoils_no_other():
    inputs = cases.expert_inputs(tokens=19)
    clean = cases.kernel()(**inputs)
    inputs["x"][-1] = torch.nan
    spoiled = cases.kernel()(**inputs)
    assert spoiled[-1].isnan().all() and torch.equal(spoiled[:-1], clean[:-1])


def test_offsets_beyond_int32(monkeypatch):
    # One tensor of more than 2**32 elements is all three matrices of every expert; the last expert's are written. An
    # offset in int32 would come back to the first expert's, which are zero.
    large = Tile({"BLOCK_M": 16, "BLOCK_N": 1024, "BLOCK_K": 1024, "BLOCK_T": 16}, 4, 1)
    for module in ("fused_forward", "fused_backward"):
        monkeypatch.setattr(f"lumina_ft.kernels.moe.{module}.tile_for", lambda *_: large)
    experts, size = 257, 4096
    matrices = sparse_zeros((experts, size, size), torch.float32)
    assert (experts - 1) * size * size == 2**32
    gen = torch.Generator().manual_seed(2)
    last = torch.randn(size, size, generator=gen) * size**-0.5
    matrices[-1] = last
    x, upstream = torch.randn(2, 1, size, generator=gen)

    def run(function, x, matrices):
        leaf = x.clone().requires_grad_()
        chosen = torch.tensor([[matrices.shape[0] - 1]])
        out = function(leaf, Experts(*[Projection(matrices)] * 3), chosen, torch.ones(1, 1))
        out.backward(upstream.to(out.dtype))
        return {"out": out.detach(), "grad x": leaf.grad}

    want = run(eager_experts, x.double(), last.double().unsqueeze(0))
    assert_close(run(fused_experts, x, matrices), want)


def recorded(needs: Needs, *, ranks=(0, 0, 0), order=True) -> list[Launch]:
    """Launches of one forward and backward pass on tensors without data."""
    inputs = {
        name: None if value is None else value.to("meta") for name, value in cases.expert_inputs(ranks=ranks).items()
    }
    experts, keys = cases.experts_of(inputs, 0.5), inputs["keys"].view(-1)
    slots, x = torch.empty_like(keys), inputs["x"] if order else inputs["x"].new_empty(38, 48)
    rows = RoutedRows(keys.new_empty(4, dtype=torch.int32), x.new_empty(38), keys, slots, slots.view(19, 2))
    rows = rows if order else rows._replace(order=None, inverse=None)
    with record_launches("interpreter") as launches:
        forward = forward_pass(x, rows, experts, save=True)
        backward_pass(torch.empty_like(forward.out), x, rows, experts, forward, needs)
    return launches


def names(launches: list[Launch]) -> set[str]:
    return {launch.name for launch in launches} - {"moe_tiles"}


NOTHING = Needs(*[False] * 11)
FORWARD = {"moe_gate_up", "moe_down", "moe_combine"}


@pytest.mark.parametrize(
    ("needed", "ranks", "more"),
    [
        ({}, (0, 0, 0), set()),
        ({"x"}, (0, 0, 0), {"moe_hidden_grad", "moe_input_grad"}),
        ({"weight"}, (0, 0, 0), {"moe_hidden_grad"}),
        ({"down"}, (0, 0, 0), {"moe_hidden_grad", "moe_weight_grad"}),
        ({"gate", "x"}, (0, 0, 0), {"moe_hidden_grad", "moe_input_grad", "moe_weight_grad"}),
        ({"down_b"}, (0, 0, 4), {"moe_shrink", "moe_rank_grad"}),
        ({"gate_a", "gate_b"}, (4, 0, 0), {"moe_shrink", "moe_hidden_grad", "moe_rank_grad"}),
    ],
)
def test_only_needed_gradients_are_computed(needed, ranks, more):
    launches = recorded(NOTHING._replace(**dict.fromkeys(needed, True)), ranks=ranks)
    assert names(launches) == FORWARD | more


def test_rows_sorted_already_are_not_combined():
    assert names(recorded(NOTHING._replace(x=True), order=False)) == {
        "moe_gate_up", "moe_down", "moe_hidden_grad", "moe_input_grad",
    }  # fmt: skip


@pytest.mark.parametrize("recording", [True, False])
def test_what_backward_needs_is_kept_only_for_gradients(recording, monkeypatch):
    results = []
    monkeypatch.setattr(fused, "forward_pass", lambda *a, **k: results.append(forward_pass(*a, **k)) or results[-1])
    inputs = cases.expert_inputs(tokens=3)
    inputs["x"].requires_grad_()
    with torch.set_grad_enabled(recording):
        cases.kernel()(**inputs)
    assert results[0].gate.shape == results[0].up.shape == (6 if recording else 0, 32)


def test_tile_lists_cover_every_row_once():
    counts = torch.tensor([0, 1, 16, 17, 0, 33, 0])
    ends = counts.cumsum(0).to(torch.int32)
    rows = RoutedRows(ends, torch.empty(int(counts.sum())), None, None, None)
    for height in (16, 32):
        expert, first = fused_forward.Tiles(rows).of(height)
        want = [
            (number, int(end - count) + start)
            for number, (end, count) in enumerate(zip(ends, counts, strict=True))
            for start in range(0, int(count), height)
        ]
        got = list(zip(expert.tolist(), first.tolist(), strict=True))
        assert got[: len(want)] == want and {number for number, _ in got[len(want) :]} <= {-1}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((2048, 512, torch.bfloat16, 256), None),
        ((16, 16, torch.float32, 512), None),
        ((24, 16, torch.float32, 4), "hidden_size=24 is not a multiple of 16"),
        ((16, 24, torch.float32, 4), "moe_intermediate_size=24 is not a multiple of 16"),
        ((16, 16, torch.float16, 4), "no torch.float16"),
        ((16, 16, torch.float32, 513), "513 experts are more than the 512"),
    ],
)
def test_what_is_not_supported_is_named(arguments, text):
    reason = fused_unsupported_reason(*arguments)
    assert reason is None if text is None else text in reason
