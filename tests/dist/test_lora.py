"""Adapters on two ranks: gradients against one process, and their way through the stages of a run (D5, T1).

Every kind of adapter at one ZeRO stage; the same at the other stage is `slow`. One launch for each set.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import dist_tiny
import pytest
import torch
from dist_launch import launch_ranks, read_json
from safetensors.torch import load_file

from lumina_ft.adapters.files import LoraFile, read_adapter
from lumina_ft.adapters.lora import load_adapter, merged_tensors
from lumina_ft.checkpoint.directory import Checkpoint, read_state
from lumina_ft.models.groups import group_of
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.monitor.metrics import WALL_TIME_KEYS, read_metrics

CORE = [("plain", 0), ("plain", 3), ("dora", 3), ("pissa", 2), ("dropout", 2), ("dora_dropout", 3), ("beside", 3)]
REST = [("plain", 2), ("dora", 2), ("pissa", 3), ("dropout", 3), ("dora_dropout", 2), ("beside", 2)]
PARITY = CORE + [pytest.param(*case, marks=pytest.mark.slow) for case in REST]
HEADS = {"lm_head", "image_heads", "codebook_head"}
LORA = {"rank": 4, "alpha": 8, "dropout": 0.1, "lr_ratio": 4}
STAGES = [
    {"name": "freeze_vision", "train": ["lm_head"], "freeze": ["vision"], "steps": 4},
    {"name": "heads", "train": ["heads"], "lora": "freeze", "steps": 2},
    {"name": "full", "train": ["all"], "lora_at_end": "merge", "steps": 2},
]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict]]:
    work = tmp_path_factory.mktemp("lora")
    dist_tiny.prepare(work, samples=60)

    @cache
    def launch(part: str) -> list[dict]:
        launch_ranks("ranks_lora.py", work, part)
        return read_json(work / f"lora-{part}.json")

    return launch


@pytest.fixture
def records(request: pytest.FixtureRequest, launched: Callable[[str], list[dict]]) -> list[dict]:
    """What the launch that the test's case belongs to has found."""
    return launched("core" if request.node.get_closest_marker("slow") is None else "rest")


def find(records: list[dict], **wanted: object) -> dict:
    (record,) = [r for r in records if wanted.items() <= r.items()]
    return record


@pytest.mark.parametrize(("case", "zero"), PARITY)
def test_T1_adapter_gradients_equal_one_process(records, case, zero):
    """With accumulation and gradient checkpointing; at ZeRO-3 every parameter is partitioned."""
    record = find(records, case=case, zero=zero)
    assert record["same_names"] and record["zero_gradients"] == []
    assert record["worst_gradient"] <= 1e-6
    assert record["applied"]


@pytest.mark.parametrize(("case", "zero"), PARITY)
def test_the_base_under_an_adapter_stays_bitwise(records, case, zero):
    assert find(records, case=case, zero=zero)["frozen_moved"] == []


@pytest.mark.parametrize(("case", "zero"), PARITY)
def test_merged_weights_are_the_same_on_partitioned_models(records, case, zero):
    assert find(records, case=case, zero=zero)["worst_merged"] == 0.0


def test_lora_plus_trains_b_faster(records):
    assert find(records, case="plain", zero=3)["rates"] == [0.01, 0.02]
    # Magnitudes neither decay nor run faster.
    assert find(records, case="dora", zero=3)["rates"] == [0.01, 0.01, 0.02]


@pytest.mark.parametrize("name", ("dora", pytest.param("pissa", marks=pytest.mark.slow)))
def test_values_taken_from_weights_do_not_depend_on_the_zero_stage(records, name):
    """In bf16 ZeRO-3 casts before they are taken and ZeRO-2 afterwards."""
    assert find(records, case="stored", name=name, zero=3)["same"]
    assert find(records, case="stored", name=name, zero=3)["dtype"] == "torch.bfloat16"


class Runs:
    """Runs of tiny stages, one launch for all: each is a config and the way through its stages."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.jobs: list[dict] = []
        dist_tiny.prepare(work, samples=90)
        model = U2ForDiffusion(U2Config.load(work / "tiny.json"))
        model.init_weights_(5)
        model.save_pretrained(work / "base")
        zero = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
        (work / "zero.json").write_text(json.dumps(zero))

    def add(self, name: str, stages: list[dict], ends: list[str | None], **sections: object) -> None:
        """Queue a run; `ends` names the checkpoint that each of its stages starts from."""
        base = {"path": str(self.work / "base"), "tokenizer": "demo", "dtype": "float32"}
        parallel = {"ranks": 2, "zero": str(self.work / "zero.json")}
        given = {"model": base, "parallel": parallel, "lora": LORA, "stages": stages, **sections}
        config = dist_tiny.run_config(self.work, name, **given)
        config["train"] |= {"save_every_steps": 2}
        first = len(stages) - len(ends)
        for index, end in enumerate(ends, start=first):
            path = None if end is None else str(self.work / end)
            self.jobs.append({"config": config, "stage": index, "resume": path})

    def start(self) -> None:
        path = self.work / "jobs.json"
        path.write_text(json.dumps(self.jobs))
        launch_ranks("ranks_elastic.py", path)

    def checkpoint(self, name: str, step: int) -> Checkpoint:
        path = self.work / name / "checkpoints" / f"checkpoint-{step}"
        return Checkpoint(path, read_state(path))

    def adapter(self, name: str, step: int) -> LoraFile:
        folder = self.checkpoint(name, step).adapter_dir
        assert folder is not None
        return read_adapter(folder)

    def losses(self, name: str, stage: str) -> list[dict]:
        return [
            {key: value for key, value in record.items() if key not in WALL_TIME_KEYS}
            for record in read_metrics(self.work / name)
            if record["stage"] == stage
        ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("runs"))
    inside = "checkpoints/checkpoint-2"
    runs.add("staged", STAGES, [None, "staged/checkpoints/checkpoint-4", "staged/checkpoints/checkpoint-6"])
    runs.add("resumed", STAGES[:1], [f"staged/{inside}"])
    runs.add("merged", [{**STAGES[0], "lora_at_end": "merge"}], [None])
    runs.start()
    return runs


@pytest.fixture(scope="module")
def more_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("more_runs"))
    inside = "checkpoints/checkpoint-2"
    random = {"config": str(runs.work / "tiny.json"), "random_init": True, "dtype": "bfloat16"}
    pissa = {"rank": 4, "alpha": 8, "init": "pissa", "use_rslora": True, "rank_pattern": {"attention.dense": 2}}
    sections = {"model": random, "lora": pissa, "parallel": {"ranks": 2, "zero": "zero2"}}
    runs.add("pissa", [{"name": "a", "steps": 4}], [None], **sections)
    runs.add("pissa_resumed", [{"name": "a", "steps": 4}], [f"pissa/{inside}"], **sections)
    dropped = [
        {"name": "a", "steps": 2, "lora_at_end": "drop"},
        {"name": "b", "train": ["router"], "lora": "off", "steps": 2},
    ]
    dora = {"rank": 4, "alpha": 8, "use_dora": True, "targets": ["attention"], "modules_to_save": ["lm_head"]}
    runs.add("dropped", dropped, [None, f"dropped/{inside}"], lora=dora)
    runs.start()
    return runs


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def same_pairs(one: LoraFile, other: LoraFile) -> bool:
    assert one.targets.keys() == other.targets.keys()
    return all(
        torch.equal(mine, theirs)
        for module in one.targets
        for mine, theirs in zip(one.pair(module), other.pair(module), strict=True)
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor)
    )


def test_an_adapter_checkpoint_names_its_base_and_holds_what_else_changed(runs):
    checkpoint, adapter = runs.checkpoint("staged", 4), runs.adapter("staged", 4)
    assert not (checkpoint.path / "model").exists()
    assert checkpoint.base_dir == runs.work / "base"
    assert adapter.base is not None and adapter.base.digest == checkpoint.state.base_identity
    assert list(adapter.modules) == ["lm_head.weight"] and adapter.modules_to_save == ("lm_head",)
    assert not torch.equal(adapter.module_tensor("lm_head.weight"), weights(runs.work / "base")["lm_head.weight"])
    assert adapter.dropout == 0.1


def test_a_frozen_adapter_stays_bitwise_while_heads_train(runs):
    before, after = runs.adapter("staged", 4), runs.adapter("staged", 6)
    assert same_pairs(before, after)
    assert {group_of(name) for name in after.modules if "channel_mask" not in name} == HEADS
    assert {"lm_img_head.0", "multi_codebook_head"} <= set(after.modules_to_save)
    assert not torch.equal(before.module_tensor("lm_head.weight"), after.module_tensor("lm_head.weight"))


def test_merging_at_the_end_leaves_a_plain_model(runs):
    checkpoint = runs.checkpoint("staged", 8)
    assert checkpoint.adapter_dir is None and checkpoint.base_dir == checkpoint.path / "model"
    model = U2ForDiffusion.from_pretrained(checkpoint.base_dir)
    base = weights(runs.work / "base")
    moved = {group_of(n) for n, p in model.named_parameters() if not torch.equal(p, base[n])}
    assert {"attention", "experts", "image_embeddings", "norms"} | HEADS <= moved


def test_merged_weights_are_those_of_the_kept_adapter(runs):
    """Two runs that differ only in what becomes of the adapter."""
    model = U2ForDiffusion.from_pretrained(runs.work / "base")
    adapter = runs.checkpoint("staged", 4).adapter_dir
    assert adapter is not None
    wanted = {name: tensor for name, tensor, _ in merged_tensors(model, load_adapter(model, adapter))}
    found = weights(runs.checkpoint("merged", 4).base_dir)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_resumed_adapter_stage_is_bit_identical_dropout_included(runs):
    assert runs.losses("resumed", "freeze_vision") == runs.losses("staged", "freeze_vision")[2:]
    assert same_pairs(runs.adapter("resumed", 4), runs.adapter("staged", 4))


@pytest.mark.slow
def test_random_weights_are_written_and_pissa_is_relative_to_them(more_runs):
    checkpoint, adapter = more_runs.checkpoint("pissa", 4), more_runs.adapter("pissa", 4)
    assert checkpoint.base_dir == checkpoint.path / "model"
    fresh = U2ForDiffusion(U2Config.load(more_runs.work / "tiny.json"))
    fresh.init_weights_(3)
    stored = weights(checkpoint.base_dir)
    assert all(torch.equal(stored[n], p.bfloat16()) for n, p in fresh.named_parameters())
    ranks = {name.rpartition(".")[2]: info.rank for name, info in adapter.targets.items()}
    assert (ranks["query_key_value"], ranks["dense"]) == (8, 4)


@pytest.mark.slow
def test_a_resumed_pissa_stage_is_bit_identical(more_runs):
    assert more_runs.losses("pissa_resumed", "a") == more_runs.losses("pissa", "a")[2:]
    assert same_pairs(more_runs.adapter("pissa_resumed", 4), more_runs.adapter("pissa", 4))


@pytest.mark.slow
def test_a_dropped_adapter_is_kept_on_disk_and_the_next_stage_starts_without_it(more_runs):
    first, second = more_runs.checkpoint("dropped", 2), more_runs.checkpoint("dropped", 4)
    assert first.state.adapter == "dropped" and first.adapter_dir is not None
    base, before, after = (weights(d) for d in (more_runs.work / "base", first.base_dir, second.base_dir))
    assert {n for n in base if not torch.equal(base[n], before[n])} == {"lm_head.weight"}
    assert {group_of(n) for n in base if not torch.equal(before[n], after[n])} == {"router"}
