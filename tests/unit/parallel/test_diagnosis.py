"""T14: who is missing, from the ranks' positions."""

from dataclasses import replace
from pathlib import Path

import pytest

from lumina_ft.parallel.diagnosis import diagnose, find_missing
from lumina_ft.parallel.position import BatchShape, Position
from lumina_ft.parallel.rendezvous import Peer

BATCH = BatchShape(7, 2048, 2011, 120, 512, [12, 90, 3, 41], {"t2i": 5, "text": 2})
WAITING = Position(
    rank=0,
    stage="heads",
    step=42,
    steps=300,
    micro_batch=2,
    phase="backward",
    module="model.layers.3.mlp",
    batch=BATCH,
    collectives=812,
    collective="all_reduce",
    inside="all_reduce",
    held_up=False,
    marks=99_000,
    idle_seconds=61.0,
    stack=["torch/distributed/distributed_c10d.py:3100 in all_reduce", "lumina_ft/parallel/dist.py:50 in sum"],
    state="",
)
OUTSIDE = replace(WAITING, inside="", stack=["lumina_ft/models/moe.py:88 in forward"])
BEHIND = replace(OUTSIDE, collectives=811, collective="all_gather_into_tensor")
PEERS = [Peer("node-a", 100 + rank) for rank in range(20)]


def reports(*positions: Position | None) -> dict[int, Position]:
    return {rank: replace(p, rank=rank) for rank, p in enumerate(positions) if p is not None}


def text(positions: dict[int, Position], seen: dict[int, Position] | None = None, size: int = 3) -> str:
    return diagnose(positions, seen or {}, PEERS[:size], limit_seconds=60.0, folder=Path("run/hang/stage-0"))


@pytest.mark.parametrize(
    ("positions", "ranks", "reason"),
    [
        ((WAITING, None, WAITING), [1], "wrote no report"),
        # A rank that can't speak explains everything, whatever the others have counted.
        ((WAITING, None, BEHIND), [1], "wrote no report"),
        ((WAITING, BEHIND, WAITING), [1], "entered 811 collectives, where others have entered 812, the last one all_r"),
        # NCCL's calls return at once: nobody is inside, and only the count tells.
        ((OUTSIDE, OUTSIDE, BEHIND), [2], "entered 811"),
        ((WAITING, BEHIND, replace(BEHIND, collectives=810)), [2], "entered 810"),
        ((WAITING, replace(OUTSIDE, inside="all_reduce", held_up=True), WAITING), [1], "held up on the way into"),
        ((OUTSIDE, replace(OUTSIDE, inside="all_reduce", held_up=True), OUTSIDE), [1], "held up on the way into"),
        ((WAITING, WAITING, OUTSIDE), [2], "outside of collective 812"),
        ((WAITING, WAITING, WAITING), [], "every rank waits in collective 812 (all_reduce)"),
        ((OUTSIDE, OUTSIDE, OUTSIDE), [], "no rank waits in a collective"),
    ],
)
def test_T14_missing_ranks_are_found(positions, ranks, reason):
    missing = find_missing(reports(*positions), len(positions))
    assert missing.ranks == ranks
    assert reason in missing.reason


def test_T14_the_message_has_rank_stage_step_module_and_batch_of_the_missing_rank_first():
    lines = text(reports(WAITING, BEHIND, WAITING)).splitlines()
    assert lines[0].startswith("hang — rank 1 (node-a, pid 101) missing: entered 811 collectives")
    assert "parallel.timeout_minutes=1 —" in lines[0] and "run/hang/stage-0" in lines[0]
    assert lines[1] == (
        "  rank 1, missing: stage 'heads', step 42 of 300, micro-batch 2, backward; last module model.layers.3.mlp; "
        "outside collectives, 811 entered, the last one all_gather_into_tensor; no progress for 61 s"
    )
    assert lines[2] == "    at lumina_ft/models/moe.py:88 in forward"
    assert lines[3] == (
        "    batch: samples 7 (dataset rows 12, 90, 3, 41, …; t2i 5, text 2), tokens 2011 of 2048, "
        "supervised positions: text 120, image 512"
    )
    assert lines[4].startswith("  rank 0: stage 'heads'") and "inside collective 812 (all_reduce)" in lines[4]
    assert lines[5] == "    at lumina_ft/parallel/dist.py:50 in sum"
    assert [line for line in lines if line.startswith("  rank")] == [lines[1], lines[4], lines[7]]


def test_T14_a_silent_rank_is_described_by_what_was_last_heard_of_it():
    seen = reports(replace(WAITING, step=41), replace(BEHIND, step=41), WAITING)
    lines = text(reports(WAITING, None, WAITING), seen).splitlines()
    assert lines[1].startswith(
        "  rank 1, missing (node-a, pid 101): no report; last heard of in stage 'heads', step 41"
    )
    assert "last module model.layers.3.mlp" in lines[1] and "no progress" not in lines[1]
    assert lines[2].startswith("    batch: samples 7")
    neighbour = reports(WAITING, replace(BEHIND, state="stopped"))
    stopped = text(reports(WAITING, None, WAITING), neighbour).splitlines()[1]
    assert stopped.startswith(
        "  rank 1, missing (node-a, pid 101): no report; its process, stopped, is in stage 'heads'"
    )
    assert "rank 1, missing (node-a, pid 101): never said where it is" in text(reports(WAITING, None, WAITING))


def test_a_hang_before_the_first_step_says_so():
    start = replace(
        OUTSIDE, step=0, micro_batch=0, phase="connect", module="", batch=None, collectives=0, collective=""
    )
    lines = text(reports(start, start, start)).splitlines()
    assert "no single rank stands out" in lines[0]
    assert lines[1].startswith(
        "  rank 0: stage 'heads', before the first step, connect; last module none yet; no collective entered"
    )
    assert lines[3] == "    no batch yet"


def test_many_ranks_are_cut_short_but_the_missing_one_is_shown():
    positions = reports(*([WAITING] * 19), BEHIND)
    lines = text(positions, size=20).splitlines()
    assert lines[1].startswith("  rank 19, missing")
    assert lines[-1] == "  and 4 ranks more"


def test_a_position_survives_its_file():
    assert Position.from_json(WAITING.to_json()) == WAITING
    assert Position.from_json(replace(WAITING, batch=None).to_json()).batch is None
