"""Makes Triton's interpreter compute with bfloat16 as a GPU does, or refuse.

The interpreter keeps bfloat16 as its 16 bits. Left alone it multiplies those bits as integers in `tl.dot` and in
elementwise arithmetic, and truncates on the way from float32. After `install`, dots multiply exactly and accumulate in
float32, casts round to nearest even, and elementwise arithmetic is an error: a kernel converts to float32 first, which
is also how the GPU gets the accurate result.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def to_float32(handle: TensorHandle) -> TensorHandle:
    """The same values as float32; other dtypes are left alone."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def bits_of(values: np.ndarray) -> np.ndarray:
    """bfloat16 bits, uint16, of float32 values: rounded to nearest even, NaN kept."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> 16) & 1
    rounded = ((bits.astype(np.uint64) + 0x7FFF + odd) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def install() -> None:
    """Change the interpreter of this process; calling it again changes nothing."""
    if getattr(InterpreterBuilder, "computes_bfloat16", False):
        return
    dot, cast, unary, binary = (
        getattr(InterpreterBuilder, name) for name in ("create_dot", "cast_impl", "unary_op", "binary_op")
    )

    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, accumulator: TensorHandle, *options: Any) -> Any:
        return dot(self, to_float32(a), to_float32(b), accumulator, *options)

    def cast_impl(self: Any, source: TensorHandle, target: tl.dtype) -> TensorHandle:
        have, want = source.dtype.scalar, target.scalar
        # Only bfloat16 may pass as it is: the result of a comparison is labelled int32 and holds bools.
        if have == want == tl.bfloat16:
            return source
        if have == tl.bfloat16:
            return cast_impl(self, to_float32(source), target)
        if want == tl.bfloat16:
            return TensorHandle(bits_of(cast(self, source, tl.float32).data), tl.bfloat16)
        return cast(self, source, target)

    def unary_op(self: Any, handle: TensorHandle, operation: Any) -> TensorHandle:
        _refuse(handle)
        return unary(self, handle, operation)

    def binary_op(self: Any, left: TensorHandle, right: TensorHandle, operation: Any) -> TensorHandle:
        _refuse(left, right)
        return binary(self, left, right, operation)

    def create_fp_to_fp(self: Any, source: TensorHandle, target: tl.dtype, _rounding_mode: Any) -> TensorHandle:
        return cast_impl(self, source, target)

    changed = (create_dot, cast_impl, unary_op, binary_op, create_fp_to_fp)
    for function in changed:
        setattr(InterpreterBuilder, function.__name__, function)
    InterpreterBuilder.computes_bfloat16 = True


def _refuse(*handles: TensorHandle) -> None:
    if any(handle.dtype.scalar == tl.bfloat16 for handle in handles):
        raise TypeError("bfloat16 arithmetic in an interpreted kernel: convert with .to(tl.float32) first")
