"""The interpreter computes with bfloat16 as a GPU does; the parity helpers notice what they should."""

import pytest
import torch
import triton
import triton.language as tl
from parity import assert_parity, guarded, relative_error, sparse_zeros
from torch import Tensor


@triton.jit
def dot_kernel(a, b, out, SIZE: tl.constexpr):  # noqa: N803
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    product = tl.dot(tl.load(a + at), tl.load(b + at))
    tl.store(out + at, product.to(out.dtype.element_ty))


@triton.jit
def convert_kernel(source, target, count, SIZE: tl.constexpr):  # noqa: N803
    at = tl.arange(0, SIZE)
    inside = at < count
    value = tl.load(source + at, mask=inside, other=0.0)
    tl.store(target + at, value.to(target.dtype.element_ty), mask=inside)


@triton.jit
def count_kernel(values, out, bound, SIZE: tl.constexpr):  # noqa: N803
    at = tl.arange(0, SIZE)
    value = tl.load(values + at)
    tl.store(out + at, (value >= bound).to(tl.int32) + (value > bound).to(tl.int32))


@triton.jit
def double_kernel(source, target, SIZE: tl.constexpr, WIDEN: tl.constexpr):  # noqa: N803
    at = tl.arange(0, SIZE)
    value = tl.load(source + at)
    if WIDEN:
        value = value.to(tl.float32)
    tl.store(target + at, (value + value).to(target.dtype.element_ty))


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_dot_multiplies_exactly_and_accumulates_in_float32() -> None:
    a, b = random(32, 32).bfloat16(), random(32, 32).t().contiguous().bfloat16()
    out = torch.empty(32, 32)
    dot_kernel[(1,)](a, b, out, 32)
    assert relative_error(out, a.double() @ b.double()) < 3e-7


def test_float32_rounds_to_nearest_even() -> None:
    ties = torch.tensor(
        [1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 1 + 2**-8 + 2**-20, torch.inf, torch.nan, 3.4e38, 1e-40]
    )
    values = torch.cat([ties, random(20)])
    out = torch.empty(len(values), dtype=torch.bfloat16)
    convert_kernel[(1,)](values, out, len(values), 32)
    torch.testing.assert_close(out, values.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_bfloat16_widens_exactly() -> None:
    values = torch.cat([torch.tensor([0.0, -0.0, torch.inf, 1e-40]), random(13)]).bfloat16()
    out = torch.empty(len(values))
    convert_kernel[(1,)](values, out, len(values), 32)
    assert torch.equal(out, values.float())


def test_arithmetic_on_bfloat16_is_refused() -> None:
    values, out = random(16).bfloat16(), torch.empty(16, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="convert with .to\\(tl.float32\\) first"):
        double_kernel[(1,)](values, out, 16, False)
    double_kernel[(1,)](values, out, 16, True)
    assert torch.equal(out, values * 2)


def test_results_of_comparisons_add_up() -> None:
    values, out = torch.arange(16, dtype=torch.int32), torch.empty(16, dtype=torch.int32)
    count_kernel[(1,)](values, out, 7, 16)
    assert out.tolist() == [0] * 7 + [1] + [2] * 8


def test_uninitialised_memory_is_nan() -> None:
    assert torch.empty(5).isnan().all()
    assert random(4).new_empty(3).isnan().all()


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        return grad @ w.t(), 1.001 * (x.t() @ grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_parity_holds_for_the_reference_itself(dtype: torch.dtype) -> None:
    assert_parity(product, product, {"x": random(9, 24).to(dtype), "w": random(24, 40).to(dtype)}, ("x", "w"))


def test_parity_names_what_is_wrong() -> None:
    inputs = {"x": random(9, 24), "w": random(24, 40)}
    with pytest.raises(AssertionError, match="^grad w: relative error 1.00e-03, limit 1.00e-06"):
        assert_parity(lambda x, w: _WrongGradient.apply(x, w), product, inputs, ("x", "w"))


def test_parity_in_bfloat16_is_held_to_the_error_of_torch() -> None:
    inputs = {"x": random(64, 24).bfloat16(), "w": random(24, 40).bfloat16()}

    def rounded_twice(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w) * (1 + 2**-7)

    with pytest.raises(AssertionError, match="out: relative error .*, limit 2.*e-03"):
        assert_parity(rounded_twice, product, inputs, ("x",))


def test_parity_fails_on_nan_and_on_a_missing_gradient() -> None:
    inputs = {"x": random(4, 8), "w": random(8, 8)}
    with pytest.raises(AssertionError, match="out: relative error nan"):
        assert_parity(lambda x, w: x @ w + torch.empty(4, 8), product, inputs, ("x",))
    with pytest.raises(AssertionError, match="grad w: None instead of"):
        assert_parity(lambda x, w: x @ w.detach(), product, inputs, ("x", "w"))


def test_guarded_memory_shows_a_read_past_the_end() -> None:
    values = guarded(random(5))
    out = torch.zeros(8)
    convert_kernel[(1,)](values, out, 5, 8)
    assert torch.equal(out[:5], values)
    convert_kernel[(1,)](values, out, 6, 8)
    assert out[5].isnan()


def test_sparse_zeros_reach_beyond_32_bit_offsets() -> None:
    wide = sparse_zeros((3, 2**30), torch.bfloat16)
    wide[2, -1] = 1
    assert wide.numel() > 2**31 and wide[2, -1] == 1 and wide[1, 7] == 0
    before = wide.as_strided((1,), (1,), wide.storage_offset() - 2**31)
    assert before == 0, "an offset that wrapped around reads a zero"
