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


class Interrupted(Exception):
    """A signal told the run to stop, and it has; nobody's error.

    Attributes:
        exit_code: 130 for SIGINT, 143 for SIGTERM.
    """

    def __init__(self, number: int, how_to_continue: str) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} — {how_to_continue}")
        self.exit_code = 128 + number


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the closest known name, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""
