"""Every planted fault must turn a test of the suite red."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from faults import FAULTS

sys.path.pop(0)


@pytest.fixture(scope="module")
def exit_codes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    work = tmp_path_factory.mktemp("planted")
    listing = work / "faults.json"
    listing.write_text(json.dumps([fault._asdict() for fault in FAULTS]))
    command = [sys.executable, str(Path(__file__).with_name("harness.py")), str(listing), str(work)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", [fault.name for fault in FAULTS])
def test_the_suite_notices(name: str, exit_codes: dict[str, int]) -> None:
    # 1: tests ran and failed. 0 would mean unnoticed; 2 and above, that the change broke collection instead.
    assert exit_codes[name] == 1, f"{name}: pytest ended with {exit_codes[name]}"
