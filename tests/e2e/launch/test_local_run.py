"""`lumina-ft sft` as the parent of its ranks: stages, failures, signals (deliver 5, 8; V11)."""

import json
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from lumina_ft.monitor.metrics import read_metrics

SFT = ("-m", "lumina_ft", "sft", "--json", "--config")


def finish(process, timeout: float = 90) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def alive(seen, stage: str, rank: int) -> bool:
    """Whether a rank still runs; a zombie that nobody has reaped doesn't."""
    try:
        return psutil.Process(int(seen(stage, rank)["pid"])).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start_and_wait_for_ranks(run_file: Path, start):
    process = start(*SFT, str(run_file), mode="hang")
    deadline = time.monotonic() + 90
    while not all((run_file.parent / "out" / f"waiting-{rank}").exists() for rank in (0, 1)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    return process


def test_stages_run_in_fresh_ranks_leave_a_run_directory_and_resume(run_file: Path, start, seen) -> None:
    out_dir = run_file.parent / "out"
    code, out, err = finish(start(*SFT, str(run_file), "seed=3"))
    assert code == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert [s["name"] for s in summary["stages"]] == ["one", "two"]
    assert summary["stages"][1]["losses"] == {"loss": 1 / 5}
    assert summary["model"] == str(out_dir / "checkpoints" / "checkpoint-5" / "model")
    assert "printed in one" not in out, "ranks' output belongs on stderr"

    assert {seen(stage, rank)["WORLD_SIZE"] for stage in ("one", "two") for rank in (0, 1)} == {"2"}
    assert len({seen(stage, rank)["pid"] for stage in ("one", "two") for rank in (0, 1)}) == 4
    assert seen("one", 1)["resume"] is None
    assert seen("two", 1)["resume"] == str(out_dir / "checkpoints" / "checkpoint-3")
    cores = len(os.sched_getaffinity(0))
    assert seen("one", 0)["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert seen("one", 0)["threads"] == max(1, cores // 2)

    log = (out_dir / "log.txt").read_text()
    for text in ("printed in one", "logged in two", f"port {seen('two', 0)['MASTER_PORT']}", "run complete"):
        assert text in log and text in err
    assert "seed: 3\n" in (out_dir / "run.yaml").read_text()
    (launch,) = json.loads((out_dir / "environment.json").read_text())
    assert launch["packages"]["torch"] and launch["cpu_cores"] == cores
    assert not (out_dir / "errors").exists()

    code, out, err = finish(start(*SFT, str(run_file)))
    assert code == 2 and "already holds a run" in err
    assert json.loads(out)["kind"] == "ConfigError"

    complete = read_metrics(out_dir)
    (out_dir / "checkpoints" / "checkpoint-5" / "COMPLETE").unlink()
    (out_dir / "seen-one-0.json").unlink()
    code, _, err = finish(start(*SFT, str(run_file), "seed=3", "--resume"))
    assert code == 0, err
    assert not (out_dir / "seen-one-0.json").exists(), "a finished stage doesn't run again"
    assert seen("two", 0)["resume"] == str(out_dir / "checkpoints" / "checkpoint-3")
    assert [{**r, "time": 0} for r in read_metrics(out_dir)] == [{**r, "time": 0} for r in complete]
    assert len(json.loads((out_dir / "environment.json").read_text())) == 2


def test_a_user_error_in_one_rank_is_one_line_with_exit_code_2(run_file: Path, start) -> None:
    code, out, err = finish(start(*SFT, str(run_file), mode="user-error"))
    assert code == 2
    assert re.findall("^error: .*", err, re.M) == ["error: rows.jsonl:7 — 9999 — must be below 4096 — fix the label"]
    assert "Traceback" not in err, "neither ours nor torchrun's"
    result = json.loads(out.splitlines()[-1])
    assert (result["kind"], result["exit_code"]) == ("DataError", 2)
    assert not (run_file.parent / "out" / "run.yaml").exists(), "a mistake before the first step leaves no run behind"


def test_our_own_bug_shows_its_traceback_with_exit_code_1(run_file: Path, start) -> None:
    code, _, err = finish(start(*SFT, str(run_file), mode="bug"))
    assert code == 1
    assert "ZeroDivisionError: a bug of ours" in err and "Traceback" in err
    assert err.count("Traceback") == 1
    assert re.findall("^error: .*", err, re.M)[0].startswith("error: rank 0 — ZeroDivisionError")


def test_a_killed_rank_is_named_with_its_signal(run_file: Path, start) -> None:
    code, _, err = finish(start(*SFT, str(run_file), mode="killed"))
    assert code == 1
    assert "error: rank 1 — killed by SIGKILL" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_signals_reach_the_ranks_and_nothing_survives(run_file: Path, start, seen, number: int, code: int) -> None:
    process = start_and_wait_for_ranks(run_file, start)
    process.send_signal(number)
    returned, _, err = finish(process)
    assert returned == code
    assert "run.yaml --resume" in err and "Traceback" not in err
    assert not any(alive(seen, "one", rank) for rank in (0, 1))


def test_ranks_end_with_a_parent_that_is_killed(run_file: Path, start, seen) -> None:
    process = start_and_wait_for_ranks(run_file, start)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while any(alive(seen, "one", rank) for rank in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
