"""The router's Triton kernels against the reference: chosen experts exactly, weights and gradients to float32."""

import pytest
import torch
from parity import FLOAT32_LIMIT, guarded, relative_error
from torch.utils.checkpoint import checkpoint

from lumina_ft.kernels.router.fused import _route_experts, fused_route, router_unsupported_reason
from lumina_ft.kernels.router.ref import route

SETTINGS = [
    # The published model; groups of a prime size; one group; groups of one expert, all kept; 512 experts; every expert.
    dict(experts=256, num_groups=8, kept_groups=4, top_k=8),
    dict(experts=35, num_groups=5, kept_groups=2, top_k=3),
    dict(experts=12, num_groups=1, kept_groups=1, top_k=12),
    dict(experts=7, num_groups=7, kept_groups=7, top_k=2),
    dict(experts=512, num_groups=16, kept_groups=3, top_k=5),
    dict(experts=24, num_groups=3, kept_groups=2, top_k=16),
]
HIDDEN, SCALING = 32, 2.5


def tensors(experts, tokens=37, dtype=torch.float32):
    gen = torch.Generator().manual_seed(experts + tokens)
    hidden = torch.randn(tokens, HIDDEN, generator=gen)
    weight = torch.randn(experts, HIDDEN, generator=gen) * 0.3
    return hidden.to(dtype), weight.to(dtype), torch.randn(experts, generator=gen) * 0.3


def chosen(settings):
    return {"scaling": SCALING} | {name: value for name, value in settings.items() if name != "experts"}


def in_float64(hidden, weight, topk_idx):
    """Weights of the experts that were chosen, by formula."""
    scores = (hidden @ weight.t()).sigmoid().gather(1, topk_idx)
    return SCALING * scores / scores.sum(1, keepdim=True)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"E{s['experts']}-G{s['num_groups']}-K{s['top_k']}")
def test_experts_weights_and_every_gradient(settings):
    hidden, weight, bias = tensors(settings["experts"])
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    got = fused_route(*leaves, guarded(bias), **chosen(settings))
    want = route(hidden, weight, bias, **chosen(settings))
    assert torch.equal(got.topk_idx, want.topk_idx)
    assert got.topk_idx.dtype == torch.int64 and got.topk_weight.dtype == torch.float32
    assert torch.equal(got.logits, want.logits)

    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    exact_weight = in_float64(*exact, want.topk_idx)
    assert relative_error(got.topk_weight.detach(), exact_weight.detach()) <= FLOAT32_LIMIT
    upstream = torch.randn(exact_weight.shape, generator=torch.Generator().manual_seed(1))
    on_logits = torch.randn(got.logits.shape, generator=torch.Generator().manual_seed(2))
    ours = torch.autograd.grad([got.topk_weight, got.logits], leaves, [upstream, on_logits])
    theirs = torch.autograd.grad(
        [exact_weight, exact[0] @ exact[1].t()], exact, [upstream.double(), on_logits.double()]
    )
    for mine, reference in zip(ours, theirs, strict=True):
        assert relative_error(mine, reference) <= FLOAT32_LIMIT


@pytest.mark.parametrize("settings", SETTINGS[:2], ids=lambda s: f"E{s['experts']}")
def test_gradient_of_the_weights_alone(settings):
    """Without the logits' own gradient, which would hide an error in the small one of the weights."""
    hidden, weight, bias = tensors(settings["experts"])
    logits = (hidden @ weight.t()).requires_grad_()
    plain = chosen(settings)
    topk_weight, index = _route_experts(
        logits, bias, plain["num_groups"], plain["kept_groups"], plain["top_k"], SCALING
    )
    exact = logits.detach().double().requires_grad_()
    scores = exact.sigmoid().gather(1, index)
    want = SCALING * scores / scores.sum(1, keepdim=True)
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(3))
    (ours,) = torch.autograd.grad(topk_weight, logits, upstream)
    (theirs,) = torch.autograd.grad(want, exact, upstream.double())
    assert relative_error(ours, theirs) <= FLOAT32_LIMIT
    assert torch.equal(ours != 0, theirs != 0), "an expert that wasn't chosen has a gradient"


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17])
def test_any_number_of_tokens(tokens):
    hidden, weight, bias = tensors(24, tokens)
    settings = chosen(SETTINGS[5])
    got = fused_route(hidden.requires_grad_(), weight, bias, **settings)
    want = route(hidden.detach(), weight, bias, **settings)
    assert torch.equal(got.topk_idx, want.topk_idx)
    torch.testing.assert_close(got.topk_weight, want.topk_weight)
    got.topk_weight.sum().backward()
    assert hidden.grad is not None and hidden.grad.shape == (tokens, HIDDEN) and hidden.grad.isfinite().all()


def test_bfloat16_is_routed_in_float32_and_without_a_bias():
    hidden, weight, _ = tensors(256, dtype=torch.bfloat16)
    settings = chosen(SETTINGS[0])
    got, want = fused_route(hidden, weight, None, **settings), route(hidden, weight, None, **settings)
    assert torch.equal(got.topk_idx, want.topk_idx)
    assert got.topk_weight.dtype == torch.float32
    torch.testing.assert_close(got.topk_weight, want.topk_weight)


def test_bias_selects_but_never_weighs():
    hidden, weight, _ = tensors(12)
    bias = torch.zeros(12)
    bias[5] = 1e4
    got = fused_route(hidden, weight, bias, num_groups=4, kept_groups=2, top_k=2, scaling=1.0)
    assert (got.topk_idx[:, 0] == 5).all()
    assert (got.topk_weight < 1).all()
    got = fused_route(hidden, weight, -bias, num_groups=4, kept_groups=4, top_k=11, scaling=1.0)
    assert not (got.topk_idx == 5).any()


def test_negative_scores_never_pick_a_dropped_group():
    """A dropped group filled with 0 would beat experts with a negative biased score."""
    logits, bias = torch.zeros(1, 4), torch.tensor([-0.7, -0.8, -1.4, -1.3])
    _, index = _route_experts(logits, bias, 2, 1, 2, 1.0)
    assert index.tolist() == [[0, 1]]


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2)])
def test_ties_go_to_the_lowest_index(groups, kept):
    weight, index = _route_experts(torch.zeros(3, 8), None, groups, kept, 3, 1.0)
    assert index.tolist() == [[0, 1, 2]] * 3
    torch.testing.assert_close(weight, torch.full((3, 3), 1 / 3))


def test_equal_scores_of_one_group_count_twice():
    """Group 0 has 1.4 as 0.7 + 0.7; taking out both of the best at once would leave it 0.7 + 0.1."""
    biased = torch.tensor([[0.7, 0.7, 0.1, 0.9, 0.3, 0.1]])
    _, index = _route_experts(torch.zeros(1, 6), biased[0], 2, 1, 2, 1.0)
    assert index.tolist() == [[0, 1]]


def test_a_nan_is_chosen_shows_in_the_weights_and_repeats_no_expert():
    logits = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    logits[1, 3] = torch.nan
    logits[2] = torch.nan
    logits[3, 4:] = -torch.inf
    weight, index = _route_experts(logits, None, 4, 2, 5, 1.0)
    assert index[1, 0] == 3, "as torch.topk, which takes a NaN for the largest"
    assert weight[1:3].isnan().all() and weight[[0, 3, 4]].isfinite().all()
    assert ((index >= 0) & (index < 16)).all()
    assert all(len(set(row)) == 5 for row in index.tolist())


def test_more_experts_than_registers_hold_are_named():
    assert router_unsupported_reason(512) is None
    assert router_unsupported_reason(513) == "num_experts=513 exceeds 512"


def test_registered_as_pytorch_asks():
    hidden, weight, bias = tensors(12, tokens=5)
    logits = (hidden @ weight.t()).requires_grad_()
    torch.library.opcheck(_route_experts, (logits, bias, 4, 2, 3, SCALING))
    torch.library.opcheck(_route_experts, (logits, None, 4, 2, 3, SCALING))


@pytest.mark.parametrize("through", ["compile", "checkpoint"])
def test_compiled_and_checkpointed_give_the_same_bits(through):
    hidden, weight, bias = tensors(12, tokens=5)
    settings = {"num_groups": 4, "kept_groups": 2, "top_k": 3, "scaling": SCALING}

    def run(x):
        return fused_route(x, weight, bias, **settings).topk_weight

    upstream = torch.randn(5, 3, generator=torch.Generator().manual_seed(4))
    plain = hidden.clone().requires_grad_()
    run(plain).backward(upstream)
    other = hidden.clone().requires_grad_()
    if through == "compile":
        torch.compile(run, backend="aot_eager", fullgraph=True)(other).backward(upstream)
    else:
        checkpoint(run, other, use_reentrant=False).backward(upstream)
    assert torch.equal(plain.grad, other.grad)
