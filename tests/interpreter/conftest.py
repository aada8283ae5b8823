"""Tests of the Triton kernels without a GPU: a process of their own, started with TRITON_INTERPRET=1.

Triton reads that variable when it is imported and then interprets every kernel, so these tests can't share a process
with the others. Any other run leaves this folder out and says so.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMMAND = "TRITON_INTERPRET=1 python -m pytest tests/interpreter"

if INTERPRETED:
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
    import interpreted_bf16
    import interpreter_speed

    interpreted_bf16.install()
    interpreter_speed.install()
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not INTERPRETED:
        terminalreporter.write_line(f"tests/interpreter: left out, TRITON_INTERPRET is not 1; run `{COMMAND}`")


def pytest_collect_file(file_path: Path) -> None:
    # Files named on the command line come here in spite of `collect_ignore_glob`.
    if not INTERPRETED and file_path.match("test_*.py"):
        raise pytest.UsageError(f"tests/interpreter needs TRITON_INTERPRET=1: run `{COMMAND}`")


@pytest.fixture(autouse=True)
def nan_filled_buffers() -> Iterator[None]:
    """Uninitialised memory is NaN: a result read from it would show."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
