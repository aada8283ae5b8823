"""Balancing by the routers' selection bias (M4)."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_u2 import small_config

from lumina_ft.config.groups import ADAPTER_GROUP
from lumina_ft.models.moe import Router
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import kernels_for
from lumina_ft.monitor.expert_load import load_summary
from lumina_ft.train import loop, run
from lumina_ft.train.balance import largest_bias, selection_biases, shift_biases

EXPERTS, TOKENS = 16, 512


def skewed_router() -> Router:
    """A router that prefers some experts for every token: its inputs share a direction."""
    config = small_config(num_experts=EXPERTS, num_experts_per_tok=4, n_group=4, topk_group=2)
    router = Router(config, kernels_for(config, "torch"))
    gen = torch.Generator().manual_seed(0)
    with torch.no_grad():
        router.weight.copy_(0.3 * torch.randn(router.weight.shape, generator=gen))
        router.weight[:, 0] = torch.linspace(-2.0, 2.0, EXPERTS)
    return router


def tokens(step: int) -> torch.Tensor:
    x = torch.randn(TOKENS, 16, generator=torch.Generator().manual_seed(step))
    x[:, 0] = 1.0
    return x


def counts_of(router: Router, step: int) -> torch.Tensor:
    """[1, E] slots of each expert."""
    return torch.bincount(router(tokens(step)).topk_idx.flatten(), minlength=EXPERTS).unsqueeze(0)


def test_M4_a_skewed_router_levels_out():
    router = skewed_router()
    weights = router.weight.detach().clone()
    before = load_summary(counts_of(router, 0).numpy())
    for step in range(150):
        shift_biases([router.expert_bias], counts_of(router, step), 0.01)
    after = load_summary(counts_of(router, 1000).numpy())
    assert before["expert_load_max"] > 3 and before["experts_idle"] > 0
    assert after["expert_load_max"] < 1.3 and after["experts_idle"] == 0
    assert torch.equal(router.weight, weights)
    assert 0.1 < largest_bias([router.expert_bias]) <= 1.5


def test_M4_cold_experts_rise_hot_ones_fall_and_the_mean_stays():
    biases = [torch.tensor([0.5, 0.0, 0.0, -0.25]), torch.zeros(4)]
    counts = torch.tensor([[0, 10, 4, 2], [1, 1, 1, 1]])
    shift_biases(biases, counts, 0.125)
    assert biases[0].tolist() == [0.625, -0.125, 0.0, -0.125]
    assert biases[1].tolist() == [0.0] * 4


def test_M4_loads_next_to_the_mean_are_told_apart_however_large_they_are():
    """In float32 these loads equal their mean."""
    bias = torch.zeros(3)
    shift_biases([bias], torch.tensor([[2**26 + 1, 2**26, 2**26 - 1]]), 1.0)
    assert bias.tolist() == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_M4_every_layer_gets_its_own_counts_in_float32_without_a_graph(dtype):
    model: Any = U2ForDiffusion(small_config())
    model.init_weights_(0)
    model = model.to(dtype)
    biases = selection_biases(model)
    assert [bias.dtype for bias in biases] == [torch.float32] * 2
    shift_biases(biases, torch.tensor([[8, 0, 4, 4], [4, 4, 0, 8]]), 0.001)
    layers = [model.model.layers[i].mlp.gate.expert_bias for i in (1, 2)]
    rate = torch.tensor(0.001)
    assert torch.equal(layers[0], rate * torch.tensor([-1.0, 1.0, 0.0, 0.0]))
    assert torch.equal(layers[1], rate * torch.tensor([0.0, 0.0, 1.0, -1.0]))
    assert not any(bias.requires_grad for bias in layers)


def stage(rate: float, sums: list[torch.Tensor]) -> Any:
    """A stage on the second of two ranks, whose sums over the ranks add one token to the first expert."""

    def add(counts: torch.Tensor) -> torch.Tensor:
        sums.append(counts)
        counts[:, 0] += 1
        return counts

    model = U2ForDiffusion(small_config())
    return SimpleNamespace(
        cfg=SimpleNamespace(bias_rate=lambda index: rate),
        plan=SimpleNamespace(index=1, lr={ADAPTER_GROUP: 1e-3, "lm_head": 1e-3}),
        world=SimpleNamespace(sum=add),
        objective=model,
    )


def test_M4_a_step_moves_the_bias_by_the_load_of_all_ranks_and_leaves_its_own_counts_alone():
    sums: list[torch.Tensor] = []
    here = torch.full((2, 4), 5)
    training = stage(0.25, sums)
    loop._balance(training, here)
    assert len(sums) == 1 and torch.equal(here, torch.full((2, 4), 5))
    for bias in selection_biases(training.objective):
        assert bias.tolist() == [-0.25, 0.25, 0.25, 0.25]


def test_M4_balancing_that_is_off_costs_no_collective_and_changes_nothing():
    sums: list[torch.Tensor] = []
    training = stage(0.0, sums)
    loop._balance(training, torch.full((2, 4), 5))
    assert not sums and largest_bias(selection_biases(training.objective)) == 0.0


@pytest.mark.parametrize(("rate", "changed"), [(0.0, {"lm_head"}), (0.25, {"lm_head", "router"})])
def test_M4_a_bias_that_moves_beside_an_adapter_is_a_change_of_its_base(rate, changed):
    """An adapter can't carry it, so the checkpoint then gets a whole model."""
    assert run._changed_groups(stage(rate, [])) == changed
