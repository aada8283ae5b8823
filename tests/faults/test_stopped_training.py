"""Real training that is stopped by signals, or by an error of one rank, in the middle of a step (T14)."""

import json
import signal
import time
from pathlib import Path

import dist_tiny
import pytest
from fault_runs import STEPS, Fault, FaultRun, uninterrupted

from lumina_ft.config.schema import RunConfig
from lumina_ft.data.dataset import PackedDataset
from lumina_ft.data.segments import Sample
from lumina_ft.data.shards import ShardWriter, open_dataset

MICRO_BATCHES = 2
"""Per step and rank in these runs; a rank arrives at `loss` in each of them."""


def in_step(step: int, *acts: tuple[str, object]) -> Fault:
    """What rank 1 does in the middle of a step of this launch."""
    return Fault("loss", acts, rank=1, arrival=MICRO_BATCHES * (step - 1) + 1)


@pytest.mark.parametrize("twice", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["once", "twice"])
def test_a_stopped_step_is_finished_and_saved_and_the_run_ends_as_if_nothing_had_been(work, reference, twice):
    """Stopped in the middle of step 2, then perhaps while the regular checkpoint of step 3 is being written."""
    run = FaultRun(
        work, "stopped-twice" if twice else "stopped", stages=[{"name": "one", "steps": STEPS}], save_every_steps=3
    )
    announced = "the ranks finish their step and save, within 600 s"
    # The step goes on only when the ranks have been told.
    wait = f"until grep -q '{announced}' {run.path}/log.txt; do sleep 0.05; done"
    stop = run.launch(fault=in_step(2, ("signal", int(signal.SIGTERM)), ("shell", wait)))
    assert stop.code == 143, stop.err
    assert stop.result is not None and (stop.result["kind"], stop.result["exit_code"]) == ("Interrupted", 143)
    saved = run.path / "checkpoints" / "checkpoint-2"
    assert stop.result["error"] == (
        f"stopped by SIGTERM — stage 'one', saved after step 2 of {STEPS} — newest checkpoint: {saved} — "
        f"continue with: lumina-ft sft --config {run.path}/run.yaml --resume"
    )
    assert list(run.checkpoints) == [2]
    assert [record["step"] for record in run.records()] == [1, 2]
    assert "Traceback" not in (run.path / "log.txt").read_text()

    if twice:
        # To rank 0 alone; the other one hears of it in the step after.
        while_saving = Fault("flushed", (("signal_rank", int(signal.SIGINT)), ("sleep", 0.5)), rank=0)
        stop = run.launch(resume=True, fault=while_saving)
        assert (stop.code, stop.resumed_from) == (130, "checkpoint-2"), stop.err
        assert stop.result is not None and "stopped by SIGINT — stage 'one', saved after step 3" in stop.result["error"]
        assert run.newest_whole() == "checkpoint-3" == f"checkpoint-{max(run.checkpoints)}"

    last = run.launch(resume=True)
    assert (last.code, last.resumed_from) == (0, "checkpoint-3" if twice else "checkpoint-2"), last.err
    run.check_same_end(reference)


@pytest.mark.slow
def test_a_stop_between_two_records_of_the_metrics_loses_no_count(work):
    """What has been routed since the last record belongs to the next one, whoever writes it."""
    how = {"stages": [{"name": "one", "steps": STEPS}], "save_every_steps": 0, "log_every_steps": 4, "zero": 2}
    whole = uninterrupted(work, "rare-records", **how)
    run = FaultRun(work, "rare-records-stopped", **how)
    stop = run.launch(fault=in_step(2, ("signal_rank", int(signal.SIGTERM)), ("sleep", 0.5)))
    assert stop.code == 143 and list(run.checkpoints) == [2] and not run.records(), stop.err
    assert run.launch(resume=True).code == 0
    run.check_same_end(whole)
    ours, theirs = (json.loads((r.path / "summary.json").read_text())[0]["expert_counts"] for r in (run, whole))
    assert ours == theirs != []


@pytest.mark.parametrize("zero", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_T14_bad_data_in_one_rank_ends_all_at_once_with_that_error(work: Path, tmp_path, monkeypatch, zero: int):
    """Rank 1 raises between two steps, while rank 0 waits for it in the next collective."""
    run = FaultRun(work, f"bad-data-{zero}", zero=zero, stages=[{"name": "one", "steps": STEPS}])
    doomed = sample_of(work / "data", run, step=2, rank=1)
    monkeypatch.setattr(dist_tiny, "ShardWriter", lambda *a, **k: Corrupting(*a, **k, index=doomed))
    run.config["data"] |= {"path": str(dist_tiny.write_dataset(tmp_path / "data", samples=90))}

    launch = run.launch()
    ended = time.time()
    assert launch.code == 2, launch.err
    assert launch.result is not None and launch.result["kind"] == "DataError"
    errors = [line for line in launch.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and f"raw.jsonl:{doomed + 1}" in errors[0] and "999" in errors[0]
    assert "Traceback" not in launch.err
    assert [record["step"] for record in run.records()] == [1, 2]
    told = json.loads((run.path / "errors" / "rank-1.json").read_text())
    assert ended - told["time"] < 20


class Corrupting(ShardWriter):
    """Writes one code of one sample that no codec has."""

    def __init__(self, *args, index: int, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.index = index

    def add(self, sample: Sample) -> None:
        if sample.index == self.index:
            segment = next(s for s in sample.segments if len(s.codes))
            segment.codes[0, 0] = 999
        super().add(sample)


def sample_of(data: Path, run: FaultRun, *, step: int, rank: int) -> int:
    """Index of a sample with an image that a rank meets in a step, counted from 0."""
    cfg = RunConfig.model_validate(run.config)
    dataset = PackedDataset(cfg.stage_data(0), spec=dist_tiny.SPEC, seed=cfg.seed)
    packs = dataset.rank_packs(dataset.packs_of_step(step, cfg.train.packs_per_step), rank, cfg.parallel.ranks)
    indices = [index for pack in packs if pack is not None for index in pack.indices.tolist()]
    reader = open_dataset(data)
    return next(index for index in indices if any(len(s.codes) for s in reader[index].segments))
