"""`kill -9` at every named point of the commit protocol and at random moments.

One long run takes many kills: each restart must continue from the newest whole checkpoint and is killed in turn. In
the end, metrics, weights and optimizer state must equal those of a run that nothing has happened to, bit for bit.
"""

import random
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import psutil
import pytest
from fault_runs import LAUNCH_SECONDS, STEPS, Fault, FaultRun, Launch, uninterrupted

from lumina_ft.checkpoint.commit import POINTS

EXIT_CODES = {"rank": 1, "ranks": 1, "run": -9, "launcher": -9}
"""Of the launcher, by who is killed."""


def kill_at(point: str, whom: str, *, rank: int = 0, arrival: int = 1) -> Fault:
    return Fault(point, (("kill", whom),), rank=rank, arrival=arrival)


def check_restart(launch: Launch, run: FaultRun, expected: str, code: int) -> None:
    """A launch continued from the newest whole checkpoint, ended as it should, and whole ones haven't become none."""
    assert launch.code == code, launch.err
    assert run.launches == 1 or launch.resumed_from == expected, launch.err
    assert expected == "the start" or run.newest_whole() != "the start", "the last whole checkpoint is gone"


def survive(run: FaultRun, faults: Iterable[Fault]) -> None:
    """Launch and kill the run once per fault, then let it end."""
    for fault in faults:
        expected = run.newest_whole()
        launch = run.launch(resume=run.launches > 0, fault=fault)
        assert run.landed.exists(), f"{fault} never happened:\n{launch.err}"
        check_restart(launch, run, expected, EXIT_CODES[fault.acts[0][1]])
    finish(run)


def finish(run: FaultRun) -> None:
    """Let a run that was killed before reach its end."""
    expected = run.newest_whole()
    check_restart(run.launch(resume=True), run, expected, 0)


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param((kill_at("optimizer_written", "rank", rank=1, arrival=2), kill_at("renamed", "run")), id="two"),
        pytest.param(
            (
                kill_at("tensor_written", "ranks", arrival=3),
                kill_at("optimizer_written", "rank", rank=1, arrival=2),
                kill_at("renamed", "run"),
                kill_at("committed", "rank"),
                kill_at("rotating", "ranks"),
            ),
            id="five",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_kills_while_saving_change_nothing(work, reference, request, faults):
    """Before anything is whole, one rank and all, on both sides of the renaming, and while an old one is deleted."""
    name = request.node.callspec.id
    run = FaultRun(work, name, stages=[{"name": "one", "steps": STEPS}], keep_checkpoints=1)
    survive(run, faults)
    run.check_same_end(reference)


STAGES: Sequence[dict[str, Any]] = (
    {"name": "no_vision", "train": ["backbone"], "steps": 7},
    {"name": "heads", "train": ["heads"], "steps": 7},
)
"""Short enough that some of the kills hit the end of a stage and the beginning of the next one."""

ADAPTER = {"rank": 4, "alpha": 8.0, "dropout": 0.1}


def kills_everywhere(whole: FaultRun, whom: str) -> list[Fault]:
    """A kill at each point that an uninterrupted run comes by; a single rank is rank 1 wherever that arrives, too."""
    by_point: dict[str, set[int]] = {}
    for rank, point in whole.arrivals():
        by_point.setdefault(point, set()).add(rank)
    assert set(by_point) - {"step"} == set(POINTS) - ({"adapter_written"} if whole.config["lora"] is None else set())
    return [
        kill_at(point, whom, rank=max(by_point[point]) if whom == "rank" else 0)
        for point in POINTS
        if point in by_point
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("whom", "zero", "lora"), [("rank", 3, ADAPTER), ("ranks", 2, None)])
def test_a_kill_at_every_point_of_the_commit_protocol(work, whom, zero, lora):
    how = {"stages": STAGES, "zero": zero, "keep_checkpoints": 1, "lora": lora}
    whole = uninterrupted(work, f"{whom}-whole", **how)
    run = FaultRun(work, whom, **how)
    survive(run, kills_everywhere(whole, whom))
    run.check_same_end(whole)


MOMENTS = 20
LONG: Sequence[dict[str, Any]] = ({"name": "one", "steps": 50},)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_at_random_moments(work):
    """From outside, like the kernel short of memory or a machine that fails: a rank, all, the launcher, everything."""
    how = {"stages": LONG, "zero": 2, "keep_checkpoints": 1}
    whole = uninterrupted(work, "random-whole", **how)
    times = [r["time"] for r in whole.records(clock=True) if "loss" in r]
    cycle_seconds = (times[-1] - times[0]) / (len(times) - 1)
    run = FaultRun(work, "random", **how)
    draw = random.Random(20)
    for _ in range(MOMENTS):
        whom = draw.choice(("rank 0", "rank 1", "ranks", "launcher", "run"))
        # Anywhere in the first two steps of a launch and the saves after them.
        delay = draw.uniform(0.0, 2.0) * cycle_seconds
        expected = run.newest_whole()
        launch = kill_from_outside(run, whom, delay)
        check_restart(launch, run, expected, EXIT_CODES[whom.split()[0]])
    finish(run)
    run.check_same_end(whole)


def kill_from_outside(run: FaultRun, whom: str, delay: float) -> Launch:
    """Launch the run, and kill some of its processes so many seconds after its first step has begun."""
    steps_before = [point for _, point in run.arrivals()].count("step")
    with run.started(resume=run.launches > 0) as launcher:
        deadline = time.monotonic() + LAUNCH_SECONDS
        while [point for _, point in run.arrivals()].count("step") == steps_before:
            assert launcher.poll() is None and time.monotonic() < deadline, run.stderr.read_text()
            time.sleep(0.01)
        ranks, family = run.ranks(), run.family()
        assert len(ranks) == 2
        parent = psutil.Process(launcher.pid)
        victims = {
            "rank 0": ranks[:1],
            "rank 1": ranks[1:],
            "ranks": ranks,
            "launcher": [parent],
            "run": [parent, *family],
        }
        time.sleep(delay)
        for victim in victims[whom]:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        launcher.wait(LAUNCH_SECONDS)
        return run.ended(launcher)
