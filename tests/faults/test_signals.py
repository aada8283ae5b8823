"""A stop whose grace is over in the middle of a save: everything is killed, and only that checkpoint is lost."""

import signal

import pytest
from fault_runs import STEPS, Fault, FaultRun


@pytest.mark.slow
def test_a_save_that_outlasts_the_grace_is_killed_and_the_checkpoint_before_serves(work, reference):
    grace = {"grace_seconds": 2.0}
    run = FaultRun(work, "grace", stages=[{"name": "one", "steps": STEPS}], save_every_steps=2, parallel=grace)
    slow_save = Fault("flushed", (("signal", int(signal.SIGTERM)), ("sleep", 60)), arrival=2)
    stopped = run.launch(fault=slow_save)
    assert stopped.code == 143, stopped.err
    assert "grace_seconds" in stopped.err and "--resume" in stopped.err and "Traceback" not in stopped.err
    assert run.newest_whole() == f"checkpoint-{max(run.checkpoints)}" == "checkpoint-2"

    last = run.launch(resume=True)
    assert (last.code, last.resumed_from) == (0, "checkpoint-2"), last.err
    run.check_same_end(reference)
