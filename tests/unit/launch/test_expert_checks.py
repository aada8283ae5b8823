"""Placement and balancing of experts that can't work, found before a rank is started."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lumina_ft.config.schema import RunConfig
from lumina_ft.errors import ConfigError
from lumina_ft.launch.checks import check_run
from lumina_ft.launch.foreign import with_world_size
from lumina_ft.launch.plan_view import print_run
from lumina_ft.models.u2_config import SHIPPED_CONFIGS

Make = Callable[..., RunConfig]


@pytest.fixture
def make(tmp_path: Path, dataset: Path) -> Make:
    """A run of `u2-tiny` (16 experts) on four ranks, with changes of its config.json and of sections of the run."""

    def build(model: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
        config = json.loads((SHIPPED_CONFIGS / "u2-tiny.json").read_text())
        (tmp_path / "model.json").write_text(json.dumps({**config, **(model or {})}))
        stages = sections.pop("stages", [{"name": "one", "steps": 3}])
        own = {"kernels": sections.pop("kernels", "auto")}
        return RunConfig.model_validate(
            {
                "output_dir": tmp_path / "out",
                "model": {"config": str(tmp_path / "model.json"), "random_init": True, **own},
                "data": {"path": dataset},
                "train": {"packs_per_step": 24},
                "parallel": {"ranks": 4, **sections.pop("parallel", {})},
                "stages": stages,
                **sections,
            }
        )

    return build


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sizes_that_divide_ranks_and_experts_pass(make: Make, size: int) -> None:
    check_run(make(parallel={"expert_parallel_size": size}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"parallel": {"expert_parallel_size": 3}},
            r"^parallel\.expert_parallel_size — 3 — must divide parallel\.ranks=4 — use 1, 2 or 4, or other ranks\n"
            r"parallel\.expert_parallel_size — 3 — must divide the model's num_experts=16 — use 1, 2 or 4$",
        ),
        (
            {"parallel": {"ranks": 2, "expert_parallel_size": 4}},
            r"^parallel\.expert_parallel_size — 4 — must divide parallel\.ranks=2 — use 1 or 2, or other ranks$",
        ),
        (
            {"parallel": {"ranks": 12, "expert_parallel_size": 12}},
            r"^parallel\.expert_parallel_size — 12 — must divide the model's num_experts=16 — use 1, 2 or 4$",
        ),
        (
            {"parallel": {"expert_parallel_size": 2}, "model": {"first_k_dense_replace": 4}},
            r"^parallel\.expert_parallel_size — 2 — the model has no routed experts: every layer is dense — use 1$",
        ),
        (
            {"parallel": {"expert_parallel_size": 2}, "kernels": "eager"},
            r"^model\.kernels — eager — the reference loop needs every expert on its rank — use auto or t\w+, or "
            r"parallel\.expert_parallel_size: 1$",
        ),
        (
            {"parallel": {"expert_parallel_size": 2}, "model": {"moe_intermediate_size": 60}},
            r"^model\.kernels — auto — .*moe_intermediate_size=60 .*, and the reference loop needs every expert on "
            r"its rank — use parallel\.expert_parallel_size: 1, or another model\.dtype$",
        ),
        (
            {"parallel": {"expert_parallel_size": 2, "zero": "zero0"}},
            r"^parallel\.expert_parallel_size — above 1 with ZeRO-0 — ",
        ),
        (
            {"optim": {"expert_bias_rate": 0.01}, "model": {"moe_router_enable_expert_bias": False}},
            r"^optim\.expert_bias_rate — 0\.01 — moe_router_enable_expert_bias: false .* — set it to 0, or enable",
        ),
        (
            {"optim": {"expert_bias_rate": 0.01}, "model": {"first_k_dense_replace": 4}},
            r"^optim\.expert_bias_rate — 0\.01 — the model has no routed experts to balance — set it to 0$",
        ),
        (
            {
                "stages": [{"name": "a", "steps": 1}, {"name": "b", "steps": 1, "expert_bias_rate": 0.02}],
                "model": {"moe_router_enable_expert_bias": False},
            },
            r"^stages\.1\.expert_bias_rate — 0\.02 — moe_router_enable_expert_bias: false",
        ),
    ],
    ids=lambda value: None,
)
def test_what_can_not_work_is_refused_with_the_reason(make: Make, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(make(**changes))


def test_blocks_of_the_deepspeed_file_that_rule_experts_out_are_named(make: Make, tmp_path: Path) -> None:
    own = tmp_path / "ds.json"
    own.write_text('{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}')
    check_run(make(parallel={"zero": str(own)}))
    with pytest.raises(ConfigError, match=r"zero_optimization\.zero_hpz_partition_size — 2 — .*expert_parallel_size"):
        check_run(make(parallel={"zero": str(own), "expert_parallel_size": 2}))


def test_a_stage_may_switch_balancing_off_for_itself(make: Make) -> None:
    stages = [{"name": "a", "steps": 1, "expert_bias_rate": 0}, {"name": "b", "steps": 1}]
    cfg = make(optim={"expert_bias_rate": 0.01}, stages=stages)
    assert [cfg.bias_rate(i) for i in range(2)] == [0.0, 0.01]
    check_run(cfg)


def test_a_dry_run_says_how_far_experts_are_spread(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    print_run(make(parallel={"expert_parallel_size": 2}))
    assert "experts spread over 2" in " ".join(capsys.readouterr().out.split())


def test_a_model_that_can_not_be_read_is_reported_once(make: Make, tmp_path: Path) -> None:
    cfg = make(model={"num_experts": 0}, parallel={"expert_parallel_size": 2}, optim={"expert_bias_rate": 0.01})
    with pytest.raises(
        ConfigError, match=r"^num_experts — 0 — must be an integer of at least 1 — correct config\.json$"
    ):
        check_run(cfg)


def test_another_launchers_ranks_must_be_a_multiple_of_the_size(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = make(parallel={"expert_parallel_size": 4})
    free = cfg.model_copy(update={"parallel": type(cfg.parallel)(expert_parallel_size=4)})
    monkeypatch.setenv("WORLD_SIZE", "8")
    check_run(with_world_size(free))
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ConfigError, match=r"must divide the launcher's 6 ranks — use 1, 2, 3 or 6, or other ranks"):
        with_world_size(free)
