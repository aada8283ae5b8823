"""Training steps of two ranks on interpreted Triton kernels: everything partitioned, experts spread, adapters drop."""

import json
from pathlib import Path

import dist_tiny
import pytest
from dist_launch import launch_ranks

from lumina_ft.monitor.metrics import read_metrics

TOLERANCE = 2e-6
"""Relative; sums run in another order, and the second step starts from what the first one wrote."""


@pytest.mark.slow
def test_kernels_under_zero3_with_spread_experts_train_as_torch_operations_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are saved for backward change their storage in between, and rows come from other ranks."""
    # Only processes started from here: Triton reads it when it is imported.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    dist_tiny.prepare(tmp_path, samples=12, short=True)
    found = []
    for kernels in ("torch", "triton"):
        config = dist_tiny.run_config(
            tmp_path,
            kernels,
            data={"path": str(tmp_path / "data"), "max_pack_tokens": 64, "block_tokens": 8},
            optim={"lr": 1e-5},
            lora={"rank": 4, "targets": ["attention", "experts"], "dropout": 0.1},
            train={"packs_per_step": 2, "tensorboard": False, "plots": False},
            parallel={"ranks": 2, "zero": "zero3", "expert_parallel_size": 2},
            stages=[{"name": "one", "steps": 2}],
        )
        config["model"]["kernels"] = kernels
        path = tmp_path / f"{kernels}.json"
        path.write_text(json.dumps(config))
        launch_ranks("ranks_stage.py", path, 0)
        found.append([r for r in read_metrics(tmp_path / kernels) if "grad_norm" in r])
    want, got = found
    assert len(want) == len(got) == 2
    for before, after in zip(want, got, strict=True):
        for name in ("loss", "text_loss", "balance_loss", "grad_norm"):
            assert after[name] == pytest.approx(before[name], rel=TOLERANCE), name
        assert after["expert_load_max"] == before["expert_load_max"]
