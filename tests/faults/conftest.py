"""Makes this folder's helpers and those of `tests/dist` importable, and trains once what no fault may change."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "dist")]

if TYPE_CHECKING:
    from fault_runs import FaultRun


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model config and the dataset of every run."""
    import dist_tiny

    work = tmp_path_factory.mktemp("faults")
    dist_tiny.prepare(work, samples=90)
    return work


@pytest.fixture(scope="session")
def reference(work: Path) -> "FaultRun":
    """An uninterrupted run: ZeRO-3, one stage, a checkpoint every step, the last four of them kept."""
    from fault_runs import STEPS, uninterrupted

    return uninterrupted(work, "reference", keep_checkpoints=3, stages=[{"name": "one", "steps": STEPS}])
