"""The same run under torchrun and deepspeed (deliver 5)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

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
