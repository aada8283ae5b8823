"""Tuning's own runs, small: each tile is compared with torch before it is timed."""

import pytest
import torch

from lumina_ft.bench import tune
from lumina_ft.bench.kernel_cases import TORCH, TRITON, Case, Sizes, kernel_cases
from lumina_ft.kernels.launch import use_tiles
from lumina_ft.kernels.tiles import Tile

SIZES = Sizes(
    tokens=8, hidden=32, width=16, experts=4, top_k=2, rank=4, groups=2, kept_groups=1, samples=1, sample_tokens=64,
    query_heads=2, key_heads=1,
)  # fmt: skip
CPU = torch.device("cpu")
CASES = {case.name: case for case in kernel_cases(SIZES)}

REPRESENTATIVE = [
    pytest.param("experts trained float32", marks=pytest.mark.slow),
    pytest.param("experts adapted-dropout float32", marks=pytest.mark.slow),
    pytest.param("experts sorted-adapted-dropout float32", marks=pytest.mark.slow),
    "attention head dim 16, 2 of 1 heads float32",
    "route 4 experts in 2 groups with bias",
]


@pytest.fixture(autouse=True)
def one_timed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "REPEATS", 1)


def _expected(case: Case) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return case.prepare(CPU, TORCH)()


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_cases_mean_the_same_to_triton_and_torch(name: str) -> None:
    torch.manual_seed(0)
    results = CASES[name].prepare(CPU, TRITON)()
    expected = _expected(CASES[name])
    assert results.keys() == expected.keys()
    assert tune.wrong(results, expected, 1e-5) == []


def test_a_tile_is_timed_where_it_computes_right() -> None:
    case = CASES["route 4 experts in 2 groups with bias"]
    expected = _expected(case)
    tiles = {("route", "float32"): Tile({"BLOCK_M": 2}, 1, 1)}
    assert 0 < tune._time(case, CPU, tiles, expected) < float("inf")
    expected["topk_weight"] = expected["topk_weight"] * 1.01
    assert tune._time(case, CPU, tiles, expected) == float("inf")


@pytest.mark.slow
def test_plans_are_built_for_the_tile_under_test() -> None:
    """A tile list of another size than the kernel's would leave keys out."""
    case = CASES["attention head dim 16, 2 of 1 heads float32"]
    expected = _expected(case)
    for kernel in ("attention_forward", "attention_dq", "attention_dkv"):
        tiles = {(kernel, "float32-16"): Tile({"BLOCK_M": 16, "BLOCK_N": 64}, 1, 1)}
        assert tune._time(case, CPU, tiles, expected) < float("inf")
        with use_tiles(tiles):
            torch.manual_seed(0)
            assert tune.wrong(case.prepare(CPU, TRITON)(), expected, 1e-5) == []
