"""scripts/gpu_check.sh: steps end in time, and their results are kept whatever happens after them."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def steps_of(check, **code):
    return [check.Step(name, ["-c", text], 20.0) for name, text in code.items()]


def test_results_of_all_steps_are_in_one_file(check, tmp_path):
    steps = steps_of(check, right="print('noise')\nprint('{\"ms\": 1.5}')", words="print('2 passed')")
    assert check.run_steps(steps, tmp_path / "out.json", 60.0)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["passed"] and found["steps"]["right"]["result"] == {"ms": 1.5}
    assert found["steps"]["words"]["stdout"] == ["2 passed"] and "stderr" not in found["steps"]["words"]


def test_a_failed_step_keeps_its_last_words_and_the_others_run(check, tmp_path):
    steps = steps_of(check, broken="raise ValueError('no such kernel')", after="print('{}')")
    assert not check.run_steps(steps, tmp_path / "out.json", 60.0)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["steps"]["broken"]["stderr"][-1] == "ValueError: no such kernel"
    assert not found["passed"] and found["steps"]["after"]["exit"] == 0


def test_a_peer_that_fails_doesnt_fail_the_check(check, tmp_path):
    step = check.Step("peers", ["-c", "raise SystemExit(1)"], 20.0, required=False)
    assert check.run_steps([step], tmp_path / "out.json", 60.0)


def test_a_step_is_ended_at_its_limit_with_all_its_processes(check):
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    step = check.Step("slow", ["-c", child + "print('started', flush=True); time.sleep(60)"], 2.0)
    found = check.run_step(step, 2.0)
    assert found["exit"] is None and found["seconds"] < 20 and found["stdout"] == ["started"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_tried(check, tmp_path):
    """The benchmarks' real sizes would fill a CPU's memory."""
    assert not check.run_steps(check.real_steps(), tmp_path / "out.json", 300.0)
    steps = json.loads((tmp_path / "out.json").read_text())["steps"]
    assert steps.keys() == {"environment"}
    assert steps["environment"]["stderr"][-1].startswith("no CUDA device; --rehearse")


def test_what_the_budget_doesnt_hold_is_left_out_and_said(check, tmp_path):
    steps = steps_of(check, long="import time; time.sleep(30)", late="print(1)")
    assert not check.run_steps(steps, tmp_path / "out.json", 2.0)
    found = json.loads((tmp_path / "out.json").read_text())["steps"]
    assert found["long"]["exit"] is None and found["late"] == {"exit": None, "left out": "budget"}


def test_the_required_steps_fit_into_eight_minutes(check):
    steps = check.real_steps()
    required = [step for step in steps if step.required]
    assert steps[: len(required)] == required, "peers come last"
    assert sum(step.seconds for step in required) <= 480 and check.BUDGET_SECONDS < 480


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_rehearsal_passes_on_a_cpu(tmp_path):
    output = tmp_path / "check.json"
    command = ["sh", str(ROOT / "scripts" / "gpu_check.sh"), "--rehearse", "--output", str(output)]
    done = subprocess.run(command, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = json.loads(output.read_text())["steps"]
    assert steps.keys() == {"environment", "tests", "moe", "attention", "training steps", "router and loss"}
    timed = [
        side for made in steps["moe"]["result"]["contests"] for name, side in made["sides"].items() if name == "triton"
    ]
    assert len(timed) == 3 and all(side["forward_ms"] > 0 for side in timed)
    assert steps["training steps"]["result"]["cases"]["tiny"]["sides"].keys() == {"triton", "torch", "eager"}
