"""A rank's signals, taken in a thread: in processes of their own, since they end with them."""

import os
import signal
import subprocess
import sys
import time

import pytest

from lumina_ft.launch import signals

RANK = """
import sys, threading, time
from lumina_ft.launch.signals import listen
from lumina_ft.train.stop import StopRequest

stop = StopRequest()
siblings = int(sys.argv[2])
listen(stop, ranks_here=siblings, end=lambda number: print("ends at once for", number, flush=True), second_kills=True)
if sys.argv[1] == "outside":
    print("ready", flush=True)
    threading.Event().wait()
with stop.heeded():
    print("ready", flush=True)
    while not stop.number:
        time.sleep(0.01)
    print("finishes its step for", stop.number, flush=True)
    if sys.argv[1] == "stuck":
        time.sleep(60)
"""


class Rank:
    """A process that listens; this one is its launcher."""

    def __init__(self, where: str, siblings: int = 1) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, where, str(siblings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_outside_the_loop_ends_the_rank_at_once(number: signal.Signals):
    rank = Rank("outside")
    rank.process.send_signal(number)
    assert rank.end() == (128 + number, f"ends at once for {int(number)}\n", "")


def test_a_signal_in_the_loop_is_a_request_and_the_second_one_kills():
    rank = Rank("stuck")
    rank.process.send_signal(signal.SIGINT)
    assert rank.line() == "finishes its step for 2"
    rank.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        rank.process.wait(0.3)
    time.sleep(0.8)
    rank.process.send_signal(signal.SIGTERM)
    assert rank.end() == (143, "", ""), "the same wish, told twice within a second, is one"


def test_T14_a_launcher_that_has_lost_a_rank_ends_the_others():
    """It can't tell them so, but it is their parent and has fewer children than it started."""
    rank = Rank("inside", siblings=100)
    rank.process.send_signal(signal.SIGTERM)
    assert rank.end() == (1, "", ""), "no request to save: the others are gone"


def test_a_signal_from_outside_of_a_container_lets_its_first_process_save(monkeypatch):
    """It has no parent there, and senders outside of it have no number either: both are 0."""
    monkeypatch.setattr("os.getppid", lambda: 0)
    assert not signals._tells_of_lost_rank(0, ranks_here=1)


def test_ranks_of_another_launcher_listen_before_a_library_has_started_threads():
    """Threads that don't block the signals would get them instead."""
    script = "import os, lumina_ft.app, lumina_ft.launch.signals; print(len(os.listdir('/proc/self/task')))"
    env = {**os.environ, "OMP_NUM_THREADS": "4"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr
