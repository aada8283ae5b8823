"""Parameter groups and learning-rate schedules."""

import pytest
import torch
from torch.nn import Parameter

from lumina_ft.config.schema import OptimConfig
from lumina_ft.stages import ParamInfo, StagePlan
from lumina_ft.train.optim import build_optimizer, lr_factor

PARAMS = {
    "matrix": Parameter(torch.ones(3, 4)),
    "norm": Parameter(torch.ones(4)),
    "experts": Parameter(torch.ones(2, 3, 4)),
    "head": Parameter(torch.ones(3, 4)),
    "frozen": Parameter(torch.ones(3, 4)),
}
GROUPS = {"matrix": "attention", "norm": "norms", "experts": "experts", "head": "lm_head", "frozen": "router"}


def plan(**lr: float) -> StagePlan:
    return StagePlan(0, "s", tuple(ParamInfo(n, GROUPS[n], tuple(p.shape)) for n, p in PARAMS.items()), lr)


def factors(total, schedule="cosine", warmup=0.0, floor=0.0):
    return [lr_factor(s, total, schedule=schedule, warmup_ratio=warmup, min_lr_ratio=floor) for s in range(total)]


def test_one_dimensional_parameters_do_not_decay_and_groups_split_by_lr():
    optimizer, peaks = build_optimizer(
        PARAMS, plan(attention=1e-3, norms=1e-3, experts=1e-3, lm_head=2e-3), OptimConfig(weight_decay=0.1)
    )
    found = {(g["lr"], g["weight_decay"]): [id(p) for p in g["params"]] for g in optimizer.param_groups}
    assert found == {
        (1e-3, 0.1): [id(PARAMS["matrix"]), id(PARAMS["experts"])],
        (1e-3, 0.0): [id(PARAMS["norm"])],
        (2e-3, 0.1): [id(PARAMS["head"])],
    }
    assert sorted(peaks.values()) == [1e-3, 1e-3, 2e-3]
    assert {g["label"] for g in optimizer.param_groups} == set(peaks)


def test_frozen_parameters_are_not_in_the_optimizer():
    optimizer, _ = build_optimizer(PARAMS, plan(lm_head=1e-3), OptimConfig())
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == [id(PARAMS["head"])]


def test_partitioned_parameters_are_judged_by_their_full_shape():
    param = Parameter(torch.empty(0))
    param.ds_shape = torch.Size([8, 8])
    infos = (ParamInfo("w", "lm_head", (8, 8)),)
    optimizer, _ = build_optimizer({"w": param}, StagePlan(0, "s", infos, {"lm_head": 1.0}), OptimConfig())
    assert optimizer.param_groups[0]["weight_decay"] == OptimConfig().weight_decay


def test_warmup_never_starts_at_zero_and_ends_at_the_peak():
    rising = factors(100, warmup=0.1)[:10]
    assert rising == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])


def test_cosine_and_linear_fall_from_the_peak_towards_the_floor():
    for schedule in ("cosine", "linear"):
        values = factors(50, schedule=schedule, warmup=0.2, floor=0.1)
        assert values[10] == 1.0
        assert all(a > b for a, b in zip(values[10:], values[11:], strict=False))
        assert 0.1 < values[-1] < 0.2
    assert factors(8, schedule="cosine")[4] == pytest.approx(0.5)
    assert factors(8, schedule="linear")[2] == pytest.approx(0.75)


def test_constant_stays_and_no_step_is_wasted_at_zero():
    assert factors(5, schedule="constant") == [1.0] * 5
    assert all(value > 0 for schedule in ("cosine", "linear") for value in factors(1, schedule=schedule))


def test_names_of_nearly_equal_rates_stay_distinct():
    low, high = 1.0000001e-3, 1.0000002e-3
    _, peaks = build_optimizer(PARAMS, plan(attention=low, experts=high), OptimConfig())
    assert sorted(peaks.values()) == [low, high]
