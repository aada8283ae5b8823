"""The expert kernels as operators: compilation, checkpointing, sharded parameters."""

import expert_cases as cases
import pytest
import torch
from parity import outputs_and_gradients
from torch.utils.checkpoint import checkpoint

from lumina_ft.kernels import Experts, Projection, plan_experts
from lumina_ft.kernels.moe.fused import fused_experts


def upstream(inputs):
    return torch.randn(inputs["x"].shape, generator=torch.Generator().manual_seed(1))


def operator_arguments(inputs, *, save=True):
    """Of `lumina_ft::moe_ffn`."""
    plan = plan_experts(inputs["topk_idx"], inputs["gate"].shape[0])
    tensors = [inputs[name].clone().requires_grad_() for name in ("x", "topk_weight", *cases.NAMES)]
    tensors[1] = tensors[1].detach().view(-1).requires_grad_()
    pairs = [inputs[f"{name}_{part}"] for name in cases.NAMES for part in "ab"]
    pairs = [None if value is None else value.clone().requires_grad_() for value in pairs]
    rows = (plan.offsets, inputs["keys"].view(-1), plan.order, plan.inverse.view(inputs["topk_idx"].shape))
    return (*tensors, *pairs, *rows, [0.7, 1.0, 0.7], [0.2, 0.0, 0.2], [0, 0, 2], save)


SMALL = {"tokens": 3, "hidden": 16, "width": 16, "experts": 3, "ranks": (2, 0, 3)}


@pytest.mark.parametrize("order", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["by slot", "sorted rows"])
def test_operators_are_described_rightly(order):
    arguments = list(operator_arguments(cases.expert_inputs(**SMALL)))
    if not order:
        arguments[0] = torch.randn(6, 16, requires_grad=True)
        arguments[13] = arguments[14] = None
    torch.library.opcheck(torch.ops.lumina_ft.moe_ffn.default, tuple(arguments))
    with torch.no_grad():
        out, *saved = torch.ops.lumina_ft.moe_ffn(*arguments)
    detached = [value.detach() if isinstance(value, torch.Tensor) else value for value in arguments[:-1]]
    for needs in ([True] * 5 + [True, True, False, False, True, True], [False] * 11):
        backward = torch.ops.lumina_ft.moe_ffn_backward.default
        torch.library.opcheck(backward, (torch.ones_like(out), saved, *detached, needs))


def test_compiled_without_a_break():
    inputs = cases.expert_inputs(**SMALL)
    compiled = torch.compile(cases.kernel(0.2), backend="aot_eager", fullgraph=True)
    results = [
        outputs_and_gradients(run, inputs, cases.floating(inputs), upstream(inputs))
        for run in (cases.kernel(0.2), compiled)
    ]
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_checkpointed():
    inputs = cases.expert_inputs(**SMALL)

    def checkpointed(**tensors):
        return checkpoint(cases.kernel(0.2), use_reentrant=False, **tensors)

    results = [
        outputs_and_gradients(run, inputs, cases.floating(inputs), upstream(inputs))
        for run in (cases.kernel(0.2), checkpointed)
    ]
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_parameters_may_change_their_storage_before_backward():
    inputs = cases.expert_inputs(tokens=5)
    want = outputs_and_gradients(cases.kernel(), inputs, ("x", "gate"), upstream(inputs))
    parameters = {name: torch.nn.Parameter(inputs[name].clone(), name == "gate") for name in cases.NAMES}
    x = inputs["x"].clone().requires_grad_()
    experts = Experts(*(Projection(parameter) for parameter in parameters.values()))
    out = fused_experts(x, experts, inputs["topk_idx"], inputs["topk_weight"])
    for parameter in parameters.values():
        whole, parameter.data = parameter.data.clone(), torch.empty(0)
        parameter.data = whole
    out.backward(upstream(inputs))
    assert torch.equal(x.grad, want["grad x"]) and torch.equal(parameters["gate"].grad, want["grad gate"])


def test_storage_of_sharded_parameters_is_not_kept():
    inputs = cases.expert_inputs(tokens=5)
    parameters = [torch.nn.Parameter(inputs[name].clone(), requires_grad=False) for name in cases.NAMES]
    x = inputs["x"].clone().requires_grad_()
    experts = Experts(*(Projection(parameter) for parameter in parameters))
    out = fused_experts(x, experts, inputs["topk_idx"], inputs["topk_weight"])
    for parameter in parameters:
        # What sharding does to a gathered parameter; a saved alias would still find the old numbers.
        parameter.data = torch.full_like(parameter, torch.nan)
    out.backward(upstream(inputs))
    assert x.grad.isnan().all()


def test_an_expanded_upstream_gradient():
    inputs = cases.expert_inputs(tokens=5)
    results = [
        outputs_and_gradients(cases.kernel(), inputs, ("x",), ones)
        for ones in (torch.ones(5, 48), torch.ones(1, 1).expand(5, 48))
    ]
    assert torch.equal(results[0]["grad x"], results[1]["grad x"])
