"""Checkpoints of adapters on experts that two ranks share: whole adapters, and merges as `merge-lora` makes them."""

import json
from pathlib import Path

import dist_tiny
import pytest
import torch
from dist_engines import fresh_model
from dist_launch import launch_ranks
from torch import Tensor

from lumina_ft.adapters.combine import WeightedAdapter
from lumina_ft.adapters.files import read_adapter
from lumina_ft.adapters.merge import merge_adapters
from lumina_ft.models.hf_keys import CHANNEL_MASK
from lumina_ft.models.identity import model_identity
from lumina_ft.models.native import NativeReader
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config

EXPERTS = 8
NAMES = [f"model.layers.{layer}.mlp.experts.{part}_proj" for layer in (1, 2) for part in ("gate", "up", "down")]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("expert-save")
    dist_tiny.prepare(folder, samples=30)
    launch_ranks("ranks_expert_save.py", folder)
    return folder


@pytest.fixture(params=[3, 2], ids=["zero3", "zero2"])
def runs(work: Path, request: pytest.FixtureRequest) -> dict[str, Path]:
    """The one checkpoint of each run."""
    found = {name: work / f"{name}-{request.param}" / "checkpoints" for name in ("random", "kept", "merged", "dropped")}
    return {name: next(path.glob("checkpoint-*")) for name, path in found.items()}


def weights(directory: Path) -> dict[str, Tensor]:
    with NativeReader(directory) as reader:
        return {name: reader.reader.read(tensor.keys[0]).clone() for name, tensor in reader.tensors.items()}


def test_D5_what_a_checkpoint_consists_of(runs):
    folders = {name: sorted(p.name for p in path.iterdir() if p.is_dir()) for name, path in runs.items()}
    assert folders == {
        "random": ["adapter", "model", "optimizer"],
        "kept": ["adapter", "optimizer"],
        "merged": ["model", "optimizer"],
        "dropped": ["adapter", "optimizer"],
    }
    states = {name: json.loads((path / "state.json").read_text()) for name, path in runs.items()}
    assert {name: state["adapter"] for name, state in states.items()} == {
        "random": "kept",
        "kept": "kept",
        "merged": "none",
        "dropped": "dropped",
    }
    identity = model_identity(runs["random"] / "model")
    assert all(read_adapter(runs[name] / "adapter").base == identity for name in ("random", "kept", "dropped"))


def test_M5_a_model_holds_the_experts_of_every_rank_in_their_order(runs, work: Path):
    stored = weights(runs["random"] / "model")
    drawn = fresh_model(U2Config.load(work / "tiny.json")).state_dict()
    for name in NAMES:
        assert stored[name].shape[0] == EXPERTS and torch.equal(stored[name], drawn[name]), name


def test_D5_an_adapter_holds_the_experts_of_every_rank(runs):
    file = read_adapter(runs["kept"] / "adapter")
    assert {name for name in file.targets if ".experts." in name} == set(NAMES)
    for name in NAMES:
        a, b, scale, _ = file.pair(name)
        rank = 2 if name.endswith("up_proj") else 4
        assert a.shape[:2] == (EXPERTS, rank) and scale == (6.0 if name.endswith("down_proj") else 8.0) / rank
        trained = [expert for expert in range(EXPERTS) if b[expert].any()]
        assert min(trained) < EXPERTS // 2 <= max(trained), "experts of both ranks"
        assert len({tuple(a[expert].flatten().tolist()) for expert in range(EXPERTS)}) == EXPERTS


def test_D5_lora_at_end_merge_writes_what_merge_lora_makes_of_the_kept_adapter(runs, tmp_path: Path):
    base = runs["random"] / "model"
    summary = merge_adapters(base, [WeightedAdapter(runs["kept"] / "adapter")], tmp_path / "out")
    assert summary.check is not None and set(summary.check.experts) == set(NAMES) and summary.base_checked
    at_end, afterwards, before = weights(runs["merged"] / "model"), weights(tmp_path / "out"), weights(base)
    assert at_end.keys() == afterwards.keys()
    for name, value in afterwards.items():
        assert torch.equal(at_end[name], value), name
    changed = {name for name, value in at_end.items() if not torch.equal(value, before[name])}
    assert set(NAMES) < changed and all(".attention." in name for name in changed - set(NAMES))


def test_D5_peft_merges_the_adapter_to_the_same_model(runs):
    from peft import PeftModel

    model = U2ForDiffusion.from_pretrained(runs["random"] / "model")
    peft = PeftModel.from_pretrained(model, runs["kept"] / "adapter").merge_and_unload().state_dict()
    for name, value in weights(runs["merged"] / "model").items():
        if name == CHANNEL_MASK:
            continue
        assert float((peft[name] - value).abs().max()) <= 1e-6 * float(value.abs().max()), name
