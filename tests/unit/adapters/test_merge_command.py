"""`lumina-ft merge-lora`: what it takes, what it refuses, what it reports (D5)."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from merge_fixtures import DENSE, EXPERTS, TARGETS, plain_merge, tiny_model, write_adapter, write_base
from safetensors.torch import load_file

from lumina_ft.checkpoint.commit import new_checkpoint
from lumina_ft.checkpoint.directory import TrainState
from lumina_ft.errors import ConfigError
from lumina_ft.merge_lora import parse_adapter

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    return write_adapter(tmp_path / "adapter", base)


def write_run(directory: Path, *checkpoints: dict, at_end: str = "keep") -> Path:
    """A run of one stage with these checkpoints: keyword arguments of TrainState, and `base` to make an adapter for."""
    config = f"""
output_dir: {directory}
model: {{config: u2-tiny, random_init: true}}
data: {{path: {directory}/data}}
lora: {{rank: 4}}
stages: [{{name: digits, steps: 10, lora_at_end: {at_end}}}]
"""
    directory.mkdir()
    (directory / "run.yaml").write_text(config)
    for step, options in enumerate(checkpoints, start=1):
        at = options.pop("stage_step", step)
        state = TrainState(step, 0, "digits", at, 10, at, 1.0, 10, {}, **options)
        with new_checkpoint(directory, state) as folder:
            if state.adapter != "none":
                write_adapter(folder / "adapter", Path(options["base"]), seed=step)
            else:
                write_base(folder / "model")
    return directory / "run.yaml"


def merged_weight(directory: Path) -> torch.Tensor:
    return load_file(directory / "model.safetensors")[f"{DENSE}.weight"]


def wanted_weight(adapter: Path) -> torch.Tensor:
    return plain_merge(tiny_model().state_dict()[f"{DENSE}.weight"], adapter, DENSE).float()


def test_named_directories_merge_and_report_as_json_and_as_text(run: Run, tmp_path: Path, base: Path, adapter: Path):
    output = tmp_path / "out"
    arguments = ("--base", base, "--adapter", adapter, "--output", output)
    code, out, err = run("merge-lora", *arguments, "--json", "--layout", "split", "--dtype", "bfloat16")
    assert code == 0, err
    (line,) = out.splitlines()
    result = json.loads(line)
    assert result["verified"] and result["layout"] == "split" and result["output"] == str(output)
    assert set(result["check"]["cosines"]) == {f"{module}.weight" for module in TARGETS}
    assert result["lowest_delta_cosine"] == min(result["check"]["cosines"].values())
    assert result["adapters"] == [{"path": str(adapter), "weight": 1.0}] and result["logits"]["largest"] < 0.1
    assert torch.equal(merged_weight(output), wanted_weight(adapter).bfloat16())
    code, out, err = run("merge-lora", *arguments, "--overwrite")
    assert code == 0 and "attention.dense" in out and f"model: {output}" in out and "3 tensors are base" in out


def test_experts_are_reported_one_by_one(run: Run, tmp_path: Path, base: Path):
    adapter = write_adapter(tmp_path / "adapter", base, experts=("gate_proj", "down_proj"))
    arguments = ("--base", base, "--adapter", adapter, "--output", tmp_path / "out")
    code, out, err = run("merge-lora", *arguments, "--json")
    assert code == 0, err
    experts = json.loads(out)["check"]["experts"]
    assert set(experts) == {f"{EXPERTS}.gate_proj", f"{EXPERTS}.down_proj"}
    found = experts[f"{EXPERTS}.down_proj"]
    assert (found["trained"], found["untrained"], found["low"]) == (4, 0, 0)
    code, out, err = run("merge-lora", *arguments, "--overwrite")
    assert code == 0 and "mlp.experts.down_proj" in out and "5 tensors are base" in out
    assert f"experts: 8 matrices in 2 tensors, lowest delta cosine 1.000000 ({EXPERTS}." in out


def test_weights_and_several_adapters(run: Run, tmp_path: Path, base: Path, adapter: Path):
    other = write_adapter(tmp_path / "other", base, seed=1)
    code, out, err = run(
        "merge-lora",
        "--base",
        base,
        "--adapter",
        f"{adapter}=0.5",
        "--adapter",
        f"{other}=-1",
        "--output",
        tmp_path / "out",
        "--json",
    )
    assert code == 0, err
    assert [a["weight"] for a in json.loads(out)["adapters"]] == [0.5, -1.0]
    w = tiny_model().state_dict()[f"{DENSE}.weight"].double()
    wanted = w + 0.5 * (plain_merge(w, adapter, DENSE) - w) - (plain_merge(w, other, DENSE) - w)
    torch.testing.assert_close(merged_weight(tmp_path / "out"), wanted.float(), rtol=1e-6, atol=1e-7)


def test_parsing_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("odd=name").mkdir()
    assert parse_adapter("a/b") == (Path("a/b"), 1.0) and parse_adapter("a=b=-2e-1") == (Path("a=b"), -0.2)
    assert parse_adapter("odd=name") == (Path("odd=name"), 1.0)
    with pytest.raises(ConfigError, match=r"--adapter — a=much — 'much' must be a number"):
        parse_adapter("a=much")


def test_a_run_gives_its_newest_adapter_and_its_base(run: Run, tmp_path: Path, base: Path):
    config = write_run(tmp_path / "run", *({"adapter": "kept", "base": str(base)} for _ in range(2)))
    code, out, err = run("merge-lora", "--config", config, "--json")
    assert code == 0, err
    newest = tmp_path / "run" / "checkpoints" / "checkpoint-2" / "adapter"
    assert json.loads(out)["adapters"][0]["path"] == str(newest)
    assert json.loads(out)["base"] == str(base)
    assert torch.equal(merged_weight(tmp_path / "run" / "merged"), wanted_weight(newest))
    code, _, err = run("merge-lora", "--config", config)
    assert code == 2 and "merged — exists" in err
    elsewhere = tmp_path / "elsewhere"
    assert run("merge-lora", "--config", config, "--output", elsewhere)[0] == 0 and elsewhere.is_dir()
    moved = tmp_path / "moved"
    (tmp_path / "run").rename(moved)
    assert run("merge-lora", "--config", moved / "run.yaml", f"output_dir={moved}", "--overwrite")[0] == 0


def test_a_dropped_adapter_can_still_be_merged(run: Run, tmp_path: Path, base: Path):
    config = write_run(tmp_path / "run", {"adapter": "dropped", "base": str(base), "stage_step": 10})
    assert run("merge-lora", "--config", config)[0] == 0


@pytest.mark.parametrize(
    ("checkpoints", "at_end", "message"),
    [
        ([], "keep", "no complete checkpoint"),
        ([{"stage_step": 10}], "merge", "'digits' ended with lora_at_end: merge, so its adapter is merged already"),
        ([{"adapter": "kept"}, {"stage_step": 10}], "merge", "checkpoint-2/model"),
        ([{}], "keep", "'digits' has no adapter — there is nothing to merge — the model is"),
        ([{"adapter": "kept", "gone": True}], "keep", "no such directory; the adapter was trained on it"),
    ],
)
def test_a_run_with_nothing_to_merge_says_where_its_model_is(
    run: Run, tmp_path: Path, base: Path, checkpoints: list[dict], at_end: str, message: str
):
    gone = any(options.pop("gone", False) for options in checkpoints)
    filled = [{**options, "base": str(base)} if "adapter" in options else dict(options) for options in checkpoints]
    config = write_run(tmp_path / "run", *filled, at_end=at_end)
    if gone:
        base.rename(tmp_path / "gone")
    code, out, err = run("merge-lora", "--config", config, "--json")
    assert code == 2 and message in err and "Traceback" not in err
    assert json.loads(out)["kind"] == "CheckpointError" and not (tmp_path / "run" / "merged").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--config — or --base with --adapter and --output"),
        (["--config", "RUN", "--base", "BASE"], "give one of the two"),
        (["--base", "BASE", "--output", "OUT"], "--adapter — missing"),
        (["--adapter", "ADAPTER", "--output", "OUT"], "--base — missing"),
        (["--base", "BASE", "--adapter", "ADAPTER"], "--output — missing"),
        (["--base", "BASE", "--adapter", "ADAPTER", "--output", "OUT", "seed=1"], "seed=1 — an override without"),
        (["--base", "BASE", "--adapter", "ADAPTER=x", "--output", "OUT"], "'x' must be a number"),
        (["--base", "BASE", "--adapter", "nowhere", "--output", "OUT"], "adapter_config.json — not found"),
        (["--base", "nowhere", "--adapter", "ADAPTER", "--output", "OUT"], "nowhere — is not a directory"),
        (["--base", "BASE", "--adapter", "ADAPTER", "--output", "BASE", "--overwrite"], "which is merged"),
    ],
)
def test_wrong_wishes_are_one_line_with_exit_code_2(
    run: Run, tmp_path: Path, base: Path, adapter: Path, arguments: list[str], message: str
):
    names = {"BASE": base, "ADAPTER": adapter, "OUT": tmp_path / "out", "RUN": tmp_path / "run.yaml"}
    for name, path in names.items():
        arguments = [argument.replace(name, str(path)) for argument in arguments]
    before = sorted(tmp_path.iterdir())
    code, _, err = run("merge-lora", *arguments)
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and message in line and sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("inside", ["model", "merged", "adapter/merged"])
def test_an_output_inside_a_checkpoint_is_refused(run: Run, tmp_path: Path, base: Path, adapter: Path, inside: str):
    write_run(tmp_path / "run", {})
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    before = sorted(checkpoint.rglob("*"))
    output = checkpoint / inside
    code, _, err = run("merge-lora", "--base", base, "--adapter", adapter, "--output", output, "--overwrite")
    assert code == 2 and f"--output — {output} — lies in {checkpoint}, a checkpoint of a run" in err
    assert sorted(checkpoint.rglob("*")) == before


def test_warnings_go_to_stderr(run: Run, tmp_path: Path, base: Path):
    plain = write_adapter(tmp_path / "plain", None)
    code, out, err = run("merge-lora", "--base", base, "--adapter", plain, "--output", tmp_path / "out", "--json")
    assert code == 0 and len(out.splitlines()) == 1
    assert "warning: " in err and "doesn't record the hashes of its base" in err


def test_a_failed_verification_exits_1(
    run: Run, tmp_path: Path, base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
):
    from lumina_ft.adapters import combine

    real = combine.lora_delta
    monkeypatch.setattr(combine, "lora_delta", lambda a, b, scale: real(a, b, 1.0))
    code, _, err = run("merge-lora", "--base", base, "--adapter", adapter, "--output", tmp_path / "out")
    assert code == 1 and f"error: verification — {DENSE}.weight at [0, 0] is" in err
    assert not (tmp_path / "out").exists()
