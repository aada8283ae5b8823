"""Triton device functions that find dropped entries again: bit for bit the hash of `moe.dropout`.

uint32 arithmetic wraps, as the reference's masks do.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """`dropout._mix` of uint32."""
    x ^= x >> 16
    x *= 0x2C1B3C6D
    x ^= x >> 15
    x *= 0x5D9F3B1F
    x ^= x >> 13
    x *= 0x297A2D39
    x ^= x >> 16
    return x


@triton.jit
def row_hash(keys, STREAM: tl.constexpr):
    """uint32 hashes of int64 row keys for one projection."""
    return mix(keys.to(tl.uint32) ^ mix((keys >> 32).to(tl.uint32) + ((0x2545F491 * STREAM) & 0xFFFFFFFF)))


@triton.jit
def column_hash(columns):
    """uint32 hashes of column numbers."""
    return mix(columns.to(tl.uint32) + 0x1B873593)


@triton.jit
def kept(rows, columns, LIMIT: tl.constexpr):
    """Which entries stay. rows, columns: hashes, of shapes that broadcast. LIMIT: a positive `dropout.drop_limit`."""
    # The limit itself may be 2**32, which no uint32 holds.
    return mix(rows ^ columns) > LIMIT - 1
