"""What ranks report when they end, and how the parent tells it on."""

import errno
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from lumina_ft.errors import CheckpointError, ConfigError, DataError, Interrupted, RunError
from lumina_ft.launch.failures import exit_code, explained, read_failures, unreported, write_failure
from lumina_ft.launch.run_dir import ERRORS_DIR


def test_failures_come_back_as_the_same_error_user_errors_first(tmp_path: Path) -> None:
    try:
        raise ConnectionError("peer gone")
    except ConnectionError as error:
        write_failure(tmp_path, 0, error, now=1.0)
    write_failure(tmp_path, 2, CheckpointError("later"), now=3.0)
    write_failure(tmp_path, 1, DataError("a.jsonl:3 — x — y — z"), now=2.0)
    first, second, third = read_failures(tmp_path)
    assert [first.rank, second.rank, third.rank] == [1, 2, 0]
    assert type(first.to_error()) is DataError and str(first.to_error()) == "a.jsonl:3 — x — y — z"
    assert "raise ConnectionError" in third.traceback
    assert isinstance(third.to_error(), RunError)


def test_a_stop_is_told_with_its_signal_and_is_no_failure(tmp_path: Path) -> None:
    write_failure(tmp_path, 1, Interrupted(signal.SIGINT, "stage 'one', saved after step 2 of 3"), now=1.0)
    (told,) = read_failures(tmp_path)
    assert (told.kind, told.signal, told.message) == ("Interrupted", 2, "stage 'one', saved after step 2 of 3")
    assert told.traceback == ""
    stopped = explained(Interrupted(told.signal, told.message), tmp_path, "lumina-ft sft --resume")
    assert (stopped.exit_code, str(stopped)) == (
        130,
        "stopped by SIGINT — stage 'one', saved after step 2 of 3 — no checkpoint yet — "
        "continue with: lumina-ft sft --resume",
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (DataError("x"), 2),
        (CheckpointError("x"), 2),
        (RunError("x"), 1),
        (ZeroDivisionError("x"), 1),
        (Interrupted(signal.SIGINT, "x"), 130),
        (Interrupted(signal.SIGTERM, "x"), 143),
    ],
)
def test_exit_codes(error: BaseException, code: int) -> None:
    assert exit_code(error) == code


def test_a_full_disk_is_an_error_of_the_run_and_no_traceback(tmp_path: Path) -> None:
    write_failure(tmp_path, 0, OSError(errno.ENOSPC, "No space left on device"), now=1.0)
    write_failure(tmp_path, 1, OSError(errno.EACCES, "Permission denied"), now=2.0)
    full, other = read_failures(tmp_path)
    assert str(full.to_error()).startswith(f"{tmp_path} — No space left on device — ")
    assert type(full.to_error()) is RunError and not full.traceback
    assert "Permission denied" in other.traceback


def test_a_report_that_the_disk_refuses_goes_to_stderr_and_the_parent_names_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ERRORS_DIR).touch()
    write_failure(tmp_path, 1, RunError("what has happened"), now=1.0)
    assert capsys.readouterr().err.startswith("rank 1: what has happened\n")
    assert "exit code 1 — the ranks ended without a report" in str(unreported(tmp_path, "one", 1))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    assert "No space left on device" in str(unreported(tmp_path, "one", 1))
