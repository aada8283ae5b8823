"""`lumina-ft plan` against engines: bytes of weights, gradients and optimizer state on every rank, to the byte."""

import json
from pathlib import Path

import dist_tiny
import pytest
from dist_launch import launch_ranks, read_json

STATES = ("parameters", "gradients", "optimizer")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("memory")
    smaller = {"num_hidden_layers": 2, "ar_head_depth": 1}
    (directory / "tiny.json").write_text(json.dumps(dist_tiny.MODEL_CONFIG | smaller))
    dist_tiny.write_dataset(directory / "data", samples=24, short=True)
    return directory


def differing(work: Path, ranks: int, which: str) -> tuple[int, list[str]]:
    """How many cases ran, and where the plan is wrong."""
    launch_ranks("ranks_memory.py", work, which, ranks=ranks, timeout=1500)
    records = read_json(work / f"memory-{ranks}-{which}.json")
    wrong = []
    for record in records:
        case = {key: value for key, value in record.items() if key not in ("measured", "planned")}
        for rank, (measured, planned) in enumerate(zip(record["measured"], record["planned"], strict=True)):
            for name, found, wanted in zip(STATES, measured, planned, strict=True):
                if found != wanted:
                    wrong.append(f"{case} rank {rank}: {name} {found}, planned {wanted}")
    return len(records), wrong


def test_T9_states_of_engines_are_as_planned_to_the_byte(work: Path) -> None:
    """ZeRO 0 to 3, experts on every rank and shared, everything trained and an adapter alone, both dtypes."""
    assert differing(work, 2, "core") == (7, [])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, 44), (3, 24), (4, 44)])
def test_T9_states_of_engines_are_as_planned_in_every_layout(work: Path, ranks: int, cases: int) -> None:
    """3 ranks divide no parameter evenly; among 4, two pairs share the experts."""
    assert differing(work, ranks, "all") == (cases, [])
