"""Stage plans: groups, learning rates, freezing (D3)."""

from pathlib import Path

import pytest
from rich.console import Console
from torch import nn

from lumina_ft.config.groups import GROUPS_U2
from lumina_ft.config.schema import RunConfig
from lumina_ft.errors import ConfigError
from lumina_ft.stages import ParamInfo, apply_plan, plan_stage

ALL = tuple(ParamInfo(f"{group}.weight", group, (4, 3)) for group in GROUPS_U2)


def run_config(*stages: dict) -> RunConfig:
    return RunConfig.model_validate(
        {
            "output_dir": "out",
            "model": {"config": "u2-tiny", "random_init": True},
            "data": {"path": Path("data")},
            "optim": {"lr": 2e-5},
            "stages": [{"name": f"s{i}", "steps": 1, **stage} for i, stage in enumerate(stages)],
        }
    )


def test_D3_default_recipe_freezes_vision_then_all_but_heads_then_nothing():
    cfg = run_config({"freeze": ["vision"]}, {"train": ["heads"]}, {"train": ["all"]})
    trained = [{p.group for p in plan_stage(cfg, i, ALL).trained} for i in range(3)]
    assert trained[0] == set(GROUPS_U2) - {"image_embeddings", "image_projection"}
    assert trained[1] == {"lm_head", "image_heads", "codebook_head"}
    assert trained[2] == set(GROUPS_U2)


def test_group_lr_named_group_beats_alias_and_small_alias_beats_large_one():
    cfg = run_config({"lr": 1e-3, "group_lr": {"lm_head": 3e-3, "heads": 2e-3, "all": 5e-4}})
    lr = plan_stage(cfg, 0, ALL).lr
    assert lr["lm_head"] == 3e-3
    assert lr["image_heads"] == lr["codebook_head"] == 2e-3
    assert lr["experts"] == 5e-4


def test_stage_without_lr_takes_the_optimizers():
    assert set(plan_stage(run_config({}), 0, ALL).lr.values()) == {2e-5}


def test_groups_that_a_text_only_model_lacks_are_left_out():
    text_only = [p for p in ALL if not p.group.startswith(("image", "codebook"))]
    cfg = run_config({"train": ["heads"]}, {"train": ["vision"]})
    assert list(plan_stage(cfg, 0, text_only).lr) == ["lm_head"]
    with pytest.raises(ConfigError, match=r"stages\.1\.train — \['vision'\] .*choose among word_embeddings"):
        plan_stage(cfg, 1, text_only)


def test_apply_sets_requires_grad_of_every_parameter():
    model = nn.ModuleDict({group: nn.Linear(3, 4, bias=False) for group in GROUPS_U2})
    cfg = run_config({"train": ["heads"]}, {})
    apply_plan(model, plan_stage(cfg, 0, ALL))
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        "lm_head.weight",
        "image_heads.weight",
        "codebook_head.weight",
    }
    apply_plan(model, plan_stage(cfg, 1, ALL))
    assert all(p.requires_grad for p in model.parameters())


def test_table_names_frozen_groups_and_shares():
    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    console.print(plan_stage(run_config({"train": ["router", "lm_head"]}), 0, ALL).table())
    text = console.export_text()
    assert text.count("frozen") == len(GROUPS_U2) - 2
    assert f"{100 * 2 / len(GROUPS_U2):.1f} %" in text
