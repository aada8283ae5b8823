"""How a failing rank tells the parent what happened: one JSON file per process in the run directory."""

import errno
import json
import os
import shutil
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from lumina_ft import errors
from lumina_ft.checkpoint.directory import newest_checkpoint
from lumina_ft.errors import Interrupted, LuminaError, RunError
from lumina_ft.launch.run_dir import ERRORS_DIR, LOG_FILE

EXIT_BUG = 1
EXIT_USER = 2

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REPORT_BYTES = 1 << 16


@dataclass(frozen=True)
class Failure:
    """Why a process ended.

    Attributes:
        kind: class of a `LuminaError`, else the name of the exception.
        message: its text.
        traceback: of an exception that no user can fix; empty for user errors.
        time: unix seconds; the first failure is the cause, later ones are often its consequences.
        signal: that told the rank to stop; 0 if it failed.
    """

    rank: int
    kind: str
    message: str
    traceback: str
    time: float
    signal: int = 0

    @property
    def is_user_error(self) -> bool:
        return not self.traceback

    def to_error(self) -> LuminaError:
        """The exception to raise in the parent."""
        error_class = getattr(errors, self.kind, None) if self.is_user_error else None
        if isinstance(error_class, type) and issubclass(error_class, LuminaError):
            return error_class(self.message)
        return RunError(f"rank {self.rank} — {self.kind}: {self.message} — see the traceback above, or log.txt")


def explained(stopped: Interrupted, run_dir: Path, again: str) -> Interrupted:
    """The same, and what there is to continue from, and how."""
    newest = newest_checkpoint(run_dir)
    found = f"newest checkpoint: {newest.path}" if newest else "no checkpoint yet"
    return Interrupted(stopped.number, f"{stopped.detail} — {found} — continue with: {again}")


def exit_code(error: BaseException) -> int:
    """2 for what the user can fix, 130 or 143 for what a signal has stopped, else 1."""
    if isinstance(error, Interrupted):
        return error.exit_code
    return EXIT_USER if isinstance(error, LuminaError) and not isinstance(error, RunError) else EXIT_BUG


def write_failure(run_dir: Path, rank: int, error: BaseException, now: float) -> None:
    """Write `errors/rank-N.json`; the file appears whole or not at all. Where the disk refuses it, stderr is told."""
    if isinstance(error, OSError) and error.errno in _FULL:
        error = disk_error(run_dir, error)
    if isinstance(error, Interrupted):
        failure = Failure(rank, type(error).__name__, error.detail, "", now, error.number)
    else:
        text = "" if isinstance(error, LuminaError) else "".join(traceback.format_exception(error))
        failure = Failure(rank, type(error).__name__, str(error), text, now)
    folder = run_dir / ERRORS_DIR
    aside = folder / f".rank-{rank}.{os.getpid()}"
    try:
        folder.mkdir(exist_ok=True)
        aside.write_text(json.dumps(asdict(failure)), encoding="utf-8")
        aside.replace(folder / f"rank-{rank}.json")
    except OSError as refused:
        sys.stderr.write(f"rank {rank}: {failure.message}\n{failure.traceback}{aside} — {refused.strerror}\n")


def disk_error(run_dir: Path, error: OSError) -> RunError:
    """What a run says that can't write its files any more."""
    return RunError(
        f"{error.filename or run_dir} — {error.strerror} — metrics, log and checkpoints are written there all the time "
        "— make room, then continue with --resume"
    )


def unreported(run_dir: Path, stage: str, status: int) -> RunError:
    """The error of a stage whose ranks have failed without a report: most likely the disk had no room for one.

    Args:
        status: exit code of the agent.
    """
    if shutil.disk_usage(run_dir).free < _REPORT_BYTES:
        return disk_error(run_dir, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    return RunError(
        f"stage {stage!r} — exit code {status} — the ranks ended without a report — see {run_dir / LOG_FILE}"
    )


def read_failures(run_dir: Path) -> list[Failure]:
    """Failures of all ranks; user errors first, then by time."""
    found = [
        Failure(**json.loads(path.read_text(encoding="utf-8")))
        for path in sorted((run_dir / ERRORS_DIR).glob("rank-*.json"))
    ]
    return sorted(found, key=lambda failure: (not failure.is_user_error, failure.time))
