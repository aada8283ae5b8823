"""T14: a rank that hangs ends the run within the limit, named, with stage, step, module and batch."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import dist_tiny
import pytest
from dist_launch import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
PLANT = Path(__file__).with_name("hang_plant")
LIMIT_SECONDS = 12.0
SLACK_SECONDS = 15.0
"""A quarter of the limit for reports to come in, then the end of two processes and their launcher."""

HUNG_STEP = 2


@dataclass(frozen=True)
class Ended:
    """How a run with a planted hang ended.

    Attributes:
        seconds: from the hang to the end of the launcher.
        message: the error as printed.
        result: the JSON object on stdout.
    """

    code: int
    seconds: float
    message: str
    result: dict
    run_dir: Path


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("hang")
    dist_tiny.prepare(work, samples=90)
    return work


def run_and_hang(
    work: Path, how: str, launcher: tuple[str, ...] = (), zero: str = "zero3", **sections: object
) -> Ended:
    """Start a run through the command line and let rank 1 hang in its third step."""
    sections.setdefault("stages", [{"name": "heads", "train": ["heads"], "steps": 5}])
    config = dist_tiny.run_config(
        work,
        f"{how}-{zero}-{len(launcher)}",
        parallel={"ranks": 2, "zero": zero, "timeout_minutes": LIMIT_SECONDS / 60},
        **sections,
    )
    run_dir = Path(config["output_dir"])
    struck = work / f"{run_dir.name}.struck"
    path = work / f"{run_dir.name}.yaml"
    path.write_text(json.dumps(config))
    plant = {"rank": 1, "step": HUNG_STEP, "how": how, "touch": str(struck)}
    env = {**os.environ, "PYTHONPATH": str(PLANT), "DS_ACCELERATOR": "cpu", "LUMINA_FT_TEST_HANG": json.dumps(plant)}
    command = [*(launcher or (sys.executable,)), "cli.py", "sft", "--json", "--config", str(path)]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=300)
    assert struck.exists(), done.stderr
    seconds = time.time() - struck.stat().st_mtime
    errors = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
    result = json.loads(done.stdout.splitlines()[-1])
    print(f"{how}: {seconds:.1f} s after the hang\n{done.stderr}")
    return Ended(done.returncode, seconds, "\n".join(errors), result, run_dir)


def check(ended: Ended, reason: str) -> None:
    """Everything that T14 asks for, told once."""
    assert ended.code == 1
    assert ended.seconds < LIMIT_SECONDS + SLACK_SECONDS
    assert re.search(rf"^hang — rank 1 \([^)]*pid \d+\) missing: {reason}", ended.message), ended.message
    assert ended.message.count("hang —") == 1
    lines = ended.message.splitlines()
    missing = lines[1]
    assert missing.startswith("  rank 1, missing")
    assert f"stage 'heads', step {HUNG_STEP + 1} of 5" in missing
    batch = next(line for line in lines[1:] if line.startswith("    batch: "))
    assert re.search(r"batch: samples \d+ \(dataset rows \d+.*(t2i|understand|text) \d+\), tokens \d+ of \d+, ", batch)
    assert re.search(r"supervised positions: text \d+, image \d+", batch)
    waiting = next(line for line in lines if line.startswith("  rank 0: "))
    assert re.search(r"inside collective \d+|waiting after collective \d+", waiting), waiting
    assert (ended.result["kind"], ended.result["exit_code"]) == ("RunError", 1)
    assert ended.result["error"] == ended.message
    assert (ended.run_dir / "hang").is_dir()


@pytest.mark.slow
def test_T14_a_rank_that_sleeps_inside_a_collective_is_named(work):
    ended = run_and_hang(work, "collective")
    check(ended, "held up on the way into collective")
    lines = ended.message.splitlines()
    assert "micro-batch 1, forward; last module lm_img_head.3" in lines[1]
    assert "inside collective" in lines[1] and "(all_reduce)" in lines[1]
    # The waiting rank is shown from where it called the collective on.
    assert "lumina_ft/parallel/dist.py:" in lines[5] and "in max" in lines[5]
    assert lines[2].startswith("    at hang_plant/sitecustomize.py:") and " in collective <" in lines[2]


def test_T14_a_stopped_rank_is_named_with_the_place_that_its_neighbour_reads(work):
    ended = run_and_hang(work, "stop")
    check(ended, "wrote no report")
    missing = ended.message.splitlines()[1]
    assert "no report; its process, stopped, is in stage" in missing
    assert "micro-batch 1, forward; last module model.layers.1.mlp; outside collectives" in missing


@pytest.mark.slow
@pytest.mark.parametrize("zero", ["zero2", "zero3"])
def test_T14_a_rank_that_sleeps_in_a_module_is_named_with_the_module(work, zero):
    ended = run_and_hang(work, "forward", zero=zero)
    check(ended, r"entered \d+ collectives, where others have entered \d+")
    lines = ended.message.splitlines()
    assert "micro-batch 1, forward; last module model.layers.1.mlp; outside collectives" in lines[1]
    assert "    at hang_plant/sitecustomize.py:" in lines[2]


@pytest.mark.slow
def test_T14_a_rank_that_holds_the_lock_of_python_is_named(work):
    ended = run_and_hang(work, "lock")
    check(ended, "wrote no report")
    assert "forward; last module model.layers.1.mlp; outside collectives" in ended.message.splitlines()[1]


@pytest.mark.slow
def test_T14_the_same_under_another_launcher(work):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}")
    ended = run_and_hang(work, "forward", launcher=torchrun)
    check(ended, r"entered \d+ collectives, where others have entered \d+")


@pytest.mark.slow
def test_T14_a_long_evaluation_and_a_long_save_are_no_hangs(work):
    """Both take longer than the limit: the first on every rank, the second on the rank that writes."""
    data = {"path": str(work / "data"), "eval_fraction": 0.3, "max_pack_tokens": 160}
    stages = [{"name": "full", "steps": HUNG_STEP + 1}]
    ended = run_and_hang(work, "slow", zero="zero2", data=data, stages=stages)
    assert ended.code == 0, ended.message
    assert ended.seconds > 2 * LIMIT_SECONDS
    assert not (ended.run_dir / "hang").exists()
