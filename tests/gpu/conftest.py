"""Tests that need a CUDA device. With TRITON_INTERPRET=1 a CPU rehearses them: smaller, and in float32 only."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gpu_device import DEVICE, REHEARSED


@pytest.fixture(autouse=True)
def device_is_there() -> None:
    """A device that isn't found must not look like a pass."""
    if DEVICE.type != "cuda" and not REHEARSED:
        pytest.fail("no CUDA device; set TRITON_INTERPRET=1 to rehearse these tests on the CPU")
