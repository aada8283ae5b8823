"""The whole model on Triton kernels: golden hidden states, every gradient, and inputs that are refused (T7, M5)."""

import copy
from typing import Any

import pytest
import torch
from golden_sets import GOLDEN, GoldenSet
from parity import relative_error
from torch import Tensor

from lumina_ft.errors import ConfigError, DataError
from lumina_ft.models import experts as experts_module
from lumina_ft.models.experts import PROJECTIONS, PackedExperts
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config, kernels_for
from lumina_ft.parallel.expert_parallel import ExpertParallel

HIDDEN_TOLERANCE = 5e-5
"""Absolute, of hidden states (golden README)."""
GRADIENT_TOLERANCE = 1e-5
"""Relative to float64, through two layers in float32."""


def config() -> U2Config:
    """Text only; sizes that the kernels take, few enough to interpret."""
    return U2Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        pad_token_id=39,
    )


def model() -> U2ForDiffusion:
    """Random weights, and adapters on the routed experts that don't start at zero."""
    made = U2ForDiffusion(config(), kernels="triton").train()
    made.init_weights_(0)
    gen = torch.Generator().manual_seed(1)
    for module in made.modules():
        if isinstance(module, PackedExperts):
            for projection in PROJECTIONS:
                module.add_lora(projection, rank=3, scale=0.5, dropout=0.0)
                for part in "AB":
                    param = module.get_parameter(f"{projection}_lora_{part}")
                    param.data.copy_(0.2 * torch.randn(param.shape, generator=gen))
    return made


def pack() -> dict[str, Tensor]:
    """Two question-and-answer samples of unequal length with blocks of four, and a padding tail."""
    answers, questions, tail = (6, 11), (5, 4), 3
    types, turns, blocks, clean, valid, bounds = [], [], [], [], [], [0]
    for question, answer in zip(questions, answers, strict=True):
        types += [1] * question + [3] * answer
        turns += [0] * question + [1] * answer
        blocks += [-1] * question + [i // 4 for i in range(answer)]
        clean += [True] * question + [i % 8 < 4 for i in range(answer)]
        bounds.append(len(types))
    valid = [True] * len(types) + [False] * tail
    types, turns, blocks, clean = types + [0] * tail, turns + [0] * tail, blocks + [-1] * tail, clean + [False] * tail
    gen = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 38, (len(types),), generator=gen)
    supervised = (torch.tensor(types) == 3) & ~torch.tensor(clean)
    return {
        "input_ids": ids,
        "type_ids": torch.tensor(types),
        "turn_ids": torch.tensor(turns),
        "block_ids": torch.tensor(blocks),
        "is_clean": torch.tensor(clean),
        "cu_seqlens": torch.tensor(bounds),
        "valid": torch.tensor(valid),
        "labels": torch.where(supervised, (ids + 1) % 38, -100),
    }


def passes(made: U2ForDiffusion, inputs: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """Output, and the gradient of every parameter, of the sum of all losses."""
    made.zero_grad()
    out = made(**inputs)
    sum(loss.total / loss.count for loss in out.losses.values()).backward()
    return out, {name: p.grad for name, p in made.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["A", "B"])
def test_golden_hidden_states_match(name: str) -> None:
    golden = GoldenSet(GOLDEN / name)
    inputs, stored = golden.inputs("backbone"), golden.tensors("backbone")
    with torch.no_grad():
        out = golden.model("triton")(**inputs)
    assert out.attention == "tiled"
    rows = inputs["valid"].flatten().bool()
    assert float((out.hidden[rows] - stored["hidden_states"][0, rows]).abs().max()) <= HIDDEN_TOLERANCE
    assert bool(out.hidden.isfinite().all())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["A", "B"])
def test_golden_gradients_equal_those_of_torch_kernels(name: str) -> None:
    """Those are tied to the published ones by the parity tests."""
    golden = GoldenSet(GOLDEN / name)
    inputs = golden.inputs("forward")
    _, want = passes(golden.model("torch").train(), inputs)
    out, got = passes(golden.model("triton").train(), inputs)
    assert out.attention == "tiled" and got.keys() == want.keys()
    norm = max(float(grad.norm()) for grad in want.values())
    for parameter, grad in want.items():
        if float(grad.norm()) <= 1e-6 * norm:
            assert float(got[parameter].norm()) <= 1e-5 * norm, parameter
        else:
            assert relative_error(got[parameter], grad) <= GRADIENT_TOLERANCE, parameter


def test_every_gradient_equals_the_reference_in_float64() -> None:
    fused, inputs = model(), pack()
    exact = copy.deepcopy(fused).double()
    exact.set_kernels("eager")
    reference, want = passes(exact, inputs)
    out, got = passes(fused, inputs)
    assert (out.attention, reference.attention) == ("tiled", "dense")
    assert torch.equal(out.router_topk[0], reference.router_topk[0])
    assert got.keys() == want.keys() == {name for name, _ in fused.named_parameters()}
    assert any("lora_A" in name for name in got)
    for name, grad in want.items():
        assert relative_error(got[name], grad) <= GRADIENT_TOLERANCE, name


@pytest.mark.slow
def test_checkpointing_repeats_every_gradient_bit_for_bit() -> None:
    fused, inputs = model(), pack()
    _, want = passes(fused, inputs)
    fused.gradient_checkpointing_enable()
    _, got = passes(fused, inputs)
    assert all(torch.equal(got[name], grad) for name, grad in want.items())


def test_padding_tokens_reach_nobody() -> None:
    fused, inputs = model().eval(), pack()
    changed = inputs | {"input_ids": torch.where(inputs["valid"], inputs["input_ids"], 7)}
    with torch.no_grad():
        before, after = fused(**inputs), fused(**changed)
    assert torch.equal(before.hidden[inputs["valid"]], after.hidden[inputs["valid"]])
    assert torch.equal(before.losses["text"].total, after.losses["text"].total)


def test_t7_what_only_the_reference_serves_is_refused_by_name() -> None:
    fused, inputs = model().eval(), pack()
    bare = {name: inputs[name] for name in ("input_ids", "type_ids")}
    tokens = inputs["type_ids"].numel()
    with pytest.raises(DataError, match=f"cu_seqlens — missing — model.kernels=triton .* pass \\[0, {tokens}\\]"):
        fused(**bare)
    with pytest.raises(
        DataError, match="allowed — an explicit mask — model.kernels=triton serves the packing rule only"
    ):
        fused(**bare, allowed=torch.ones(tokens, tokens, dtype=torch.bool))
    message = "model.kernels — triton — Triton's interpreter computes torch.bfloat16 wrongly — use auto or torch"
    with pytest.raises(ConfigError, match=message):
        fused.bfloat16()(**inputs)


def test_experts_of_an_expert_parallel_rank_run_on_rows_that_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of one, whose exchanges bring back what was sent."""
    monkeypatch.setattr(experts_module, "exchange_counts", lambda counts, ranks: counts.view(ranks.size, -1))
    monkeypatch.setattr(experts_module, "exchange_rows", lambda rows, send, receive, ranks: rows)
    monkeypatch.setattr(experts_module, "draw_key", lambda: 11)
    nobody: Any = None
    gen = torch.Generator().manual_seed(4)
    weight, index = torch.rand(11, 8, generator=gen).topk(2, dim=-1)
    x, upstream = torch.randn(2, 11, 32, generator=gen)
    results = []
    for choice, place in (("torch", None), ("triton", ExpertParallel(1, 0, "ep_size_1", nobody, nobody))):
        layer = PackedExperts(config(), kernels_for(config(), choice, spread=place is not None), place)
        gen.manual_seed(5)
        layer.add_lora("gate_proj", rank=2, scale=0.5, dropout=0.4)
        for param in layer.parameters():
            param.data.copy_(0.2 * torch.randn(param.shape, generator=gen))
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = layer(leaves[0], index, leaves[1])
        out.backward(upstream)
        grads = [leaf.grad for leaf in (*leaves, *layer.parameters())]
        results.append([out.detach(), *grads])
    for want, got in zip(*results, strict=True):
        assert relative_error(got, want) <= 1e-6
