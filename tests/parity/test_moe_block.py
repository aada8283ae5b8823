"""Parity of the MoE block, the dense MLP, the balance loss and the expert counters (M5-M8, T5)."""

import pytest
import torch

from lumina_ft.models.losses import balance_per_layer, count_experts


@pytest.mark.parametrize("kernels", ["torch", "eager"])
@pytest.mark.parametrize("recorded", [True, False], ids=["loop", "buckets"])
def test_block_matches(golden, assert_close, kernels, recorded):
    stored = golden.tensors("moe_block")
    block = golden.model(kernels).model.layers[1].mlp
    with torch.set_grad_enabled(recorded):
        out, logits, topk = block(stored["input"].flatten(0, 1))
    assert_close(out, stored["output"].flatten(0, 1))
    assert_close(logits, stored["router_logits"].flatten(0, 1))
    assert torch.equal(topk, stored["topk_idx"].flatten(0, 1))


def test_dense_mlp_of_layer_0_matches(golden, assert_close):
    stored = golden.tensors("moe_block")
    assert_close(golden.model().model.layers[0].mlp(stored["input"]), stored["dense_mlp_layer0_output"])


def test_balance_loss_matches(golden):
    stored = golden.tensors("moe_block")
    logits, topk = stored["router_logits"].flatten(0, 1), stored["topk_idx"].flatten(0, 1)
    everything = torch.ones(logits.shape[0], dtype=torch.bool)
    got = balance_per_layer([logits], [topk], everything)
    torch.testing.assert_close(got, stored["balance_loss"], rtol=0, atol=1e-6)
    best = logits.argmax(-1, keepdim=True)
    got = balance_per_layer([logits], [best], everything)
    torch.testing.assert_close(got, stored["balance_loss_without_idx"], rtol=0, atol=1e-6)


def test_counters_match_with_padding_counted(golden, published_masked_rows):
    stored = golden.tensors("moe_block")
    model = golden.model("eager")
    inputs = golden.inputs("moe_block", "tracking_input.")
    out = model(**inputs)
    everything = torch.ones(out.hidden.shape[0], dtype=torch.bool)
    got = count_experts(out.router_topk, everything, model.config.num_experts)
    dense_layers = model.config.first_k_dense_replace
    assert torch.equal(got, stored["tracking_counts_after_one_forward"][dense_layers:])


def test_surprise_14_counters_are_per_forward_and_unchanged_by_checkpointing(golden):
    stored = golden.tensors("moe_block")
    assert torch.equal(stored["tracking_counts_after_two_forwards"], 2 * stored["tracking_counts_after_one_forward"])
    model, inputs = golden.model(), golden.inputs("moe_block", "tracking_input.")
    first = model(**inputs)
    model.gradient_checkpointing_enable()
    second = model(**inputs)
    second.hidden.sum().backward()
    assert torch.equal(first.expert_counts, second.expert_counts)
    valid = int(inputs["valid"].sum())
    assert (first.expert_counts.sum(1) == valid * model.config.num_experts_per_tok).all()


def test_surprise_12_experts_keep_gradients_in_eval_mode(golden):
    stored = golden.tensors("moe_block")
    for kernels in ("torch", "eager"):
        block = golden.model(kernels).eval().model.layers[1].mlp
        block(stored["input"].flatten(0, 1))[0].square().sum().backward()
        used = stored["topk_idx"].unique()
        for weight in (block.experts.gate_proj, block.experts.up_proj, block.experts.down_proj):
            assert (weight.grad[used].flatten(1).norm(dim=1) > 0).all()
