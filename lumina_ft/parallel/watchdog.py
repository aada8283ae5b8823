"""Ends a run in which a rank has stopped, with a message that says which one and where every rank stands.

One thread per rank. When its rank has shown no sign of life for the limit, or another rank has reported that of itself,
the thread writes `report-N.json` into a folder that all ranks share: where its rank is, and where the other ranks on
its machine are by their pages. When every rank has reported, or a while later, it reads the reports, and hands the
diagnosis to a callback that ends the process. Meanwhile each rank leaves `seen-N.json` behind from time to time: the
last thing known of a rank whose whole machine is gone.

Files, because the store of the process group may live in the process that hangs.
"""

import json
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from lumina_ft.errors import RunError
from lumina_ft.parallel.diagnosis import diagnose
from lumina_ft.parallel.position import Position
from lumina_ft.parallel.progress import SAVE, Progress
from lumina_ft.parallel.rendezvous import Peer

log = logging.getLogger(__name__)

HANG_DIR = "hang"
"""Inside the run directory; each stage of each attempt has a folder of its own in it."""

EXIT_HANG = 1

OnHang = Callable[[RunError, bool], None]
"""Tells the world about a hang, in every rank that still can. Gets the diagnosis, and whether this rank is the one
to tell people; the process ends when it returns, or raises."""

_REPORT, _SEEN = "report", "seen"


class Watchdog:
    """Watches one rank's progress.

    Attributes:
        poll_seconds: between two looks at the rank's progress and at the folder.
        seen_seconds: between two notes of the rank's position.
        patience_seconds: how long a rank that has reported waits for the others. Long enough for a network file
            system to show new files (its cache of a directory lives up to a minute).
    """

    def __init__(
        self,
        progress: Progress,
        rank: int,
        peers: Sequence[Peer],
        folder: Path,
        *,
        limit_seconds: float,
        on_hang: OnHang,
        exit_process: Callable[[int], Any] = os._exit,
    ) -> None:
        """Prepare.

        Args:
            peers: every rank's process.
            folder: shared by the ranks and by nobody else; made if it is missing.
            limit_seconds: without a sign of life.
        """
        self.poll_seconds = min(5.0, max(0.05, limit_seconds / 20))
        self.seen_seconds = min(30.0, max(self.poll_seconds, limit_seconds / 30))
        self.patience_seconds = min(90.0, max(0.5, limit_seconds / 4))
        self._progress, self._rank, self._peers, self._folder = progress, rank, peers, folder
        self._limit_seconds, self._on_hang, self._exit = limit_seconds, on_hang, exit_process
        self._marks, self._idle, self._polled = -1, 0.0, time.monotonic()
        self._noted_marks, self._noted_at = -1, -float("inf")
        self._savers: dict[int, tuple[int, float]] = {}
        self._complained = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hang watchdog", daemon=True)

    def start(self) -> None:
        """Watch until `stop`."""
        self._complain_about(lambda: self._folder.mkdir(parents=True, exist_ok=True))
        self._thread.start()

    def stop(self) -> None:
        """Watch no more, and leave the folder to nobody."""
        self._stopped.set()
        self._thread.join()
        self._complain_about(lambda: self._file(_SEEN, self._rank).unlink(missing_ok=True))
        for empty in (self._folder, self._folder.parent):
            try:
                empty.rmdir()
            except OSError:
                return  # the other ranks are still leaving

    def _run(self) -> None:
        while not self._stopped.wait(self.poll_seconds):
            self._look(time.monotonic())
            overdue = self._idle >= self._limit_seconds and not self._waits_for_a_save()
            if overdue or self._names(_REPORT):
                break
        else:
            return
        try:
            self._write(_REPORT)
            self._tell(self._reports_of_all())
        except Exception:
            traceback.print_exc()
        finally:
            self._exit(EXIT_HANG)

    def _look(self, now: float) -> None:
        """Take the time since the last sign of life, and note the position if it is time to."""
        gap, self._polled = now - self._polled, now
        if self._progress.marks != self._marks:
            self._marks, self._idle = self._progress.marks, 0.0
        else:
            # A much longer gap than asked for: the process itself was stopped (a job suspended), and waited for nobody.
            self._idle += min(gap, self.poll_seconds + 5.0)
        if self._marks != self._noted_marks and now - self._noted_at >= self.seen_seconds:
            self._noted_marks, self._noted_at = self._marks, now
            self._write(_SEEN)
        if self._progress.phase == SAVE and self._idle >= self._limit_seconds / 2:
            self._look_at_savers(now)

    def _look_at_savers(self, now: float) -> None:
        """Note when each other rank that is saving last got on with it."""
        for rank, (position, *_) in self._read(_SEEN).items():
            if rank != self._rank and position.phase == SAVE and self._savers.get(rank, (-1, 0.0))[0] != position.marks:
                self._savers[rank] = (position.marks, now)

    def _waits_for_a_save(self) -> bool:
        """Whether another rank is getting on with writing a checkpoint, while this one waits for it."""
        return self._progress.phase == SAVE and any(
            self._polled - since < self._limit_seconds for _, since in self._savers.values()
        )

    def _reports_of_all(self) -> dict[int, list[Position]]:
        """Reports of the ranks that write one in time."""
        deadline = time.monotonic() + self.patience_seconds
        while len(self._names(_REPORT)) < len(self._peers) and time.monotonic() < deadline:
            time.sleep(self.poll_seconds)
        return self._read(_REPORT)

    def _tell(self, reports: dict[int, list[Position]]) -> None:
        own = {rank: position for rank, (position, *_) in reports.items()}
        seen = {rank: position for rank, (position, *_) in self._read(_SEEN).items()}
        seen |= {position.rank: position for _, *neighbours in reports.values() for position in neighbours}
        text = diagnose(own, seen, self._peers, limit_seconds=self._limit_seconds, folder=self._folder)
        self._on_hang(RunError(text), self._rank == min(own, default=self._rank))
        # Only now: a launcher that sees one of its ranks die may end this one.
        here = self._peers[self._rank].processes
        _kill_siblings([p for r, p in enumerate(self._peers) if r not in own and p.processes == here])

    def _neighbours(self) -> list[Position]:
        """Positions of the other ranks on this machine that can be read."""
        here = self._peers[self._rank].processes
        others = [(r, peer) for r, peer in enumerate(self._peers) if r != self._rank and peer.processes == here]
        found = (self._progress.neighbour(rank, peer.pid, peer.page) for rank, peer in others)
        return [position for position in found if position is not None]

    def _names(self, kind: str) -> list[str]:
        """Files of that kind in the folder."""
        try:
            return sorted(n for n in os.listdir(self._folder) if n.startswith(f"{kind}-"))
        except OSError:
            return []  # not reachable now; a hang is judged by what can be read when it has lasted long enough

    def _read(self, kind: str) -> dict[int, list[Position]]:
        """What each rank has written: its own position, then what it knows of others."""
        found: dict[int, list[Position]] = {}
        for name in self._names(kind):
            try:
                text = (self._folder / name).read_text(encoding="utf-8")
                positions = [Position.from_json(values) for values in json.loads(text)]
            except (OSError, ValueError):
                continue  # its rank is leaving, or a network file system doesn't show all of it yet
            found[positions[0].rank] = positions
        return dict(sorted(found.items()))

    def _write(self, kind: str) -> None:
        """The file appears whole or not at all."""
        positions = [self._progress.position(self._rank, self._idle)]
        positions += self._neighbours() if kind == _REPORT else []
        text = json.dumps([position.to_json() for position in positions], indent=1)

        def write() -> None:
            aside = self._folder / f".{kind}-{self._rank}"
            aside.write_text(text, encoding="utf-8")
            aside.replace(self._file(kind, self._rank))

        self._complain_about(write)

    def _file(self, kind: str, rank: int) -> Path:
        return self._folder / f"{kind}-{rank}.json"

    def _complain_about(self, action: Callable[[], Any]) -> None:
        """Do it; a full or unreachable disk is no reason to end a run that trains."""
        try:
            action()
        except OSError as error:
            if not self._complained:
                log.warning("%s: %s; without it, a hang could not be diagnosed", self._folder, error.strerror or error)
            self._complained = True


def _kill_siblings(peers: Sequence[Peer]) -> None:
    """Kill those that this process's parent has started. Stopped, they would keep a launcher waiting that ends them."""
    for peer in peers:
        with suppress(psutil.Error):
            if psutil.Process(peer.pid).ppid() == os.getppid():
                psutil.Process(peer.pid).kill()
