"""Every planted fault must turn a test of the suite red."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from faults import FAULTS, Fault

sys.path.pop(0)


def run_harness(faults: list[Fault], work: Path, **env: str) -> dict[str, int]:
    """Exit code of pytest by fault."""
    listing = work / "faults.json"
    listing.write_text(json.dumps([fault._asdict() for fault in faults]))
    command = [sys.executable, str(Path(__file__).with_name("harness.py")), str(listing), str(work)]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def exit_codes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    plain = [fault for fault in FAULTS if not fault.interpreted]
    return run_harness(plain, tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="module")
def interpreted_exit_codes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    interpreted = [fault for fault in FAULTS if fault.interpreted]
    return run_harness(interpreted, tmp_path_factory.mktemp("interpreted"), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


def check(name: str, code: int) -> None:
    # 1: tests ran and failed. 0 would mean unnoticed; 2 and above, that the change broke collection instead.
    assert code == 1, f"{name}: pytest ended with {code}"


@pytest.mark.slow
@pytest.mark.parametrize("name", [fault.name for fault in FAULTS if not fault.interpreted])
def test_the_suite_notices(name: str, exit_codes: dict[str, int]) -> None:
    check(name, exit_codes[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [fault.name for fault in FAULTS if fault.interpreted])
def test_the_interpreter_tests_notice(name: str, interpreted_exit_codes: dict[str, int]) -> None:
    check(name, interpreted_exit_codes[name])
