"""Whole stages on two ranks through `train_stage`: determinism, resume, frozen groups, memory, skipped steps."""

import json
import shutil
from pathlib import Path

import dist_tiny
import pytest
import torch
from dist_launch import launch_ranks, read_json
from safetensors.torch import load_file, save_file

from lumina_ft.checkpoint.directory import newest_checkpoint, read_state
from lumina_ft.models.groups import group_of
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.monitor.metrics import WALL_TIME_KEYS, read_metrics

VISION = {"image_embeddings", "image_projection"}
HEADS = {"lm_head", "image_heads", "codebook_head"}


class Runs:
    """Starts stages in a work directory that has the model config and the dataset."""

    def __init__(self, work: Path) -> None:
        self.work = work

    def stage(self, config: dict, index: int, start: Path | None = None, *, ranks: int = 2, ok: bool = True) -> str:
        """Run one stage; returns what the ranks printed."""
        path = self.work / f"{Path(config['output_dir']).name}.json"
        path.write_text(json.dumps(config))
        return launch_ranks("ranks_stage.py", path, index, *([start] if start else []), ranks=ranks, ok=ok).stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    work = tmp_path_factory.mktemp("runs")
    dist_tiny.prepare(work, samples=90)
    return Runs(work)


def records(run_dir: Path, stage: str) -> list[dict]:
    return [
        {key: value for key, value in record.items() if key not in WALL_TIME_KEYS}
        for record in read_metrics(run_dir)
        if record["stage"] == stage
    ]


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def staged(runs: Runs) -> Path:
    """Three stages, each in fresh ranks, ZeRO-3."""
    config = dist_tiny.run_config(runs.work, "staged")
    run_dir = Path(config["output_dir"])
    runs.stage(config, 0)
    runs.stage(config, 1, run_dir / "checkpoints" / "checkpoint-5")
    runs.stage(config, 2, run_dir / "checkpoints" / "checkpoint-8")
    return run_dir


def test_D3_every_stage_ends_with_a_complete_checkpoint_numbered_over_all_stages(staged):
    ends = [read_state(staged / "checkpoints" / f"checkpoint-{n}") for n in (5, 8, 11)]
    assert [(s.stage_index, s.stage_name, s.stage_step) for s in ends] == [
        (0, "no_vision", 5),
        (1, "heads", 3),
        (2, "full", 3),
    ]
    assert all(s.stage_finished for s in ends)
    newest = newest_checkpoint(staged)
    assert newest is not None and newest.path.name == "checkpoint-11"
    assert (newest.model_dir / "tokenizer.json").is_file()
    summary = read_json(staged / "summary.json")
    assert [(s["name"], s["steps"]) for s in summary] == [("no_vision", 5), ("heads", 3), ("full", 3)]
    assert all("eval_loss" in s["losses"] and s["tokens"] > 0 for s in summary)


def test_D3_frozen_groups_stay_bitwise_and_trained_ones_move(staged):
    model = U2ForDiffusion(U2Config.load(staged.parent / "tiny.json"))
    model.init_weights_(3)
    states = [dict(model.named_parameters())]
    states += [weights(staged / "checkpoints" / f"checkpoint-{n}") for n in (5, 8, 11)]
    names = list(states[0])
    moved = [
        {group_of(n) for n in names if not torch.equal(before[n], after[n])}
        for before, after in zip(states, states[1:], strict=False)
    ]
    assert moved[0] & VISION == set() and {"experts", "router", "attention"} | HEADS <= moved[0]
    assert moved[1] == HEADS
    assert VISION | HEADS | {"experts", "norms"} <= moved[2]


def test_saved_model_loads_with_from_pretrained(staged):
    directory = staged / "checkpoints" / "checkpoint-11"
    model = U2ForDiffusion.from_pretrained(directory / "model")
    stored = weights(directory)
    assert all(torch.equal(p, stored[n]) for n, p in model.named_parameters())


@pytest.mark.slow
def test_same_seed_gives_identical_losses(runs, staged):
    config = dist_tiny.run_config(runs.work, "again")
    runs.stage(config, 0)
    assert records(Path(config["output_dir"]), "no_vision") == records(staged, "no_vision")


def test_resumed_stage_gives_identical_remaining_losses_and_weights(runs, staged):
    """Saving every step and keeping one, the run must not delete the checkpoint that it was resumed from."""
    config = dist_tiny.run_config(runs.work, "resumed")
    config["train"] |= {"save_every_steps": 1, "keep_checkpoints": 1}
    target = Path(config["output_dir"])
    dist_tiny.copy_run(staged, target, keep=["checkpoint-3"])
    runs.stage(config, 0, target / "checkpoints" / "checkpoint-3")
    assert records(target, "no_vision") == records(staged, "no_vision")
    name = "checkpoint-5"
    ours, theirs = weights(target / "checkpoints" / name), weights(staged / "checkpoints" / name)
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_one_rank_sees_the_same_packs_as_two(runs, staged):
    config = dist_tiny.run_config(runs.work, "single", parallel={"ranks": 1, "zero": "zero2"})
    runs.stage(config, 0, ranks=1)
    single, double = records(Path(config["output_dir"]), "no_vision"), records(staged, "no_vision")
    assert [r.get("tokens") for r in single] == [r.get("tokens") for r in double]
    for one, two in zip(single, double, strict=True):
        compared = {key for key in two if "loss" in key} | ({"grad_norm"} & two.keys())
        assert {key: one[key] for key in compared} == pytest.approx({key: two[key] for key in compared}, rel=1e-3)
    assert single[0]["loss"] == pytest.approx(double[0]["loss"], rel=1e-6)


@pytest.mark.slow
def test_stage_three_needs_no_more_memory_than_alone(runs, staged):
    stages = dist_tiny.run_config(runs.work, "x")["stages"][2:]
    config = dist_tiny.run_config(runs.work, "alone", stages=stages)
    runs.stage(config, 0)
    alone = read_json(Path(config["output_dir"]) / "summary.json")[0]["anonymous_rss_mib"]
    in_run = read_json(staged / "summary.json")[2]["anonymous_rss_mib"]
    assert in_run <= 1.1 * alone


def test_T4_a_nonfinite_weight_stops_every_rank_and_names_place_and_samples(runs, staged):
    """The image table is broken, so text-only packs stay finite: the ranks must agree all the same."""
    broken = runs.work / "broken"
    shutil.copytree(staged / "checkpoints" / "checkpoint-5" / "model", broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.img_embeddings.0.weight"][:] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    config = dist_tiny.run_config(runs.work, "nonfinite", model={"path": str(broken), "dtype": "float32"})
    config["train"] |= {"on_nonfinite": "skip", "max_skipped_steps": 1}
    output = runs.stage(config, 0, ok=False)
    assert output.count("RunError: stage 'no_vision' step 2 — non-finite values (") == 2
    assert "embeddings.image" in output
    assert "step skipped on every rank" in output
    report = read_json(Path(config["output_dir"]) / "nonfinite" / "no_vision-step-1.json")
    assert [r["rank"] for r in report] == [0, 1]
    assert all(ids for r in report for ids in r["sample_ids"])


def test_steps_without_supervision_are_skipped_logged_and_checkpointed(runs):
    config = dist_tiny.run_config(runs.work, "idle", loss={"text": 0.0}, parallel={"ranks": 1, "zero": "zero3"})
    config["data"] |= {"tasks": ["text"], "eval_fraction": 0.0}
    runs.stage(config, 0, ranks=1)
    run_dir = Path(config["output_dir"])
    logged = records(run_dir, "no_vision")
    assert [(r["step"], r["skipped"], "loss" in r) for r in logged] == [(n, 1, False) for n in range(1, 6)]
    first, last = (weights(run_dir / "checkpoints" / f"checkpoint-{n}") for n in (3, 5))
    assert all(torch.equal(first[n], last[n]) for n in first)
    newest = newest_checkpoint(run_dir)
    assert newest is not None and (newest.state.adam_steps, newest.state.tokens) == (0, 0)
