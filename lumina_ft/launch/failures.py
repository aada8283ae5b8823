"""How a failing rank tells the parent what happened: one JSON file per process in the run directory."""

import json
import os
import signal
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from lumina_ft import errors
from lumina_ft.errors import LuminaError, RunError
from lumina_ft.launch.run_dir import ERRORS_DIR

EXIT_BUG = 1
EXIT_USER = 2
EXIT_INTERRUPT = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Failure:
    """Why a process ended.

    Attributes:
        kind: class of a `LuminaError`, else the name of the exception.
        message: its text.
        traceback: of an exception that no user can fix; empty for user errors.
        time: unix seconds; the first failure is the cause, later ones are often its consequences.
    """

    rank: int
    kind: str
    message: str
    traceback: str
    time: float

    @property
    def is_user_error(self) -> bool:
        return not self.traceback

    def to_error(self) -> LuminaError:
        """The exception to raise in the parent."""
        error_class = getattr(errors, self.kind, None) if self.is_user_error else None
        if isinstance(error_class, type) and issubclass(error_class, LuminaError):
            return error_class(self.message)
        return RunError(f"rank {self.rank} — {self.kind}: {self.message} — see the traceback above, or log.txt")


def exit_code(error: LuminaError) -> int:
    """1 for a run that failed, 2 for what the user can fix."""
    return EXIT_BUG if isinstance(error, RunError) else EXIT_USER


def write_failure(run_dir: Path, rank: int, error: BaseException, now: float) -> None:
    """Write `errors/rank-N.json`; the file appears whole or not at all."""
    text = "" if isinstance(error, LuminaError) else "".join(traceback.format_exception(error))
    failure = Failure(rank, type(error).__name__, str(error), text, now)
    folder = run_dir / ERRORS_DIR
    folder.mkdir(exist_ok=True)
    aside = folder / f".rank-{rank}.{os.getpid()}"
    aside.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    aside.replace(folder / f"rank-{rank}.json")


def read_failures(run_dir: Path) -> list[Failure]:
    """Failures of all ranks; user errors first, then by time."""
    found = [
        Failure(**json.loads(path.read_text(encoding="utf-8")))
        for path in sorted((run_dir / ERRORS_DIR).glob("rank-*.json"))
    ]
    return sorted(found, key=lambda failure: (not failure.is_user_error, failure.time))
