"""Kernels that can't run a model on this machine, found before a rank is started."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lumina_ft.config.schema import RunConfig
from lumina_ft.errors import ConfigError
from lumina_ft.launch import checks
from lumina_ft.launch.checks import check_run
from lumina_ft.launch.plan_view import describe_run
from lumina_ft.models.u2_config import SHIPPED_CONFIGS

Make = Callable[..., RunConfig]


@pytest.fixture
def make(tmp_path: Path, dataset: Path) -> Make:
    """A run of `u2-tiny` in float32, with changes of its config.json."""

    def build(kernels: str, *, dtype: str = "float32", **sizes: Any) -> RunConfig:
        config = json.loads((SHIPPED_CONFIGS / "u2-tiny.json").read_text())
        (tmp_path / "model.json").write_text(json.dumps({**config, **sizes}))
        model = {"config": str(tmp_path / "model.json"), "random_init": True, "dtype": dtype, "kernels": kernels}
        return RunConfig.model_validate(
            {
                "output_dir": tmp_path / "out",
                "model": model,
                "data": {"path": dataset},
                "stages": [{"name": "one", "steps": 3}],
            }
        )

    return build


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that shows a GPU, which must not be touched: that would take memory for as long as the run lasts."""
    monkeypatch.setattr(checks, "has_gpu", lambda: True)
    for name in ("get_device_capability", "init", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("the launcher woke the GPU"))


@pytest.mark.parametrize("kernels", ["auto", "torch", "eager"])
def test_kernels_of_this_machine_pass(make: Make, kernels: str) -> None:
    check_run(make(kernels))


def test_a_dry_run_refuses_triton_without_a_gpu(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    message = r"^model\.kernels — triton — Triton kernels need a CUDA device, this is cpu — use auto or torch$"
    with pytest.raises(ConfigError, match=message):
        describe_run(make("triton"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_run(make("triton"))
    with pytest.raises(ConfigError, match=r"^model\.kernels — triton — .*torch\.bfloat16 wrongly — use auto or torch$"):
        check_run(make("triton", dtype="bfloat16"))


def test_triton_passes_where_there_is_a_gpu_without_waking_it(make: Make, gpu: None) -> None:
    check_run(make("triton", dtype="bfloat16"))


def test_sizes_that_a_named_choice_can_not_run_are_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"^model\.kernels — torch — moe_intermediate_size=62 .* — use auto or eag"):
        check_run(make("torch", moe_intermediate_size=62))
    check_run(make("eager", moe_intermediate_size=62))
    check_run(make("auto", moe_intermediate_size=62))
    check_run(make("torch", moe_intermediate_size=62, first_k_dense_replace=4))
