"""The demo's facts about experts."""

import json
from pathlib import Path

import numpy as np
import pytest
from small_u2 import small_config

from lumina_ft.adapters.files import write_adapter
from lumina_ft.adapters.lora import attach_adapter
from lumina_ft.config.lora_schema import LoraConfig
from lumina_ft.demo.experts import busiest_rank_load, describe_experts
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.monitor.metrics import SUMMARY_FILE


@pytest.mark.parametrize(
    ("counts", "ranks", "load"),
    [
        ([[1, 1, 1, 1]], 2, 1.0),
        ([[3, 1, 0, 0], [2, 2, 0, 0]], 2, 2.0),
        ([[1, 2, 3, 0], [1, 0, 1, 0]], 2, 1.0),
        ([[6, 2, 0, 0]], 4, 3.0),
    ],
)
def test_the_busiest_rank_is_measured_against_an_even_spread(counts, ranks: int, load: float):
    assert busiest_rank_load(np.array(counts), ranks) == load


def test_adapter_parameters_on_experts_are_those_of_every_expert(tmp_path: Path):
    model = U2ForDiffusion(small_config())
    model.init_weights_(seed=3)
    adapter = attach_adapter(model, LoraConfig(rank=2, targets=("attention", "experts")), seed=1)
    write_adapter(tmp_path / "adapter", model, adapter, base=None, base_name="base", changed=())
    counts = [[5, 5, 2, 0], [5, 3, 2, 2]]
    stages = [{"expert_counts": [[0, 0, 0, 9]] * 2}, {"expert_counts": counts}]
    (tmp_path / SUMMARY_FILE).write_text(json.dumps(stages))
    facts = describe_experts(tmp_path, tmp_path / "adapter", ranks=2)
    # Two layers, three projections between 16 and 8 features, four experts.
    assert facts["expert_adapter_parameters"] == 2 * 3 * 4 * 2 * (16 + 8)
    assert facts["adapter_parameters"] == sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)
    assert facts["adapter_parameters"] > facts["expert_adapter_parameters"]
    assert (facts["expert_parallel_size"], facts["experts_per_rank"], facts["busiest_rank_load"]) == (2, 2, 1.5)
