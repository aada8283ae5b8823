"""Grouped experts against the per-expert loop: values, all gradients, empty experts, ragged groups (M5)."""

import pytest
import torch

from lumina_ft.kernels import Experts, Projection, eager_experts
from lumina_ft.kernels.moe.grouped import combine, dispatch, grouped_experts, plan_experts
from lumina_ft.kernels.moe.products import grouped_linear
from lumina_ft.kernels.moe.ref import expert_buckets, expert_loop, expert_mlp

# tokens, hidden, width, experts, top_k, reason
SHAPES = [
    pytest.param(37, 16, 8, 5, 2, id="prime number of experts"),
    pytest.param(1, 16, 8, 6, 3, id="one token, most experts empty"),
    pytest.param(64, 24, 12, 4, 4, id="every expert for every token"),
    pytest.param(13, 8, 4, 16, 1, id="fewer tokens than experts"),
]


pytestmark = pytest.mark.usefixtures("nan_filled_buffers")


def make(tokens, hidden, width, experts, top_k, dtype=torch.float32):
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, hidden, generator=gen).to(dtype).requires_grad_()
    shapes = ((experts, width, hidden), (experts, width, hidden), (experts, hidden, width))
    weights = [(torch.randn(s, generator=gen) * s[-1] ** -0.5).to(dtype).requires_grad_() for s in shapes]
    # The last expert stays empty whenever there is room for it.
    usable = max(experts - 1, top_k)
    topk_weight, topk_idx = torch.rand(tokens, usable, generator=gen).topk(top_k, dim=-1)
    upstream = torch.randn(tokens, hidden, generator=gen).to(dtype)
    return x, weights, topk_idx, topk_weight.requires_grad_(), upstream


def run(call, x, weights, topk_idx, topk_weight, upstream):
    for tensor in (x, *weights, topk_weight):
        tensor.grad = None
    out = call(x, Experts(*map(Projection, weights)), topk_idx, topk_weight)
    out.backward(upstream)
    grads = {"x": x.grad, "gate": weights[0].grad, "up": weights[1].grad, "down": weights[2].grad}
    return {"out": out.detach(), **grads, "topk_weight": topk_weight.grad}


def assert_relative(got, want, limit):
    for name in want:
        difference = float((got[name].float() - want[name].float()).norm() / want[name].float().norm().clamp(min=1e-12))
        assert difference <= limit, (name, difference)


def token_by_token(x, experts, topk_idx, topk_weight):
    rows, experts = [], experts.unbind()
    for t in range(x.shape[0]):
        parts = [topk_weight[t, k] * expert_mlp(x[t : t + 1], experts[e]) for k, e in enumerate(topk_idx[t].tolist())]
        rows.append(torch.stack(parts).sum(0))
    return torch.cat(rows)


@pytest.mark.parametrize(("tokens", "hidden", "width", "experts", "top_k"), SHAPES)
def test_loop_equals_token_by_token(tokens, hidden, width, experts, top_k):
    case = make(tokens, hidden, width, experts, top_k)
    assert_relative(run(eager_experts, *case), run(token_by_token, *case), 1e-6)


@pytest.mark.parametrize(("tokens", "hidden", "width", "experts", "top_k"), SHAPES)
def test_grouped_equals_loop(tokens, hidden, width, experts, top_k):
    case = make(tokens, hidden, width, experts, top_k)
    want = run(eager_experts, *case)
    got = run(grouped_experts, *case)
    assert_relative(got, want, 1e-6)
    used = torch.bincount(case[2].flatten(), minlength=case[1][0].shape[0]) > 0
    for name in ("gate", "up", "down"):
        assert (got[name][~used] == 0).all()
        assert (got[name][used].flatten(1).norm(dim=1) > 0).all()


@pytest.mark.parametrize(("tokens", "hidden", "width", "experts", "top_k"), SHAPES)
def test_buckets_equal_loop_and_keep_gradients(tokens, hidden, width, experts, top_k):
    case = make(tokens, hidden, width, experts, top_k)

    def stacked(call):
        return lambda x, experts, i, w: call(x, experts.unbind(), i, w)

    assert_relative(run(stacked(expert_buckets), *case), run(stacked(expert_loop), *case), 1e-6)


def test_grouped_in_bfloat16_is_as_close_as_the_loop():
    """Bounded by bfloat16 itself: compared with the float32 result on the same rounded inputs."""
    case = make(48, 32, 16, 6, 2, dtype=torch.bfloat16)
    exact = [t.detach().float().requires_grad_() for t in (case[0], *case[1])]
    want = run(eager_experts, exact[0], exact[1:], case[2], case[3], case[4].float())
    got = run(grouped_experts, *case)
    assert got["out"].dtype == torch.bfloat16
    assert_relative(got, want, 6e-3)


def test_frozen_weights_get_no_gradient_and_none_is_computed():
    x, weights, topk_idx, topk_weight, upstream = make(20, 16, 8, 4, 2)
    frozen = [w.detach() for w in weights]
    grouped_experts(x, Experts(*map(Projection, frozen)), topk_idx, topk_weight).backward(upstream)
    assert all(w.grad is None for w in frozen)
    assert x.grad.norm() > 0


def test_expanded_upstream_gradients_are_accepted():
    """`sum().backward()` sends a stride-0 gradient, which the grouped product itself refuses."""
    x, weights, topk_idx, topk_weight, _ = make(20, 16, 8, 4, 2)
    plan = plan_experts(topk_idx, 4)
    grouped_linear(dispatch(x, plan), weights[0], plan.offsets).sum().backward()
    assert torch.isfinite(weights[0].grad).all()


def test_plan_is_a_stable_permutation_and_combine_inverts_dispatch():
    topk_idx = torch.tensor([[2, 0], [0, 2], [3, 2]])
    plan = plan_experts(topk_idx, 5)
    assert plan.token.tolist() == [0, 1, 0, 1, 2, 2]
    assert plan.offsets.tolist() == [2, 2, 5, 6, 6]
    assert torch.equal(plan.order[plan.inverse], torch.arange(6))
    x = torch.randn(3, 4)
    torch.testing.assert_close(combine(dispatch(x, plan), plan, 3), 2 * x)


def test_results_repeat_bit_for_bit():
    case = make(64, 24, 12, 4, 4)
    first, second = run(grouped_experts, *case), run(grouped_experts, *case)
    assert all(torch.equal(first[name], second[name]) for name in first)
