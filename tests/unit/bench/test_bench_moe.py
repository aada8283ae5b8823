"""`lumina-ft bench moe`: agreement comes before timing."""

import pytest

from lumina_ft.bench import moe as bench
from lumina_ft.errors import RunError

SMALL = {"tokens": 24, "hidden": 16, "width": 8, "experts": 6, "top_k": 2, "repeats": 3}


def test_ratios_are_loop_time_over_grouped_time():
    result = bench.bench_moe(**SMALL)
    assert result["forward_ratio"] == result["loop_forward_ms"] / result["grouped_forward_ms"]
    assert result["backward_ratio"] == result["loop_backward_ms"] / result["grouped_backward_ms"]
    assert {name: result[name] for name in SMALL} == SMALL


def test_a_wrong_result_is_never_timed(monkeypatch):
    right = bench.grouped_experts
    monkeypatch.setattr(bench, "grouped_experts", lambda *args: 1.01 * right(*args))
    with pytest.raises(RunError, match="bench moe: output — differs by"):
        bench.bench_moe(**SMALL)
