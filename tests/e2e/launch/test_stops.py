"""How a run is stopped: SIGTERM and SIGINT through the launcher, past it, twice, and with too little time.

The ranks' training is played by a stand-in; `test_stopped_training.py` has the real one.
"""

import json
import signal
import time
from pathlib import Path

import psutil
import pytest

SFT = ("-m", "lumina_ft", "sft", "--json", "--config")


class Stopped:
    """A run whose ranks are in their training loop, waiting to be stopped."""

    def __init__(self, run_file: Path, start, seen, mode: str, *overrides: str) -> None:
        self.run_file = run_file
        self.out_dir = run_file.parent / "out"
        self.process = start(*SFT, str(run_file), *overrides, mode=mode)
        self._wait_for(lambda: all((self.out_dir / f"waiting-{rank}").exists() for rank in (0, 1)))
        self.ranks = [psutil.Process(int(seen("one", rank)["pid"])) for rank in (0, 1)]
        self.agent = self.ranks[0].parent()

    def _wait_for(self, condition) -> None:
        deadline = time.monotonic() + 90
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)

    def wait_for_log(self, text: str) -> None:
        self._wait_for(lambda: text in (self.out_dir / "log.txt").read_text())

    def end(self, code: int) -> str:
        """Wait for the end; returns the error that `--json` printed."""
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == code, err
        assert "Traceback" not in err
        gone, alive = psutil.wait_procs([self.agent, *self.ranks], timeout=10)
        assert not alive
        (line,) = out.splitlines()
        result = json.loads(line)
        assert (result["kind"], result["exit_code"]) == ("Interrupted", code)
        assert [line for line in err.splitlines() if line.startswith("error: ")] == [f"error: {result['error']}"]
        assert result["error"].endswith(f"continue with: lumina-ft sft --config {self.out_dir}/run.yaml --resume")
        return result["error"]


@pytest.fixture
def stopped(run_file: Path, start, seen):
    return lambda mode, *overrides: Stopped(run_file, start, seen, mode, *overrides)


def test_a_signal_to_every_process_of_the_job_lets_the_ranks_save(stopped) -> None:
    """Slurm signals all processes; the launcher signals its ranks, too; and the user's shell may repeat it."""
    run = stopped("stoppable")
    for process in (run.process, run.agent, *run.ranks):
        process.send_signal(signal.SIGTERM)
    run.wait_for_log("SIGTERM: the ranks finish their step and save, within 600 s; a second signal kills them")
    run.process.send_signal(signal.SIGTERM)
    message = run.end(143)
    assert message.startswith("stopped by SIGTERM — stage 'one', saved after step 2 of 3 — newest checkpoint: ")
    assert f"{run.out_dir}/checkpoints/checkpoint-2 — " in message


@pytest.mark.slow
def test_a_rank_that_is_signalled_alone_stops_the_run(stopped) -> None:
    run = stopped("stoppable")
    run.ranks[1].send_signal(signal.SIGINT)
    message = run.end(130)
    assert message.startswith("stopped by SIGINT — stage 'one', saved after step 2 of 3 — newest checkpoint: ")


def test_ranks_that_do_not_end_in_time_are_killed(stopped) -> None:
    run = stopped("stubborn", "parallel.grace_seconds=1")
    start = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    message = run.end(143)
    assert 1 <= time.monotonic() - start < 60
    assert message.startswith("stopped by SIGTERM — not done within parallel.grace_seconds=1 — no checkpoint yet — ")


def test_a_second_signal_kills_at_once(stopped) -> None:
    run = stopped("stubborn")
    run.process.send_signal(signal.SIGTERM)
    run.wait_for_log("SIGTERM: the ranks finish their step")
    time.sleep(1.1)
    start = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    message = run.end(143)
    assert time.monotonic() - start < 60
    assert message.startswith("stopped by SIGTERM — killed by a second signal, SIGINT — no checkpoint yet — ")
