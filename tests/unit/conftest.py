"""Makes this folder's helpers importable, and calls the entry point as a shell would."""

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lumina_ft import app

sys.path.insert(0, str(Path(__file__).parent))

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Call `lumina-ft` with arguments; returns exit code, stdout, stderr."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lumina-ft", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            app.main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    yield call
    for number, handler in previous.items():
        signal.signal(number, handler)
