"""The published sizes, two layers of them: a dense one and one with 256 experts (M5, T9)."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import dist_tiny
import pytest
from dist_launch import launch_ranks, read_json

from lumina_ft.models.u2_config import U2Config
from lumina_ft.monitor.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
STEPS = 3
STATES = ("parameters", "gradients", "optimizer")

pytestmark = pytest.mark.slow


def run(*command: object) -> str:
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """(plan of the run, what its ranks measured, its metrics)."""
    work = tmp_path_factory.mktemp("width")
    run("scripts/make_checkpoint.py", work / "model", "--layers", 2, "--layout", "packed")
    spec = U2Config.load(work / "model").token_spec()
    dist_tiny.write_dataset(work / "data", samples=30, spec=spec)
    config = {
        "output_dir": str(work / "run"),
        "model": {"path": str(work / "model"), "tokenizer": "demo", "dtype": "bfloat16"},
        "data": {"path": str(work / "data"), "max_pack_tokens": 512},
        "lora": {"rank": 16, "alpha": 32, "targets": ["attention", "experts"]},
        "optim": {"lr": 5e-3, "warmup_ratio": 0.0, "schedule": "constant"},
        "train": {"packs_per_step": RANKS, "tensorboard": False, "plots": False},
        "parallel": {"ranks": RANKS, "zero": "zero3", "expert_parallel_size": RANKS},
        "stages": [{"name": "adapter", "steps": STEPS}],
    }
    (work / "run.json").write_text(json.dumps(config))
    # JSON is YAML.
    (work / "run.yaml").write_text(json.dumps(config))
    plan = json.loads(run("-m", "lumina_ft", "plan", "--config", work / "run.yaml", "--json").splitlines()[-1])
    launch_ranks("ranks_real_width.py", work / "run.json", work, ranks=RANKS, timeout=1500)
    yield plan, [read_json(work / f"memory-{rank}.json") for rank in range(RANKS)], read_metrics(work / "run")
    shutil.rmtree(work)


def test_three_steps_at_real_width_are_finite_and_the_loss_falls(trained) -> None:
    records = [record for record in trained[2] if "loss" in record]
    losses = [record["loss"] for record in records]
    assert len(losses) == STEPS
    assert all(math.isfinite(value) for record in records for value in (record["loss"], record["grad_norm"]))
    assert losses[0] > losses[1] > losses[2]


def test_states_at_real_width_are_as_planned_to_the_byte(trained) -> None:
    (stage,) = trained[0]["memory"]["stages"]
    for planned, measured in zip(stage["ranks"], trained[1], strict=True):
        assert measured["states"] == [[planned[name] for name in STATES]] * (STEPS - 1)


def test_peak_at_real_width_is_near_its_estimate(trained, record_property) -> None:
    (stage,) = trained[0]["memory"]["stages"]
    record_property("estimate_bytes", stage["peak"]["total"])
    record_property("peak_bytes", [measured["peak"] for measured in trained[1]])
    record_property("losses", [record["loss"] for record in trained[2] if "loss" in record])
    for measured in trained[1]:
        assert 0.9 <= measured["peak"] / stage["peak"]["total"] <= 1.2, (measured["peaks"], stage["peak"])
