"""How the demo's runs spread and adapted their routed experts, read from what they left on disk."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lumina_ft.adapters.files import read_adapter
from lumina_ft.monitor.metrics import SUMMARY_FILE


def describe_experts(run: Path, adapter: Path, ranks: int) -> dict[str, Any]:
    """Facts for the demo's table.

    Args:
        run: directory of the base's run. adapter: directory of the adapter.
        ranks: that shared the experts.
    """
    stages = json.loads((run / SUMMARY_FILE).read_text(encoding="utf-8"))
    counts = np.array(stages[-1]["expert_counts"], dtype=np.int64)
    targets = read_adapter(adapter).targets.values()
    pairs = [info.rank * (info.in_features + info.out_features) * (info.num_experts or 1) for info in targets]
    return {
        "expert_parallel_size": ranks,
        "experts_per_rank": counts.shape[1] // ranks,
        "busiest_rank_load": busiest_rank_load(counts, ranks),
        "adapter_parameters": sum(pairs),
        "expert_adapter_parameters": sum(n for n, info in zip(pairs, targets, strict=True) if info.num_experts),
    }


def busiest_rank_load(counts: NDArray[np.int64], ranks: int) -> float:
    """Routed slots of the rank that got most of them, relative to an even spread.

    Args:
        counts: [L, E] slots routed to each expert of each MoE layer.
        ranks: that share the experts, in runs of E / ranks.
    """
    per_rank = counts.sum(axis=0).reshape(ranks, -1).sum(axis=1)
    return float(per_rank.max() * ranks / per_rank.sum())
