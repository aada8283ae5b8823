"""Arithmetic of a merge: float64, rounded once."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from lumina_ft.adapters.delta import delta_cosine, lora_delta, merge_weight, round_to
from lumina_ft.adapters.float_bits import all_finite, bits_of, rounded_bits, values_of

HALVES = [torch.bfloat16, torch.float16]


def exact_bfloat16(x: float) -> float:
    """Nearest bfloat16 by exact rational arithmetic, ties to even."""
    if x == 0 or not math.isfinite(x):
        return x
    last = Fraction(2) ** max(math.frexp(x)[1] - 8, -133)
    return float(round(Fraction(x) / last) * last)


def awkward_values() -> torch.Tensor:
    """Ties of bfloat16, their float64 neighbours, tiny and huge numbers."""
    draw = np.random.default_rng(0)
    ties = (draw.integers(0, 2**16, 3000).astype(np.uint32) << 16 | 0x8000).view(np.float32)
    ties = ties[np.isfinite(ties)].astype(np.float64)
    ends = [0.0, -0.0, np.inf, -np.inf, 3.39e38, 3.3961775e38, 3.4e38, 1e39, 65519.999, 65520.0, 1e-46, 1e-300]
    sides = [np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)]
    return torch.from_numpy(np.concatenate([ties, *sides, draw.standard_normal(2000), ends]))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_rounding_happens_once_and_both_codes_agree(dtype: torch.dtype) -> None:
    x = awkward_values()
    assert np.array_equal(bits_of(round_to(x, dtype)), rounded_bits(x.numpy(), dtype))


def test_rounding_is_the_exact_one_where_a_plain_cast_is_not() -> None:
    x = awkward_values()
    x = x[x.abs() < 3e38]
    exact = torch.tensor([exact_bfloat16(v) for v in x.tolist()])
    assert torch.equal(round_to(x, torch.bfloat16).double(), exact.double())
    assert not torch.equal(x.bfloat16().double(), exact.double()), "the fixture must hold values that tell them apart"


def test_values_and_finiteness_of_every_format() -> None:
    for dtype in (*HALVES, torch.float32, torch.float64):
        x = torch.tensor([[1.5, -0.1], [3e-5, 1e4]]).to(dtype)
        assert np.array_equal(values_of(x), x.double().numpy())
        assert all_finite(x)
        for bad in (math.inf, -math.inf, math.nan):
            broken = x.clone()
            broken[1, 0] = bad
            assert not all_finite(broken)


def test_delta_is_scale_times_b_a_in_float64() -> None:
    a, b = torch.randn(3, 5).bfloat16(), torch.randn(7, 3).bfloat16()
    delta = lora_delta(a, b, 2.5)
    assert delta.dtype == torch.float64
    torch.testing.assert_close(delta, 2.5 * torch.einsum("or,ri->oi", b.double(), a.double()), rtol=1e-14, atol=0)


def test_several_deltas_add_and_the_result_has_the_wanted_dtype() -> None:
    w = torch.randn(4, 6)
    deltas = [torch.randn(4, 6, dtype=torch.float64) for _ in range(3)]
    assert torch.equal(merge_weight(w, deltas), (w.double() + deltas[0] + deltas[1] + deltas[2]).float())
    assert merge_weight(w, deltas, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(merge_weight(w.bfloat16(), []), w.bfloat16())


def test_dora_rows_have_the_magnitude_as_their_length() -> None:
    w, delta = torch.randn(4, 6), torch.randn(4, 6, dtype=torch.float64)
    magnitude = torch.tensor([0.5, 1.0, 2.0, 3.0])
    merged = merge_weight(w, [delta], magnitude=magnitude, dtype=torch.float64)
    torch.testing.assert_close(merged.norm(dim=1), magnitude.double(), rtol=1e-14, atol=0)
    direction = torch.nn.functional.cosine_similarity(merged, w.double() + delta, dim=1)
    torch.testing.assert_close(direction, torch.ones(4, dtype=torch.float64))


def test_cosine_falls_with_what_rounding_loses() -> None:
    draw = torch.Generator().manual_seed(0)
    w = (torch.randn(256, 256, generator=draw) * 0.02).bfloat16()
    direction = torch.randn(256, 256, generator=draw).double()
    cosines = [delta_cosine(w, merge_weight(w, [direction * size]), direction * size) for size in (1e-2, 1e-4, 1e-6)]
    assert cosines[0] > 0.999 and 0.5 < cosines[1] < 0.99 and cosines[2] < cosines[1]


def test_cosine_of_nothing() -> None:
    w, delta = torch.ones(2, 2), torch.full((2, 2), 1e-12, dtype=torch.float64)
    assert delta_cosine(w, w, delta) == 0.0
    assert delta_cosine(w, w, torch.zeros(2, 2, dtype=torch.float64)) == 1.0
