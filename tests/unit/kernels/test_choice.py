"""`model.kernels`: what a name stands for, what it is refused for, and what `auto` says."""

import logging
from dataclasses import replace

import pytest
import torch

from lumina_ft.errors import ConfigError
from lumina_ft.kernels import Kernels, choice, eager_experts, route
from lumina_ft.kernels.moe.fused import fused_experts, fused_mlp
from lumina_ft.kernels.moe.grouped import grouped_experts, grouped_mlp
from lumina_ft.kernels.router.fused import fused_route

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
MODEL = Kernels("auto", hidden_size=64, expert_size=32, num_experts=8, head_dim=16)


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    """What earlier tests chose or said, and an interpreter that somebody may have switched on."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for cached in (choice._resolve, choice._log_once):
        cached.cache_clear()
    yield
    choice._resolve.cache_clear()


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, logger="lumina_ft.kernels")
    return lambda: [record.getMessage() for record in caplog.records]


def test_an_unknown_choice_is_refused():
    with pytest.raises(ConfigError, match="model.kernels — 'flash' — must be one of auto, triton, torch, eager — use"):
        replace(MODEL, choice="flash")


def test_a_name_stands_for_every_operation():
    torch_ones = replace(MODEL, choice="torch").on(CPU, torch.float32)
    assert torch_ones == ("segmented", grouped_experts, grouped_mlp, route)
    eager_ones = replace(MODEL, choice="eager").on(CPU, torch.float32)
    assert eager_ones == ("dense", eager_experts, None, route)


def test_auto_on_the_cpu_is_torch_and_says_so_once(said):
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        assert MODEL.on(CPU, dtype) == replace(MODEL, choice="torch").on(CPU, dtype)
    assert said() == ["kernels=auto chose torch"]


def test_auto_stays_torch_under_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert MODEL.on(CPU, torch.float32).attention == "segmented"


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({"hidden_size": 62}, torch.float32, "hidden_size=62 is not a multiple of 4"),
        ({"expert_size": 36}, torch.bfloat16, "moe_intermediate_size=36 is not a multiple of 8"),
        ({}, torch.float64, "has no torch.float64"),
    ],
)
def test_auto_takes_the_next_one_for_a_single_operation_and_a_name_is_refused(said, changes, dtype, reason):
    got = replace(MODEL, **changes).on(CPU, dtype)
    assert (got.attention, got.experts, got.rows) == ("segmented", eager_experts, None)
    (line,) = said()
    assert line.startswith("kernels=auto chose torch for attention and router, eager for experts (") and reason in line
    with pytest.raises(ConfigError, match=f"model.kernels — torch — .*{reason}.* — use auto or eager$"):
        replace(MODEL, choice="torch", **changes).on(CPU, dtype)
    # Without routed experts their sizes are nobody's business.
    assert replace(MODEL, choice="torch", num_experts=0, **changes).on(CPU, dtype).attention == "segmented"


def test_experts_on_other_ranks_rule_the_reference_out():
    spread = replace(MODEL, spread=True)
    assert spread.on(CPU, torch.float32).rows is grouped_mlp
    with pytest.raises(ConfigError, match="eager — the reference loop .* — use auto or torch, or parallel.expert_"):
        replace(spread, choice="eager").on(CPU, torch.float32)
    message = "auto — .*no torch.float64, and the reference .* — use parallel.expert_parallel_size: 1, or another model"
    with pytest.raises(ConfigError, match=message):
        spread.on(CPU, torch.float64)
    with pytest.raises(ConfigError, match="torch — .*no torch.float64 — use auto and parallel.expert_parallel_size"):
        replace(spread, choice="torch").on(CPU, torch.float64)


@pytest.fixture
def on_gpu(monkeypatch):
    """Kernels run wherever there is a GPU, real or not."""
    monkeypatch.setattr(choice, "unavailable_reason", lambda device, dtype: None if device.type == "cuda" else "no GPU")


def test_auto_on_a_gpu_is_triton_and_says_so_once(on_gpu, said):
    got = MODEL.on(GPU, torch.bfloat16)
    assert got == ("tiled", fused_experts, fused_mlp, fused_route)
    assert got == replace(MODEL, choice="triton").on(GPU, torch.bfloat16) == MODEL.on(GPU, torch.bfloat16)
    assert said() == ["kernels=auto chose triton"]


@pytest.mark.parametrize(
    ("changes", "got", "line"),
    [
        (
            {"hidden_size": 40},
            ("tiled", grouped_experts, grouped_mlp, fused_route),
            "triton for attention and router, torch for experts (hidden_size=40 is not a multiple of 16, ",
        ),
        (
            {"hidden_size": 42},
            ("tiled", eager_experts, None, fused_route),
            "triton for attention and router, eager for experts (hidden_size=42 is not a multiple of 16, ",
        ),
        (
            {"head_dim": 256},
            ("segmented", fused_experts, fused_mlp, fused_route),
            "torch for attention (attention kernels serve head dims up to 128, not 256), triton for experts and router",
        ),
        (
            {"num_experts": 1024},
            ("tiled", grouped_experts, grouped_mlp, route),
            "triton for attention, torch for experts (1024 experts are more than the 512 ",
        ),
    ],
)
def test_auto_on_a_gpu_decides_for_each_operation_and_triton_refuses(on_gpu, said, changes, got, line):
    model = replace(MODEL, **changes)
    assert model.on(GPU, torch.bfloat16) == got
    assert said()[0].startswith(f"kernels=auto chose {line}")
    with pytest.raises(ConfigError, match="^model.kernels — triton — .* — use auto or "):
        replace(model, choice="triton").check(GPU, torch.bfloat16)


def test_auto_on_a_gpu_without_kernels_says_why(monkeypatch, said):
    monkeypatch.setattr(choice, "unavailable_reason", lambda device, dtype: "no tile sizes for this GPU")
    assert MODEL.on(GPU, torch.float32) == replace(MODEL, choice="torch").on(GPU, torch.float32)
    assert said() == ["kernels=auto chose torch (no tile sizes for this GPU)"]


def test_triton_needs_a_device(monkeypatch):
    triton = replace(MODEL, choice="triton")
    with pytest.raises(ConfigError, match="triton — Triton kernels need a CUDA device, this is cpu — use auto or tor"):
        triton.check(CPU, torch.float32)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match="triton — Triton's interpreter computes torch.bfloat16 wrongly — use auto"):
        triton.check(CPU, torch.bfloat16)


def test_checking_says_nothing(said):
    MODEL.check(CPU, torch.float32)
    assert said() == []
