"""How the interpreter tests judge a kernel: every output and every gradient against float64.

Limits are relative L2 errors: float32 1e-6; bfloat16 6e-3, and no more than 1.2 times the error that PyTorch's own
bfloat16 operations make on the same inputs.
"""

import mmap
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

FLOAT32_LIMIT = 1e-6
BFLOAT16_LIMIT = 6e-3
BFLOAT16_RATIO = 1.2
ROUNDING = 2.0**-9
"""Largest relative error of one rounding to bfloat16."""
FEW = 1024
"""On fewer numbers luck decides which of two correct results is nearer, so the ratio isn't asked for below ROUNDING."""

_MAP_NORESERVE = 0x4000
"""Linux; the module `mmap` names it only in newer versions of Python."""

_WRAPPED = 2**31

Inputs = dict[str, Tensor | None]
Function = Callable[..., Tensor]


def outputs_and_gradients(function: Function, inputs: Inputs, trained: tuple[str, ...], upstream: Tensor) -> Inputs:
    """Call `function(**inputs)` on fresh leaves and go backward.

    Args:
        function: keywords as in `inputs` -> one tensor.
        inputs: arguments; None and integer tensors are passed on.
        trained: names whose gradients are wanted; the others don't require one.
        upstream: gradient of the result.

    Returns: "out", and "grad NAME" for every trained input.
    """
    leaves = {
        name: value.detach().clone().requires_grad_(name in trained)
        if value is not None and value.is_floating_point()
        else value
        for name, value in inputs.items()
    }
    out = function(**leaves)
    out.backward(upstream.to(out.dtype))
    results: Inputs = {"out": out.detach()}
    for name in trained:
        leaf = leaves[name]
        assert leaf is not None, name
        results[f"grad {name}"] = leaf.grad
    return results


def assert_parity(
    kernel: Function, reference: Function, inputs: Inputs, trained: tuple[str, ...], *, seed: int = 0
) -> None:
    """Compare a kernel with its reference in float64, given a random upstream gradient.

    Args:
        kernel, reference: same keywords, one tensor each. The reference also computes PyTorch's own bfloat16 result,
            from the inputs as they are.
        inputs: as the kernel takes them; bfloat16 values are exact in float64, so both start from the same numbers.
        trained: inputs whose gradients are compared.
        seed: of the upstream gradient.
    """
    exact: Inputs = {
        name: value.double() if value is not None and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    low_precision = any(value is not None and value.dtype == torch.bfloat16 for value in inputs.values())
    shape = reference(**exact).shape
    upstream = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    # All three start from the same upstream numbers.
    upstream = upstream.bfloat16() if low_precision else upstream
    want = outputs_and_gradients(reference, exact, trained, upstream)
    got = outputs_and_gradients(kernel, inputs, trained, upstream)
    own = outputs_and_gradients(reference, inputs, trained, upstream) if low_precision else None
    assert_close(got, want, own)


def assert_close(got: Inputs, want: Inputs, own: Inputs | None = None) -> None:
    """Compare named results with float64 ones; all failures are reported together.

    Args:
        got, want: same names. A zero or empty tensor must be met exactly.
        own: what PyTorch computes in bfloat16; None applies the float32 limit.
    """
    assert got.keys() == want.keys()
    wrong = []
    for name, exact in want.items():
        value = got[name]
        if value is None or exact is None:
            wrong += [f"{name}: {value} instead of {exact}"] if value is not exact else []
            continue
        assert value.shape == exact.shape, f"{name}: {tuple(value.shape)} instead of {tuple(exact.shape)}"
        error = relative_error(value, exact)
        limit = FLOAT32_LIMIT if own is None else _bfloat16_limit(own[name], exact)
        if not error <= limit:
            wrong.append(f"{name}: relative error {error:.2e}, limit {limit:.2e}")
    assert not wrong, "\n".join(wrong)


def relative_error(value: Tensor, exact: Tensor) -> float:
    """|value - exact| / |exact| in L2, float64; 0 for equal tensors, NaN if `value` holds one."""
    difference = float((value.double() - exact.double()).norm())
    return difference if difference == 0 else difference / float(exact.double().norm())


def _bfloat16_limit(own: Tensor | None, exact: Tensor) -> float:
    assert own is not None
    limit = BFLOAT16_RATIO * relative_error(own, exact)
    return min(BFLOAT16_LIMIT, max(limit, ROUNDING) if exact.numel() < FEW else limit)


def guarded(tensor: Tensor, margin: int = 4096) -> Tensor:
    """A copy of `tensor` that lies between NaN (integers: the smallest value), for kernels that read past an end.

    Args:
        margin: elements on either side; a multiple of 16 keeps the alignment that kernels count on.
    """
    fill = torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
    buffer = torch.full((tensor.numel() + 2 * margin,), fill, dtype=tensor.dtype)
    inner = buffer[margin : margin + tensor.numel()].view(tensor.shape)
    return inner.copy_(tensor)


def sparse_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of any size, for offsets beyond 2^31 elements: pages that nobody touches take no memory.

    There are 2^31 zeros before them, where an offset that wrapped around would read.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    size = (_WRAPPED + prod(shape)) * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype)[_WRAPPED:].view(shape)
