"""What `--dry-run` and the log say about a run with an adapter (D5)."""

from pathlib import Path
from typing import Any

import pytest

from lumina_ft.config.schema import RunConfig, StageConfig
from lumina_ft.errors import ConfigError
from lumina_ft.launch.local import describe_stage
from lumina_ft.launch.plan_view import describe_run, print_run


def run_config(dataset: Path, **lora: Any) -> RunConfig:
    stages = [
        {"name": "a", "steps": 3},
        {"name": "b", "steps": 2, "lora": "freeze", "train": ["heads"], "lora_at_end": "merge"},
        {"name": "c", "steps": 2, "lora": "off"},
    ]
    return RunConfig.model_validate(
        {
            "output_dir": dataset.parent / "out",
            "model": {"config": "u2-tiny", "random_init": True},
            "data": {"path": dataset},
            "lora": {"rank": 4, **lora},
            "stages": stages,
        }
    )


def test_D5_the_plan_has_the_adapters_course_and_its_targets(dataset, capsys):
    cfg = run_config(dataset, targets=["attention.dense"])
    plan = describe_run(cfg)
    assert [stage["adapter"] for stage in plan["stages"]] == ["train", "freeze", "off"]
    assert [stage["adapter_at_end"] for stage in plan["stages"]] == ["keep", "merge", None]
    assert list(plan["stages"][0]["groups"]) == ["lora"]
    (row,) = plan["adapter"]
    assert (row["target"], row["rank"]) == ("attention.dense", 4)
    assert row["parameters"] == row["modules"] * 4 * (row["in_features"] + row["out_features"])
    print_run(cfg)
    shown = capsys.readouterr().out
    assert "attention.dense" in shown and "freeze, merge" in shown and f"{row['parameters']:,}" in shown


def test_D5_a_target_that_matches_nothing_is_found_before_ranks_start(dataset):
    with pytest.raises(ConfigError, match="lora.targets — 'atention' — matches no module.*did you mean 'attention'"):
        describe_run(run_config(dataset, targets=["atention"]))


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        ({"train": ("heads",)}, "heads for 3 steps"),
        ({"train": (), "lora": "train"}, "adapter for 3 steps"),
        ({"train": ("lm_head",), "lora": "train", "lora_at_end": "merge"}, "adapter, lm_head for 3 steps, then merge"),
        ({"train": ("heads",), "lora": "freeze"}, "heads over the frozen adapter for 3 steps"),
    ],
)
def test_stages_are_described_with_their_adapter(stage, text):
    assert describe_stage(StageConfig(name="s", steps=3, **stage)).startswith(text)
