"""Errors that a user can cause and fix. The CLI prints them as one line and exits with code 2.

Every message reads "key or file:line — value — rule — fix".
"""

import difflib
import signal
from collections.abc import Iterable


class LuminaError(Exception):
    """Base of all user-facing errors."""


class ConfigError(LuminaError):
    """A configuration key, value or combination is wrong."""


class DataError(LuminaError):
    """A data file, row, image, label or batch is wrong."""


class CheckpointError(LuminaError):
    """A checkpoint or weight file is incomplete, misshapen or of another model."""


class RunError(LuminaError):
    """The run itself failed (non-finite loss, lost rank). Exit code 1, not 2."""


class Interrupted(BaseException):
    """A signal told us to stop; nobody's error, so `except Exception` doesn't take it for one.

    Attributes:
        number: the signal.
        detail: what is saved, and how to continue.
        exit_code: 130 for SIGINT, 143 for SIGTERM.
    """

    def __init__(self, number: int, detail: str) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} — {detail}")
        self.number = number
        self.detail = detail
        self.exit_code = 128 + number


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the closest known name, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""
