"""The same run under torchrun and deepspeed (deliver 5)."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lumina_ft.config.load import load_build
from lumina_ft.data.build import build
from lumina_ft.data.digits import write_digits
from lumina_ft.launch.checks import choose_port
from lumina_ft.monitor.metrics import WALL_TIME_KEYS, read_metrics

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port")
DEEPSPEED = ("-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port")
REPOSITORY = Path(__file__).resolve().parents[3]


def test_ranks_of_torchrun_become_the_next_stage(run_file: Path, start, seen) -> None:
    process = start(*TORCHRUN, str(choose_port(0)), "cli.py", "sft", "--json", "--config", str(run_file))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    (summary,) = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [s["name"] for s in summary["stages"]] == ["one", "two"]
    for rank in (0, 1):
        first, second = seen("one", rank), seen("two", rank)
        assert first["pid"] == second["pid"], "the launcher still watches its own child"
        assert (first["LUMINA_FT_FOREIGN_STAGE"], second["LUMINA_FT_FOREIGN_STAGE"]) == (None, "1")
        assert second["resume"] == str(run_file.parent / "out" / "checkpoints" / "checkpoint-3")
        assert second["open_sockets"] <= first["open_sockets"], "sockets of the first stage are closed"
    log = (run_file.parent / "out" / "log.txt").read_text()
    assert "logged in one" in log and "logged in two" in log


def test_an_error_of_every_rank_is_told_once(run_file: Path, start) -> None:
    process = start(*TORCHRUN, str(choose_port(0)), "cli.py", "sft", "--config", str(run_file), "optim.lrr=1")
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert len(re.findall("^error: optim.lrr", err, re.M)) == 1


@pytest.mark.slow
def test_T14_an_error_of_one_rank_is_told_without_what_it_does_to_the_others(run_file: Path, start) -> None:
    process = start(
        *TORCHRUN, str(choose_port(0)), "cli.py", "sft", "--json", "--config", str(run_file), mode="user-error"
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert re.findall("^error: .*", err, re.M) == ["error: rows.jsonl:7 — 9999 — must be below 4096 — fix the label"]
    assert "peer gone" not in err
    (result,) = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert (result["kind"], result["exit_code"]) == ("DataError", 2)


@pytest.mark.parametrize(
    ("launcher", "number", "told"),
    [
        (TORCHRUN, signal.SIGINT, signal.SIGINT),
        # It sends SIGTERM, whatever it got.
        pytest.param(DEEPSPEED, signal.SIGINT, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_launcher_lets_its_ranks_save(run_file: Path, start, launcher, number, told) -> None:
    """It passes a signal on and waits for 30 seconds; rank 0 says what is saved."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    sft = ("cli.py", "sft", "--json", "--config", str(run_file))
    process = start(*launcher, str(choose_port(0)), *sft, mode="stoppable", PATH=path)
    out_dir = run_file.parent / "out"
    deadline = time.monotonic() + 90
    while not all((out_dir / f"waiting-{rank}").exists() for rank in (0, 1)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    # DeepSpeed's outer process only waits for the one that has started the ranks.
    starter = psutil.Process(process.pid) if launcher is TORCHRUN else psutil.Process(process.pid).children()[0]
    starter.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode != 0
    (result,) = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert (result["kind"], result["exit_code"]) == ("Interrupted", 128 + told), err
    assert result["error"] == (
        f"stopped by {told.name} — stage 'one', saved after step 2 of 3 — "
        f"newest checkpoint: {out_dir}/checkpoints/checkpoint-2 — continue with: the same command and --resume"
    )
    assert re.findall("^error: .*", err, re.M) == [f"error: {result['error']}"]


@pytest.mark.slow
def test_ranks_of_torchrun_resume_from_the_checkpoint_that_rank_0_found_whole(run_file: Path, start, seen) -> None:
    sft = ("cli.py", "sft", "--config", str(run_file))
    _, err = start(*TORCHRUN, str(choose_port(0)), *sft).communicate(timeout=120)
    out_dir = run_file.parent / "out"
    damaged = out_dir / "checkpoints" / "checkpoint-5"
    state = (damaged / "state.json").read_text()
    (damaged / "state.json").write_text(state.replace('"tokens": 0', '"tokens": 1'))
    for stage, rank in (("one", 0), ("one", 1), ("two", 0), ("two", 1)):
        (out_dir / f"seen-{stage}-{rank}.json").unlink()
    process = start(*TORCHRUN, str(choose_port(0)), *sft, "--resume")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert not (out_dir / "seen-one-0.json").exists() and not (out_dir / "seen-one-1.json").exists()
    whole = out_dir / "checkpoints" / "checkpoint-3"
    assert {seen("two", rank)["resume"] for rank in (0, 1)} == {str(whole)}
    for text in (err, (out_dir / "log.txt").read_text()):
        assert len(re.findall(rf"^skipped {damaged} — state\.json has hash .*$", text, re.M)) == 1
        assert len(re.findall(rf"^resuming from {whole}$", text, re.M)) == 1


@pytest.mark.slow
def test_every_launcher_trains_the_same(tmp_path: Path) -> None:
    """Real training: our launcher, torchrun and deepspeed end with the same losses, bit for bit."""
    write_digits(tmp_path / "digits")
    build(load_build(None, [f"input={tmp_path}/digits/t2i_train.jsonl", f"output={tmp_path}/built"]))
    (tmp_path / "run.yaml").write_text(
        f"output_dir: {tmp_path}/out\n"
        "model: {config: u2-tiny, random_init: true, tokenizer: demo, dtype: float32}\n"
        f"data: {{path: {tmp_path}/built, max_pack_tokens: 512}}\n"
        "train: {packs_per_step: 2, plots: false, tensorboard: false}\n"
        "optim: {lr: 1e-3}\n"
        "stages:\n- {name: freeze_vision, freeze: [vision], steps: 2}\n- {name: heads, train: [heads], steps: 2}\n"
    )
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    sft = ("sft", "--config", f"{tmp_path}/run.yaml")
    losses = {}
    for name, command in (
        ("ours", ("cli.py", *sft, "parallel.ranks=2")),
        ("torchrun", (*TORCHRUN, str(choose_port(0)), "cli.py", *sft)),
        ("deepspeed", (*DEEPSPEED, str(choose_port(0)), "cli.py", *sft)),
    ):
        run_dir = tmp_path / name
        done = subprocess.run(
            [sys.executable, *command, f"output_dir={run_dir}", "--json"],
            cwd=REPOSITORY,
            env=env,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stderr
        assert "terminate called" not in done.stderr
        records = read_metrics(run_dir)
        assert [(r["stage"], r["step"]) for r in records] == [
            (stage, step) for stage in ("freeze_vision", "heads") for step in (1, 2)
        ]
        losses[name] = [{k: v for k, v in record.items() if k not in WALL_TIME_KEYS} for record in records]
    assert losses["ours"] == losses["torchrun"] == losses["deepspeed"]
