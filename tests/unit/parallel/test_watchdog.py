"""T14: when a hang is one, and what its rank leaves behind. Ranks are threads here."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lumina_ft.errors import RunError
from lumina_ft.parallel.progress import COLLECTIVES, SAVE, Progress
from lumina_ft.parallel.rendezvous import Peer
from lumina_ft.parallel.watchdog import Watchdog

LIMIT = 2.0
PEERS = [Peer("elsewhere", 1, processes="A"), Peer("elsewhere", 2, processes="B")]


class Rank:
    """A watched rank that nothing ends: what would is noted."""

    def __init__(self, rank: int, folder: Path, limit: float = LIMIT) -> None:
        self.progress = Progress()
        self.progress.begin_stage("heads", 9, ())
        self.told: list[tuple[str, bool]] = []
        self.ended = threading.Event()
        self.exit_code = 0
        self.watchdog = Watchdog(
            self.progress, rank, PEERS, folder, limit_seconds=limit, on_hang=self._tell, exit_process=self._exit
        )

    def _tell(self, error: RunError, speaks: bool) -> None:
        self.told.append((str(error), speaks))

    def _exit(self, code: int) -> None:
        self.exit_code = code
        self.ended.set()


@contextmanager
def working(*ranks: Rank) -> Iterator[None]:
    """Signs of life of these ranks during the block, all in the same phase."""
    done = threading.Event()

    def work() -> None:
        while not done.wait(LIMIT / 10):
            for rank in ranks:
                rank.progress.mark(rank.progress.phase)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    made = [Rank(rank, tmp_path / "hang" / "stage-0") for rank in range(2)]
    yield made
    for rank in made:
        if rank.watchdog._thread.is_alive():
            rank.watchdog.stop()


def test_T14_a_rank_without_progress_ends_itself_and_the_others_with_one_diagnosis(ranks, tmp_path):
    number = COLLECTIVES.index("all_reduce") + 1
    for rank in ranks:
        for _ in range(5):
            rank.progress.enter_collective(number)
            rank.progress.leave()
        rank.watchdog.start()
    ranks[0].progress.enter_collective(number)
    begin = time.monotonic()
    # Rank 1 is busy all the time with something else than the others' collective.
    with working(ranks[1]):
        assert all(rank.ended.wait(5 * LIMIT) for rank in ranks)
    assert LIMIT * 0.8 < time.monotonic() - begin < 3 * LIMIT
    assert [rank.exit_code for rank in ranks] == [1, 1]
    (first, speaks), (second, too) = ranks[0].told[0], ranks[1].told[0]
    assert first == second and (speaks, too) == (True, False)
    assert first.startswith(
        "hang — rank 1 (elsewhere, pid 2) missing: entered 5 collectives, where others have entered 6"
    )
    assert sorted(p.name for p in (tmp_path / "hang" / "stage-0").glob("report-*")) == [
        "report-0.json",
        "report-1.json",
    ]


def test_T14_a_rank_that_cannot_report_is_silent_and_its_last_place_known(ranks):
    ranks[1].progress.mark("forward", step=4)
    ranks[1].watchdog.start()
    time.sleep(3 * ranks[1].watchdog.seen_seconds)
    ranks[1].watchdog._stopped.set()  # as by SIGSTOP: its file stays
    ranks[1].watchdog._thread.join()
    ranks[0].watchdog.start()
    assert ranks[0].ended.wait(5 * LIMIT)
    text, speaks = ranks[0].told[0]
    assert speaks and "rank 1 (elsewhere, pid 2) missing: wrote no report" in text
    assert "rank 1, missing (elsewhere, pid 2): no report; last heard of in stage 'heads', step 4 of 9, forward" in text


def test_a_rank_at_work_is_left_alone_and_leaves_nothing(ranks, tmp_path):
    for rank in ranks:
        rank.watchdog.start()
    with working(*ranks):
        time.sleep(2.5 * LIMIT)
    for rank in ranks:
        rank.watchdog.stop()
    assert not any(rank.ended.is_set() for rank in ranks)
    assert not (tmp_path / "hang").exists()


def test_T14_a_long_save_by_one_rank_is_no_hang_but_a_save_that_stops_is(ranks):
    for rank in ranks:
        rank.progress.mark(SAVE, step=3)
        rank.watchdog.start()
    # Rank 0 writes tensor after tensor; rank 1 waits for it without any sign of life.
    with working(ranks[0]):
        time.sleep(3 * LIMIT)
        assert not any(rank.ended.is_set() for rank in ranks)
    assert all(rank.ended.wait(4 * LIMIT) for rank in ranks)


def test_waiting_for_a_rank_that_is_busy_outside_a_save_is_a_hang(ranks):
    ranks[1].progress.mark(SAVE)
    ranks[0].progress.mark("forward")
    for rank in ranks:
        rank.watchdog.start()
    with working(ranks[0]):
        assert ranks[1].ended.wait(3 * LIMIT)


def test_a_suspended_process_has_not_waited(tmp_path):
    rank = Rank(0, tmp_path, limit=600.0)
    now = time.monotonic()
    rank.watchdog._look(now)
    rank.watchdog._look(now + 5.0)
    assert rank.watchdog._idle == pytest.approx(5.0)
    rank.watchdog._look(now + 5.0 + 7200.0)
    assert rank.watchdog._idle < 20.0
    rank.progress.mark("forward")
    rank.watchdog._look(now + 7210.0)
    assert rank.watchdog._idle == 0.0


def test_a_folder_that_cannot_be_written_is_mentioned_once_and_ends_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    rank = Rank(0, tmp_path / "file" / "hang", limit=LIMIT)
    rank.watchdog.start()
    with working(rank):
        time.sleep(1.2 * LIMIT)
    rank.watchdog.stop()
    assert not rank.ended.is_set()
    assert sum("could not be diagnosed" in record.message for record in caplog.records) == 1


def test_a_failing_report_ends_the_process_all_the_same(ranks, capsys):
    def broken(error: RunError, speaks: bool) -> None:
        raise OSError("disk full")

    ranks[0].watchdog._on_hang = broken
    ranks[0].watchdog.start()
    assert ranks[0].ended.wait(5 * LIMIT)
    assert "disk full" in capsys.readouterr().err


def test_a_note_that_cannot_be_read_is_that_of_a_silent_rank(ranks):
    """A network file system may show a file before its content."""
    ranks[0].progress.mark(SAVE)
    ranks[0].watchdog.start()
    (ranks[0].watchdog._folder / "seen-1.json").write_text("")
    assert ranks[0].ended.wait(5 * LIMIT)
    ((message, _),) = ranks[0].told
    assert "rank 1 (elsewhere, pid 2) missing" in message and "never said where it is" in message


def test_a_silent_process_of_the_same_parent_is_killed_and_no_other():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    sibling = "from lumina_ft.parallel.watchdog import _kill_siblings as kill;"
    sibling += "from lumina_ft.parallel.rendezvous import Peer;"
    sibling += f"kill([Peer('h', {child.pid}), Peer('h', {os.getpid()})])"
    subprocess.run([sys.executable, "-c", sibling], check=True)
    assert child.wait(10) == -9
