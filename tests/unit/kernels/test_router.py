"""Router rules M1-M3 by brute force, and its behaviour in bfloat16."""

import pytest
import torch

from lumina_ft.kernels import route
from lumina_ft.kernels.router.ref import select_experts

TOKENS, HIDDEN, EXPERTS = 40, 16, 12


@pytest.fixture
def tensors():
    gen = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=gen)
    weight = torch.randn(EXPERTS, HIDDEN, generator=gen) * 0.3
    bias = torch.randn(EXPERTS, generator=gen) * 0.3
    return hidden, weight, bias


def by_hand(biased, *, groups, kept, top_k):
    """One token at a time, with sorted lists."""
    size = biased.shape[1] // groups
    rows = []
    for scores in biased.tolist():
        group_scores = [sum(sorted(scores[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        best = sorted(range(groups), key=lambda g: -group_scores[g])[:kept]
        eligible = [e for e in range(len(scores)) if e // size in best]
        rows.append(sorted(eligible, key=lambda e: -scores[e])[:top_k])
    return torch.tensor(rows)


@pytest.mark.parametrize(("groups", "kept", "top_k"), [(4, 2, 3), (3, 1, 4), (2, 2, 5), (1, 1, 12)])
def test_m2_selection_equals_the_rule_by_hand(tensors, groups, kept, top_k):
    hidden, weight, bias = tensors
    biased = (hidden @ weight.t()).sigmoid() + bias
    got = select_experts(biased, num_groups=groups, kept_groups=kept, top_k=top_k)
    assert torch.equal(got, by_hand(biased, groups=groups, kept=kept, top_k=top_k))


def test_m1_m3_weights_are_unbiased_sigmoids_normalised_and_scaled(tensors):
    hidden, weight, bias = tensors
    got = route(hidden, weight, bias, num_groups=4, kept_groups=2, top_k=3, scaling=2.5)
    scores = torch.sigmoid(hidden @ weight.t())
    for token in range(TOKENS):
        chosen = scores[token, got.topk_idx[token]]
        torch.testing.assert_close(got.topk_weight[token], 2.5 * chosen / chosen.sum())
    torch.testing.assert_close(got.logits, hidden @ weight.t())


def test_m4_bias_selects_and_gets_no_gradient(tensors):
    hidden, weight, bias = tensors
    weight.requires_grad_()
    bias = bias.requires_grad_()
    settings = {"num_groups": 4, "kept_groups": 2, "top_k": 3, "scaling": 2.5}
    got = route(hidden, weight, bias, **settings)
    assert not torch.equal(got.topk_idx, route(hidden, weight, None, **settings).topk_idx)
    got.topk_weight.square().sum().backward()
    assert bias.grad is None
    assert weight.grad.norm() > 0


def test_negative_scores_never_pick_a_dropped_group():
    """A dropped group filled with 0 would beat experts with a negative biased score."""
    biased = torch.tensor([[-0.2, -0.3, -0.9, -0.8]])
    got = select_experts(biased, num_groups=2, kept_groups=1, top_k=2)
    assert got.tolist() == [[0, 1]]


def test_bfloat16_inputs_are_routed_in_float32(tensors):
    hidden, weight, bias = tensors
    settings = {"num_groups": 4, "kept_groups": 2, "top_k": 3, "scaling": 2.5}
    half = route(hidden.bfloat16(), weight.bfloat16(), bias, **settings)
    same = route(hidden.bfloat16().float(), weight.bfloat16().float(), bias, **settings)
    assert half.logits.dtype == half.topk_weight.dtype == torch.float32
    assert torch.equal(half.logits, same.logits)
    assert torch.equal(half.topk_idx, same.topk_idx)
