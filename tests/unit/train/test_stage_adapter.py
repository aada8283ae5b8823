"""A stage's adapter: planning, the start it comes from, learning rates and random draws (D3, D5)."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lumina_ft.checkpoint.directory import TrainState
from lumina_ft.config.schema import RunConfig
from lumina_ft.errors import ConfigError
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.parallel.progress import LOAD, Progress
from lumina_ft.stages import StagePlan, plan_stage
from lumina_ft.train.dropout import draws_dropout, seed_dropout
from lumina_ft.train.optim import build_optimizer
from lumina_ft.train.stage_adapter import attach_stage_adapter, check_pissa, describe_parameters, stage_lora
from lumina_ft.train.start import Start, find_start


def run_config(*stages: dict, **lora: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "output_dir": "out",
            "model": {"config": "u2-tiny", "random_init": True},
            "data": {"path": "data"},
            "optim": {"lr": 1e-3},
            "lora": {"rank": 4, "alpha": 8, **lora},
            "stages": [{"name": f"s{i}", "steps": 4, **stage} for i, stage in enumerate(stages)],
        }
    )


def plan(cfg: RunConfig, index: int) -> StagePlan:
    return plan_stage(cfg, index, describe_parameters(U2Config.load("u2-tiny"), stage_lora(cfg, index)))


def saved(path: Path, **fields: Any) -> Path:
    state = TrainState(4, 0, "s0", 4, 4, 4, 1.0, 10, {})
    path.mkdir(parents=True)
    (path / "state.json").write_text(json.dumps(asdict(replace(state, **fields))))
    return path


def test_D3_a_stage_can_train_the_adapter_alone():
    cfg = run_config({}, {"train": ["heads"], "lora": "freeze"}, {"train": ["all"]})
    groups = [{info.group for info in plan(cfg, index).trained} for index in range(3)]
    assert groups[0] == {"lora"}
    assert groups[1] == {"lm_head", "image_heads", "codebook_head"}
    assert groups[2] == {info.group for info in plan(cfg, 2).params}


def test_the_table_has_a_row_for_the_adapter():
    from rich.console import Console

    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    console.print(plan(run_config({"group_lr": {"lora": 2e-4}}), 0).table())
    row = next(line for line in console.export_text().splitlines() if line.startswith("│ lora"))
    assert row.rstrip(" │").endswith("0.0002")


def test_naming_only_groups_that_the_model_lacks_is_an_error_beside_an_adapter_too():
    cfg = run_config({"train": ["vision"]})
    text_only = [info for info in plan(run_config({}), 0).params if not info.group.startswith("image")]
    with pytest.raises(ConfigError, match=r"stages\.0\.train — \['vision'\] .*names nothing in this model"):
        plan_stage(cfg, 0, text_only)


def test_an_unmatched_target_is_found_before_any_weight_exists():
    with pytest.raises(ConfigError, match="lora.targets — 'atention' — matches no module"):
        plan(run_config({}, targets=["atention"]), 0)


def test_D5_lora_plus_gives_b_matrices_their_own_rate():
    cfg = run_config({}, use_dora=True, lr_ratio=16, targets=["attention"])
    stage = plan(cfg, 0)
    params = {info.name: torch.nn.Parameter(torch.zeros(info.shape)) for info in stage.trained}
    optimizer, peaks = build_optimizer(params, stage, cfg.optim, lr_ratio=16)
    names = {id(param): name for name, param in params.items()}
    by_rate = {
        (group["lr"], group["weight_decay"] > 0): {names[id(p)].split(".")[-3] for p in group["params"]}
        for group in optimizer.param_groups
    }
    assert by_rate[16e-3, True] == {"lora_B"}
    assert "lora_B" not in by_rate[1e-3, True] and "lora_A" in by_rate[1e-3, True]
    assert by_rate[1e-3, False] == {"lora_magnitude_vector"}
    assert sorted(peaks.values()) == [1e-3, 1e-3, 16e-3]


@pytest.mark.parametrize(
    ("fields", "adapter", "changed"),
    [
        ({"adapter": "kept", "base": "/base", "changed_groups": ["lm_head"]}, "adapter", {"lm_head"}),
        ({"adapter": "dropped", "base": "/base"}, None, set()),
        ({"adapter": "none"}, None, set()),
    ],
)
def test_a_stage_starts_with_what_the_one_before_has_left(tmp_path, fields, adapter, changed):
    base = tmp_path / "base"
    base.mkdir()
    fields = {key: str(base) if value == "/base" else value for key, value in fields.items()}
    path = saved(tmp_path / "run" / "checkpoints" / "checkpoint-4", **fields)
    start = find_start(run_config({}, {}), 1, path)
    assert start.adapter == (path / adapter if adapter else None)
    assert start.changed == changed
    assert start.weights == (base if "base" in fields else path / "model")
    assert start.inside is None and start.checkpoint is not None and start.global_step == 4


def test_pissa_refuses_stages_that_train_adapted_layers_in_full():
    cfg = run_config({}, {"train": ["attention", "heads"]}, init="pissa")
    start = Start(None, None, frozenset(), None, None, 0)
    check_pissa(cfg, plan(cfg, 0), start)
    with pytest.raises(ConfigError, match="stages.1.train — attention — lora.init: pissa takes the adapter's start"):
        check_pissa(cfg, plan(cfg, 1), start)
    with pytest.raises(ConfigError, match="dense_mlp"):
        check_pissa(cfg, plan(cfg, 0), replace(start, changed=frozenset({"dense_mlp", "lm_head"})))


def test_only_a_trained_adapter_with_dropout_draws():
    cfg = run_config({}, {"train": ["heads"], "lora": "freeze"}, dropout=0.1)
    assert [draws_dropout(cfg, index) for index in range(2)] == [True, False]
    assert not draws_dropout(run_config({}), 0)


def test_draws_depend_on_every_coordinate_and_on_nothing_else():
    def draw(*where: int) -> float:
        torch.rand(len(where))
        seed_dropout(*where)
        return float(torch.rand(()))

    places = [(1, 0, 0, 0), (2, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1), (1, 0, 1, 1)]
    assert len({draw(*place) for place in places}) == len(places)
    assert draw(*places[0]) == draw(*places[0])


def test_T14_each_layer_of_a_new_adapter_is_a_sign_of_life():
    """PiSSA decomposes every weight; without ZeRO-3 no collective shows meanwhile that the rank gets on."""
    cfg = run_config({}, init="pissa", rank=2)
    model = U2ForDiffusion(U2Config.load("u2-tiny"))
    model.init_weights_(0)
    progress = Progress()
    start = Start(None, None, frozenset(), None, None, 0)
    adapter = attach_stage_adapter(model, cfg, plan(cfg, 0), start, seed=1, progress=progress)
    assert adapter is not None and progress.phase == LOAD
    assert progress.marks == len(adapter.targets) > 1
