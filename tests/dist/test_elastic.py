"""Checkpoints of any number of ranks, ZeRO stage and spread of experts continued at any other (D3).

One launch runs several stages with a fresh engine each, because starting ranks costs more than training them here.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import dist_tiny
import pytest
import torch
from dist_launch import launch_ranks, read_json
from safetensors.torch import load_file, save_file

from lumina_ft.checkpoint.directory import read_state
from lumina_ft.models.moe import Router
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.monitor.metrics import WALL_TIME_KEYS, read_metrics

SAMPLES = 44
SAVED_AT, STEPS = 5, 10
EPOCH_STEPS = 8
"""The saved step lies inside the first epoch, whose last step has fewer packs than ranks; the last two steps belong to
the second epoch."""

EMPTY = -1
"""Sample id in a pack that only fills up a step."""

TOLERANCE = 1e-5
"""Absolute, on losses of about 9 nats: other ranks add the same fp32 gradients in another order."""

SEED = 28
CLEAR_CHOICE = 1e-4
"""With SEED no choice of experts after the saved step comes closer to another one, so that rounding changes none."""

ROUTER_SCALE = 10.0
"""Freshly drawn routers score all experts alike; these tell them apart."""


class Topology(NamedTuple):
    """How many ranks, which ZeRO stage, and how many ranks share the experts."""

    ranks: int
    zero: int
    experts: int = 1

    def __str__(self) -> str:
        return f"{self.ranks}x{self.experts}-zero{self.zero}"


ADAPTER = {
    "rank": 4,
    "alpha": 8.0,
    "dropout": 0.2,
    "targets": ["attention", "experts"],
    "modules_to_save": ["lm_head"],
}
JOBS_OF_A_LAUNCH = 12
MATRIX_SECONDS = 1800
"""The first test waits for all of its fixture's runs."""


class Elastic:
    """Runs of one configuration at several topologies, and their continuations at others.

    The selection bias of the routers moves in every step, so that it has to be saved and continued, too.
    """

    def __init__(self, work: Path, **sections: object) -> None:
        self.work = work
        self.sections = sections
        dist_tiny.prepare(work, samples=SAMPLES, short=True)
        model = U2ForDiffusion(U2Config.load(work / "tiny.json"))
        model.init_weights_(SEED)
        for module in model.modules():
            if isinstance(module, Router):
                with torch.no_grad():
                    module.weight.mul_(ROUTER_SCALE)
        model.save_pretrained(work / "base")

    def path(self, loaded: Topology, saved: Topology | None = None) -> Path:
        """Run directory of an uninterrupted run, or of the continuation of one."""
        return self.work / (f"{saved}-to-{loaded}" if saved else f"{loaded}")

    def job(self, loaded: Topology, saved: Topology | None = None) -> dict[str, Any]:
        """A whole run of ten steps, or its last five from the checkpoint that `saved` wrote."""
        sections: dict[str, Any] = {
            "seed": SEED,
            "model": {
                "path": str(self.work / "base"),
                "tokenizer": "demo",
                "dtype": "float32",
                "gradient_checkpointing": False,
            },
            "optim": {"lr": 1e-3, "expert_bias_rate": 0.002},
            "parallel": {
                "ranks": loaded.ranks,
                "zero": f"zero{loaded.zero}",
                "expert_parallel_size": loaded.experts,
            },
            "train": {"packs_per_step": 4, "save_every_steps": SAVED_AT, "tensorboard": False, "plots": False},
            "stages": [{"name": "only", "steps": STEPS}],
        }
        config = dist_tiny.run_config(self.work, self.path(loaded, saved).name, **{**sections, **self.sections})
        config["data"] |= {"eval_fraction": 0.0, "max_pack_tokens": 48, "block_tokens": 8}
        resume = self.path(saved) / "checkpoints" / f"checkpoint-{SAVED_AT}" if saved else None
        return {"config": config, "stage": 0, "resume": resume and str(resume)}

    def launch(self, jobs: Sequence[dict[str, Any]]) -> None:
        """Run jobs of the same number of ranks."""
        (ranks,) = {job["config"]["parallel"]["ranks"] for job in jobs}
        listing = self.work / "jobs.json"
        for first in range(0, len(jobs), JOBS_OF_A_LAUNCH):
            listing.write_text(json.dumps(jobs[first : first + JOBS_OF_A_LAUNCH]))
            launch_ranks("ranks_elastic.py", listing, ranks=ranks)

    def run(
        self,
        pairs: Sequence[tuple[Topology, Topology]],
        more: Mapping[int, Callable[[], dict[str, Any]]] | None = None,
    ) -> None:
        """Every run that is saved from, then every continuation, in as few launches as possible.

        Args:
            more: makes another job for the first launch of so many ranks; those of two come before the others.
        """
        whole = dict.fromkeys(saved for _, saved in pairs)
        # Those with two ranks first: what was saved there is continued in the launches of the others.
        order = sorted({topology.ranks for pair in pairs for topology in pair}, key=lambda ranks: (ranks != 2, -ranks))
        others = dict(more or {})
        done: set[Topology] = set()
        waiting = list(pairs)
        for ranks in (*order, *order):
            own = [topology for topology in whole if topology.ranks == ranks and topology not in done]
            done |= set(own)
            ready = [pair for pair in waiting if pair[0].ranks == ranks and pair[1] in done]
            waiting = [pair for pair in waiting if pair not in ready]
            jobs = [*map(self.job, own), *(self.job(*pair) for pair in ready)]
            if ranks in others:
                jobs.append(others.pop(ranks)())
            if jobs:
                self.launch(jobs)

    def twins(self) -> dict[str, Any]:
        """Two ranks that both hold the first experts."""
        job = self.job(TWO_SHARED)
        job["config"]["output_dir"] = str(self.work / "twins")
        return {**job, "fault": "twins", "fails": True}

    def bereft(self) -> dict[str, Any]:
        """A continuation of a checkpoint of two ranks that lacks the second one's experts."""
        source = self.path(TWO_SHARED) / "checkpoints" / f"checkpoint-{SAVED_AT}"
        left = shutil.copytree(source, self.work / "bereft" / "checkpoints" / source.name)
        file = left / "model" / "model.safetensors"
        tensors = load_file(file)
        tensors |= {name: tensor[:4].clone() for name, tensor in tensors.items() if ".mlp.experts." in name}
        save_file(tensors, file, metadata={"format": "pt", "experts": "0-3"})
        job = self.job(Topology(1, 3))
        job["config"]["output_dir"] = str(self.work / "bereft")
        return {**job, "resume": str(left), "fails": True}

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
        biases = [*seen(rest, loaded.ranks, "biases"), *seen(whole, saved.ranks, "biases")]
        assert biases.count(biases[0]) == len(biases)
        assert any(map(any, biases[0])) == ("expert_bias_max" in ours[-1]) == ("optim" not in self.sections)
        assert read_state(rest / "checkpoints" / f"checkpoint-{STEPS}").experts == "0-7"


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k not in WALL_TIME_KEYS} for record in read_metrics(run_dir)]


def tensor_files(run_dir: Path) -> dict[str, bytes]:
    """Content of every tensor file of the last checkpoint."""
    last = run_dir / "checkpoints" / f"checkpoint-{STEPS}"
    found = {str(path.relative_to(last)): path.read_bytes() for path in last.rglob("*.safetensors")}
    assert len(found) > 1
    return found


def seen(run_dir: Path, ranks: int, key: str) -> list[Any]:
    """What each rank has noted; see `ranks_elastic.py`."""
    return [read_json(run_dir / f"seen-{rank}.json")[key] for rank in range(ranks)]


def samples_of(run_dir: Path, ranks: int, steps: Iterable[int]) -> Counter[int]:
    """How often each sample was trained on in some steps, over all ranks."""
    of_ranks = seen(run_dir, ranks, "samples")
    return Counter(index for step in steps for rank in of_ranks for index in rank[str(step)] if index != EMPTY)


def smallest_gap(run_dir: Path, ranks: int) -> float:
    """How close any choice of experts after the saved step came to another one."""
    return min(gap for rank in seen(run_dir, ranks, "gaps") for step, gap in rank.items() if int(step) >= SAVED_AT)


TWO = Topology(2, 3)
TWO_SHARED = Topology(2, 3, 2)
CORE = [
    (Topology(2, 3), TWO),
    (Topology(2, 2), TWO),
    (Topology(4, 3), TWO),
    (Topology(1, 2), TWO),
    (TWO_SHARED, TWO_SHARED),
    (Topology(2, 2, 2), TWO),
    (Topology(1, 3), TWO_SHARED),
    (Topology(4, 3, 4), TWO_SHARED),
]


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Elastic:
    """Saved at 2 ranks, continued at 1, 2 and 4."""
    runs = Elastic(tmp_path_factory.mktemp("elastic"))
    runs.run(CORE, {2: runs.twins, 1: runs.bereft})
    return runs


@pytest.mark.parametrize(("loaded", "saved"), CORE, ids=str)
def test_a_checkpoint_continues_at_another_number_of_ranks_zero_stage_and_spread_of_experts(core, loaded, saved):
    core.check(loaded, saved)


@pytest.mark.parametrize("topology", [TWO, TWO_SHARED], ids=str)
def test_the_losses_compared_here_hang_on_no_close_choice_of_experts(core, topology):
    assert smallest_gap(core.path(topology), topology.ranks) > CLEAR_CHOICE


def test_a_rank_without_its_own_experts_ends_the_run_before_anything_is_written(core):
    run_dir = core.work / "twins"
    first, second = seen(run_dir, 2, "error")
    assert first == second
    assert re.match(
        r"RunError: model\.layers\.1\.mlp\.experts — experts 4-7 are on no rank; experts 0-3 are on two ranks "
        r"\(rank 0 has 0-3, rank 1 has 0-3\) — ",
        first,
    )
    assert "model.layers.2.mlp.experts" in first
    assert not (run_dir / "checkpoints").exists()


def test_a_checkpoint_that_lacks_the_experts_of_a_rank_is_refused_naming_them(core):
    (error,) = seen(core.work / "bereft", 1, "error")
    assert re.match(
        r"CheckpointError: \S+/model/model\.safetensors — it holds experts 0-3 — .*; missing: 4-7 — ", error
    )


ADAPTED = [
    (Topology(2, 3), TWO),
    (Topology(2, 2), TWO),
    (Topology(4, 3), TWO),
    (Topology(1, 2), TWO),
    (TWO_SHARED, TWO_SHARED),
    (Topology(2, 2, 2), TWO),
    (Topology(1, 3), TWO_SHARED),
    (Topology(4, 2, 4), TWO_SHARED),
]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Elastic:
    """The same with an adapter that drops inputs at random, and a head trained beside it."""
    runs = Elastic(tmp_path_factory.mktemp("adapted"), lora=ADAPTER, optim={"lr": 1e-3})
    runs.run(ADAPTED)
    return runs


@pytest.mark.slow
@pytest.mark.parametrize(("loaded", "saved"), ADAPTED, ids=str)
def test_an_adapter_continues_at_another_number_of_ranks_zero_stage_and_spread_of_experts(adapted, loaded, saved):
    adapted.check(loaded, saved)
    last = adapted.path(loaded, saved) / "checkpoints" / f"checkpoint-{STEPS}"
    assert sorted(path.name for path in last.iterdir() if path.is_dir()) == ["adapter", "optimizer"]


BALANCED = [(TWO_SHARED, TWO_SHARED), (Topology(1, 2), TWO_SHARED)]


@pytest.fixture(scope="module")
def balanced(tmp_path_factory: pytest.TempPathFactory) -> Elastic:
    """An adapter over a frozen base, of which only the selection bias of the routers moves."""
    runs = Elastic(tmp_path_factory.mktemp("balanced"), lora={**ADAPTER, "modules_to_save": []})
    runs.run(BALANCED)
    return runs


@pytest.mark.slow
@pytest.mark.parametrize(("loaded", "saved"), BALANCED, ids=str)
def test_M4_a_bias_that_moves_beside_an_adapter_is_stored_with_a_base_of_its_own(balanced, loaded, saved):
    balanced.check(loaded, saved)
    last = balanced.path(loaded, saved) / "checkpoints" / f"checkpoint-{STEPS}"
    assert sorted(path.name for path in last.iterdir() if path.is_dir()) == ["adapter", "model", "optimizer"]
    stored = load_file(last / "model" / "model.safetensors")
    (biases,) = seen(balanced.path(loaded, saved), 1, "biases")
    assert [stored[f"model.layers.{layer}.mlp.gate.expert_bias"].tolist() for layer in (1, 2)] == biases


WHOLE = [
    Topology(1, 2),
    Topology(2, 3),
    Topology(2, 2, 2),
    Topology(4, 2),
    Topology(4, 3, 2),
    Topology(4, 2, 4),
]
EVERY = [
    (loaded if loaded == saved else loaded._replace(zero=5 - saved.zero), saved)
    for loaded, saved in product(WHOLE, WHOLE)
] + [(Topology(4, 2, 2), TWO_SHARED)]
"""Each number of ranks and spread to each other one, into the other ZeRO stage; and each topology to itself."""


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Elastic:
    runs = Elastic(tmp_path_factory.mktemp("every"))
    runs.run(EVERY)
    return runs


@pytest.mark.slow
@pytest.mark.timeout(MATRIX_SECONDS)
@pytest.mark.parametrize(("loaded", "saved"), EVERY, ids=str)
def test_every_topology_continues_the_checkpoints_of_every_other(every, loaded, saved):
    every.check(loaded, saved)


@pytest.mark.slow
@pytest.mark.timeout(MATRIX_SECONDS)
@pytest.mark.parametrize("topology", WHOLE, ids=str)
def test_uninterrupted_runs_agree_at_every_topology(every, topology):
    """What the continuations are measured by: ranks, ZeRO stage and spread don't change what is trained."""
    ours, theirs = records(every.path(topology)), records(every.path(WHOLE[0]))
    assert [r["tokens"] for r in ours] == [r["tokens"] for r in theirs]
    assert [r["loss"] for r in ours] == pytest.approx([r["loss"] for r in theirs], rel=1e-3)
    assert samples_of(every.path(topology), topology.ranks, range(EPOCH_STEPS)) == Counter(range(SAMPLES))
    assert smallest_gap(every.path(topology), topology.ranks) > CLEAR_CHOICE
