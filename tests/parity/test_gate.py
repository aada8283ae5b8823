"""Parity of the router (M1-M3)."""

import pytest
import torch

from lumina_ft.kernels import route


@pytest.mark.parametrize("prefix", ["", "nobias_"])
def test_router_matches(golden, prefix):
    stored, config = golden.tensors("gate"), golden.model().config
    got = route(
        stored["hidden"],
        stored["weight"],
        None if prefix else stored["expert_bias"],
        num_groups=config.n_group,
        kept_groups=config.topk_group,
        top_k=config.num_experts_per_tok,
        scaling=config.routed_scaling_factor,
    )
    assert torch.equal(got.topk_idx, stored[prefix + "topk_idx"])
    torch.testing.assert_close(got.topk_weight, stored[prefix + "topk_weight"], rtol=0, atol=1e-5)
    torch.testing.assert_close(got.logits, stored[prefix + "logits"], rtol=0, atol=5e-5)


def test_router_of_the_loaded_model_uses_the_stored_bias(golden):
    stored, router = golden.tensors("gate"), golden.model().model.layers[1].mlp.gate
    assert torch.equal(router.expert_bias, stored["expert_bias"])
    got = router(stored["hidden"])
    assert torch.equal(got.topk_idx, stored["topk_idx"])
    torch.testing.assert_close(got.topk_weight, stored["topk_weight"], rtol=0, atol=1e-5)


def test_bias_changes_the_selection_but_not_the_weights(golden):
    stored = golden.tensors("gate")
    moved = (stored["topk_idx"] != stored["nobias_topk_idx"]).any(-1)
    assert moved.any()
    scaling = golden.model().config.routed_scaling_factor
    torch.testing.assert_close(stored["topk_weight"].sum(-1), torch.full((moved.numel(),), scaling))
