"""`lumina-ft plan`: bytes per rank and stage, layouts of a model, and what the peak is made of."""

import json
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lumina_ft.commands.models import app
from lumina_ft.config.schema import RunConfig
from lumina_ft.errors import ConfigError
from lumina_ft.models.u2_config import U2Config
from lumina_ft.plan.activations import Workload, layer_tape, text_tape
from lumina_ft.plan.memory import describe_layouts, describe_run_memory
from lumina_ft.plan.peak import estimate_peak
from lumina_ft.plan.states import stage_states
from lumina_ft.plan.tables import print_layouts, print_run_memory

STATES = ("parameters", "gradients", "optimizer")
CONFIG = U2Config.load("u2-tiny")
LOAD = Workload(tokens=512, text=100, image=50)


def run(**sections: Any) -> RunConfig:
    base: dict[str, Any] = {
        "output_dir": "run",
        "model": {"config": "u2-tiny", "random_init": True, "dtype": "bfloat16"},
        "data": {"path": "missing"},
        "train": {"packs_per_step": 8},
        "parallel": {"ranks": 4, "zero": "zero3"},
        "stages": [{"name": "heads", "train": ["heads"], "steps": 1}, {"name": "all", "steps": 1}],
    }
    return RunConfig.model_validate({**base, **sections})


def layouts(**options: Any) -> dict[str, Any]:
    return describe_layouts("u2-tiny", ranks=4, **options)


def printed(show: Any, *args: Any) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(*args, console)
    return console.export_text()


def test_every_stage_and_rank_is_planned_by_what_it_trains():
    memory = describe_run_memory(run())
    heads, everything = memory["stages"]
    assert [stage["name"] for stage in memory["stages"]] == ["heads", "all"]
    assert [held["rank"] for held in heads["ranks"]] == [0, 1, 2, 3]
    for small, large in zip(heads["ranks"], everything["ranks"], strict=True):
        assert small["parameters"] == large["parameters"]
        assert small["gradients"] < large["gradients"] and small["optimizer"] < large["optimizer"]
        assert small["total"] == sum(small[name] for name in STATES)
    text = printed(print_run_memory, memory)
    assert "0-3" in text and f"{heads['ranks'][0]['optimizer'] / 2**20:,.1f}" in text
    assert "needs the data set" in text


def test_an_adapter_costs_gradients_and_optimizer_for_its_own_parameters_alone():
    lora = {"rank": 4, "targets": ["attention", "experts"]}
    cfg = run(lora=lora, stages=[{"name": "adapter", "steps": 1}], parallel={"ranks": 1, "zero": "zero2"})
    states = stage_states(cfg, 0, CONFIG)
    trained = sum(info.numel for info in states.plan.trained)
    assert 0 < trained < 0.2 * sum(p.info.numel for p in states.params)
    (held,) = states.ranks
    assert held.gradients == trained * 4
    assert held.optimizer - 12 * trained in range(4, 17)


def test_shared_experts_are_divided_among_the_ranks_that_hold_the_same_ones():
    rows = {(row["zero"], row["expert_parallel_size"]): row for row in layouts()["rows"]}
    experts = 2 * sum(p.info.numel for p in stage_states(run(), 1, CONFIG).params if p.info.group == "experts")
    saved = rows["zero2", 1]["parameters"] - rows["zero2", 4]["parameters"]
    assert 0 <= saved - experts * 3 // 4 < 64, "padding aside"
    assert rows["zero3", 1]["optimizer"] == pytest.approx(rows["zero3", 4]["optimizer"], abs=64)
    assert ("zero0", 1) in rows and ("zero0", 2) not in rows
    assert "zero3" in printed(print_layouts, layouts(zero="zero3", lora_rank=8))


def test_layouts_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"--expert-parallel-size — 3 — must divide --ranks=4"):
        layouts(expert_parallel_size=3)
    with pytest.raises(ConfigError, match="above 1 with ZeRO-0"):
        layouts(expert_parallel_size=2, zero="zero0")
    with pytest.raises(ConfigError, match="nothing_like_it"):
        layouts(lora_rank=4, lora_targets=["nothing_like_it"])


def test_the_peak_is_the_sum_of_its_parts_and_grows_with_the_pack():
    cfg = run()
    states = stage_states(cfg, 1, CONFIG)
    small = estimate_peak(cfg, CONFIG, states, LOAD, 1000)
    large = estimate_peak(cfg, CONFIG, states, Workload(5120, 1000, 500), 1000)
    assert small.total == small.states + small.gathered + small.activations + small.gradients + 1000
    assert large.activations > 5 * small.activations
    assert large.phase.startswith("pass: ")


def test_an_adapters_run_below_zero3_never_holds_an_fp32_copy_of_the_model():
    lora = {"rank": 1, "targets": ["attention"]}
    cfg = run(lora=lora, stages=[{"name": "adapter", "steps": 1}], parallel={"ranks": 2, "zero": "zero2"})
    states = stage_states(cfg, 0, CONFIG)
    peak = estimate_peak(cfg, CONFIG, states, Workload(1, 1, 1), 0)
    assert peak.states < 3 * sum(p.numel for p in states.params)


def test_checkpointing_keeps_one_row_per_token_and_layer():
    kept = {
        recomputed: layer_tape(CONFIG, LOAD, 2, routed=True, spread=False, recomputed=recomputed).kept
        for recomputed in (False, True)
    }
    assert kept[True] == LOAD.tokens * CONFIG.hidden_size * 2
    assert kept[False] > 10 * kept[True]


def test_logits_take_a_chunk_of_memory_unless_the_reference_runs():
    big = U2Config(hidden_size=2048, vocab_size=157_184)
    tapes = {
        (rows, chunked): text_tape(big, Workload(rows, rows, 1), 2, chunked=chunked, trained=True)
        for rows in (4096, 16_384)
        for chunked in (False, True)
    }
    assert tapes[4096, True].working == tapes[16_384, True].working < 3 * 2**30
    assert tapes[16_384, True].kept == 16_384 * big.hidden_size * 2
    assert tapes[16_384, False].working == 16_384 * 157_184 * 10
    few = Workload(100, 100, 1)
    assert text_tape(big, few, 2, chunked=True, trained=True) == text_tape(big, few, 2, chunked=False, trained=True)
    frozen = text_tape(big, Workload(4096, 4096, 1), 2, chunked=True, trained=False)
    assert tapes[4096, True].working - frozen.working == 157_184 * big.hidden_size * 4


def test_frozen_layers_before_the_first_trained_one_have_no_backward():
    heads = stage_states(run(), 0, CONFIG)
    everything = stage_states(run(), 1, CONFIG)
    load = Workload(4096, 1, 1)
    peaks = [estimate_peak(run(), CONFIG, states, load, 0) for states in (heads, everything)]
    assert "backward of layer" in peaks[1].phase
    assert "backward of layer" not in peaks[0].phase


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give exactly one"),
        (["--config", "run.yaml", "--model-config", "u2-tiny"], "give exactly one"),
        (["--config", "run.yaml", "--ranks", "2"], "--ranks — with --config"),
        (["--model-config", "u2-tiny", "optim.lr=1"], "an override without --config"),
        (["--model-config", "u2-tiny", "--zero", "zero2"], "--zero — without --ranks"),
        (["--model-config", "u2-tiny", "--ranks", "2", "--lora-target", "experts"], "without --lora-rank"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments, message):
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_json_has_the_bytes_of_a_run_and_of_layouts(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(run().model_dump(mode="json", exclude_defaults=True)))
    result = CliRunner().invoke(app, ["plan", "--config", str(path), "parallel.zero=zero2", "--json"])
    assert result.exception is None
    memory = json.loads(result.stdout.splitlines()[-1])["memory"]
    assert memory["zero"] == "zero2" and len(memory["stages"][1]["ranks"]) == 4
    result = CliRunner().invoke(app, ["plan", "--model-config", "u2-tiny", "--ranks", "2", "--zero", "zero3", "--json"])
    rows = json.loads(result.stdout.splitlines()[-1])["layouts"]["rows"]
    assert [row["expert_parallel_size"] for row in rows] == [1, 2]
