"""Kernels that a rank can't run end it before weights are read."""

from pathlib import Path

import pytest
import torch
from small_u2 import small_config

from lumina_ft.config.schema import ModelConfig
from lumina_ft.errors import CheckpointError, ConfigError
from lumina_ft.parallel.dist import World
from lumina_ft.train.run import build_model

NO_ZERO = {"zero_optimization": {"stage": 0}}


def test_kernels_are_checked_on_the_ranks_own_device_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def build(kernels: str) -> None:
        cfg = ModelConfig(path=tmp_path, dtype="float32", kernels=kernels)  # pyright: ignore[reportArgumentType]
        world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
        build_model(cfg, small_config(), NO_ZERO, weights=tmp_path / "missing", seed=0, world=world)

    with pytest.raises(ConfigError, match="model.kernels — triton — Triton kernels need a CUDA device, this is cpu"):
        build("triton")
    with pytest.raises(CheckpointError, match="missing"):
        build("torch")
