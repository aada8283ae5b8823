"""The script that makes checkpoints to measure with."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from merge_fixtures import tiny_config

from lumina_ft.adapters.combine import WeightedAdapter
from lumina_ft.adapters.merge import merge_adapters
from lumina_ft.models.u2 import U2ForDiffusion


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).resolve().parents[3] / "scripts" / "make_checkpoint.py"
    spec = importlib.util.spec_from_file_location("make_checkpoint", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("layout", ["packed", "split"])
def test_a_made_checkpoint_loads_and_its_adapter_merges(script: ModuleType, tmp_path: Path, layout: str) -> None:
    base, adapter, config = tmp_path / "base", tmp_path / "adapter", tiny_config()
    size = script.write_checkpoint(base, config, layout=layout, dtype=torch.bfloat16, seed=0)
    assert size == script.size_of(config, torch.bfloat16)
    weights = U2ForDiffusion.from_pretrained(base).state_dict()["model.word_embeddings.weight"]
    assert weights.dtype == torch.bfloat16 and 0.01 < float(weights.float().std()) < 0.03
    adapted = script.write_random_adapter(adapter, base, config, rank=2, seed=0)
    summary = merge_adapters(base, [WeightedAdapter(adapter)], tmp_path / "out")
    assert summary.base_checked and summary.adapted == adapted
    targets = ("attention", "experts")
    assert script.write_random_adapter(tmp_path / "experts", base, config, rank=2, seed=0, targets=targets) == 7
    check = merge_adapters(base, [WeightedAdapter(tmp_path / "experts")], tmp_path / "again").check
    assert check is not None and check.adapted == 7 and len(check.experts) == 3


def test_the_number_of_layers_reaches_the_wanted_size(script: ModuleType) -> None:
    assert script.layers_for(6e9, torch.bfloat16) == 4
    assert script.size_of(script.published_config(3), torch.bfloat16) < 6e9
