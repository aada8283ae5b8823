"""Checkpoints of any number of ranks and ZeRO stage continued at any other (D3).

One launch runs several stages with a fresh engine each, because starting ranks costs more than training them here.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dist_tiny
import pytest
from dist_launch import launch_ranks, read_json

from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.monitor.metrics import WALL_TIME_KEYS, read_metrics

SAMPLES = 50
SAVED_AT, STEPS = 5, 10
EPOCH_STEPS = 8
"""The saved step lies inside the first epoch, whose last step has fewer packs than ranks; the last two steps belong to
the second epoch."""

EMPTY = -1
"""Sample id in a pack that only fills up a step."""

TOLERANCE = 1e-5
"""Absolute, on losses of about 9 nats: other ranks add the same fp32 gradients in another order."""


class Topology(NamedTuple):
    """How many ranks, and which ZeRO stage."""

    ranks: int
    zero: int

    def __str__(self) -> str:
        return f"{self.ranks}x-zero{self.zero}"


TOPOLOGIES = [Topology(ranks, zero) for ranks in (1, 2, 4) for zero in (2, 3)]
ADAPTER = {"rank": 4, "alpha": 8.0, "dropout": 0.2, "modules_to_save": ["lm_head"]}


class Elastic:
    """Runs of one configuration at several topologies, and their continuations at others."""

    def __init__(self, work: Path, **sections: object) -> None:
        self.work = work
        self.sections = sections
        dist_tiny.write_model_config(work)
        dist_tiny.write_dataset(work / "data", samples=SAMPLES)

    def path(self, loaded: Topology, saved: Topology | None = None) -> Path:
        """Run directory of an uninterrupted run, or of the continuation of one."""
        return self.work / (f"{saved}-to-{loaded}" if saved else f"{loaded}")

    def job(self, loaded: Topology, saved: Topology | None = None) -> dict[str, Any]:
        """A whole run of ten steps, or its last five from the checkpoint that `saved` wrote."""
        config = dist_tiny.run_config(
            self.work,
            self.path(loaded, saved).name,
            parallel={"ranks": loaded.ranks, "zero": f"zero{loaded.zero}"},
            train={"packs_per_step": 4, "save_every_steps": SAVED_AT, "tensorboard": False, "plots": False},
            stages=[{"name": "only", "steps": STEPS}],
            **self.sections,
        )
        config["data"] |= {"eval_fraction": 0.0}
        resume = self.path(saved) / "checkpoints" / f"checkpoint-{SAVED_AT}" if saved else None
        return {"config": config, "stage": 0, "resume": resume and str(resume)}

    def launch(self, jobs: Sequence[dict[str, Any]]) -> None:
        """Run jobs of the same number of ranks."""
        (ranks,) = {job["config"]["parallel"]["ranks"] for job in jobs}
        listing = self.work / "jobs.json"
        listing.write_text(json.dumps(jobs))
        launch_ranks("ranks_elastic.py", listing, ranks=ranks)

    def check(self, loaded: Topology, saved: Topology) -> None:
        """A continuation has the losses of the run it continues, and sees exactly the samples that were left."""
        whole, rest = self.path(saved), self.path(loaded, saved)
        ours, theirs = records(rest), records(whole)[SAVED_AT:]
        assert [r["step"] for r in ours] == list(range(SAVED_AT + 1, STEPS + 1))
        if loaded == saved:
            assert ours == theirs
            assert tensor_files(rest) == tensor_files(whole)
        else:
            for one, other in zip(ours, theirs, strict=True):
                assert one["tokens"] == other["tokens"]
                losses = {key for key in other if key.endswith("loss")}
                assert {k: one[k] for k in losses} == pytest.approx({k: other[k] for k in losses}, abs=TOLERANCE, rel=0)
        before = samples_of(whole, saved.ranks, range(SAVED_AT))
        after = samples_of(rest, loaded.ranks, range(SAVED_AT, EPOCH_STEPS))
        assert before and after
        assert before + after == Counter(range(SAMPLES))


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k not in WALL_TIME_KEYS} for record in read_metrics(run_dir)]


def tensor_files(run_dir: Path) -> dict[str, bytes]:
    """Content of every tensor file of the last checkpoint."""
    last = run_dir / "checkpoints" / f"checkpoint-{STEPS}"
    found = {str(path.relative_to(last)): path.read_bytes() for path in last.rglob("*.safetensors")}
    assert len(found) > 1
    return found


def samples_of(run_dir: Path, ranks: int, steps: Iterable[int]) -> Counter[int]:
    """How often each sample was trained on in some steps, over all ranks."""
    seen = [read_json(run_dir / f"seen-{rank}.json") for rank in range(ranks)]
    return Counter(index for step in steps for rank in seen for index in rank[str(step)] if index != EMPTY)


TWO, FOUR = Topology(2, 3), Topology(4, 2)
CORE = [
    (Topology(2, 3), TWO),
    (Topology(2, 2), TWO),
    (Topology(4, 3), TWO),
    (Topology(1, 2), TWO),
    (Topology(1, 3), FOUR),
]


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Elastic:
    """Saved at 2 ranks and at 4, continued at 1, 2 and 4."""
    runs = Elastic(tmp_path_factory.mktemp("elastic"))
    for ranks, own in ((2, TWO), (4, FOUR), (1, None)):
        loads = [runs.job(loaded, saved) for loaded, saved in CORE if loaded.ranks == ranks]
        runs.launch([*([runs.job(own)] if own else []), *loads])
    return runs


@pytest.mark.parametrize(("loaded", "saved"), CORE, ids=str)
def test_a_checkpoint_continues_at_another_number_of_ranks_and_zero_stage(core, loaded, saved):
    core.check(loaded, saved)


ADAPTED = [(Topology(2, 3), TWO), (Topology(2, 2), TWO), (Topology(4, 3), TWO), (Topology(1, 2), TWO)]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Elastic:
    """The same with an adapter that drops inputs at random, and a head trained beside it, on a base from disk."""
    work = tmp_path_factory.mktemp("adapted")
    base = work / "base"
    runs = Elastic(work, lora=ADAPTER, model={"path": str(base), "tokenizer": "demo", "dtype": "float32"})
    model = U2ForDiffusion(U2Config.load(work / "tiny.json"))
    model.init_weights_(3)
    model.save_pretrained(base)
    for ranks in (2, 4, 1):
        loads = [runs.job(loaded, saved) for loaded, saved in ADAPTED if loaded.ranks == ranks]
        runs.launch([*([runs.job(TWO)] if ranks == TWO.ranks else []), *loads])
    return runs


@pytest.mark.slow
@pytest.mark.parametrize(("loaded", "saved"), ADAPTED, ids=str)
def test_an_adapter_continues_at_another_number_of_ranks_and_zero_stage(adapted, loaded, saved):
    adapted.check(loaded, saved)
    last = adapted.path(loaded, saved) / "checkpoints" / f"checkpoint-{STEPS}"
    assert (last / "adapter" / "adapter_model.safetensors").is_file()


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Elastic:
    """Saved at each topology, continued at each."""
    runs = Elastic(tmp_path_factory.mktemp("every"))
    for ranks in (1, 2, 4):
        runs.launch([runs.job(topology) for topology in TOPOLOGIES if topology.ranks == ranks])
    for ranks in (1, 2, 4):
        runs.launch([runs.job(loaded, saved) for loaded in TOPOLOGIES if loaded.ranks == ranks for saved in TOPOLOGIES])
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("saved", TOPOLOGIES, ids=lambda topology: f"from-{topology}")
@pytest.mark.parametrize("loaded", TOPOLOGIES, ids=lambda topology: f"to-{topology}")
def test_every_topology_continues_the_checkpoints_of_every_other(every, loaded, saved):
    every.check(loaded, saved)


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_uninterrupted_runs_agree_at_every_topology(every, topology):
    """What the continuations are measured by: ranks and ZeRO stage don't change what is trained."""
    ours, theirs = records(every.path(topology)), records(every.path(TOPOLOGIES[0]))
    assert [r["tokens"] for r in ours] == [r["tokens"] for r in theirs]
    assert [r["loss"] for r in ours] == pytest.approx([r["loss"] for r in theirs], rel=1e-3)
    assert samples_of(every.path(topology), topology.ranks, range(EPOCH_STEPS)) == Counter(range(SAMPLES))
