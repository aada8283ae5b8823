"""Dropout inside routed experts, as a function of what a row is rather than of where it is computed.

A layer draws one key for each forward pass. Each (token, slot) pair gets a key of its own from it, which travels with
the row to whichever rank has the expert; whether an input is dropped is a hash of the row's key, the projection and the
column. Nothing but the keys is kept for backward.

All arithmetic is on int64 that hold 32-bit numbers, with factors below 2**31: no product overflows.
"""

import torch
from torch import Tensor

_WORD = (1 << 32) - 1
_ELEMENTS = 1 << 21
"""Hashed at a time: a hash needs 8 bytes an element, twice."""


def draw_key() -> int:
    """A key for one forward pass of one layer, from torch's default generator; that of the CPU, so nothing waits."""
    return int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu"))


def row_keys(key: int, tokens: int, slots: int, device: torch.device) -> Tensor:
    """[T, K] int64 keys of (token, slot) pairs."""
    index = torch.arange(tokens * slots, device=device)
    low = _mix(index ^ (key & _WORD))
    high = _mix(_mix(index + 0x3C6EF372) ^ (key >> 32))
    return (((high >> 1) << 32) | low).view(tokens, slots)


def drop_limit(probability: float) -> int:
    """Entries whose 32-bit hash is below this are dropped. probability: of an entry to be dropped."""
    return round(probability * (_WORD + 1))


def drop_(x: Tensor, keys: Tensor, probability: float, stream: int) -> Tensor:
    """Set dropped entries to 0, in place; the others are not scaled.

    Args:
        x: [N, I].
        keys: [N, 1] int64 keys of the rows.
        probability: of an entry to be dropped.
        stream: see `weights.Lora`.

    Returns:
        x.
    """
    rows, columns = x.shape
    row_hash = _mix((keys & _WORD) ^ _mix((keys >> 32) + 0x2545F491 * stream))
    column_hash = _mix(torch.arange(columns, device=x.device) + 0x1B873593)
    limit = drop_limit(probability)
    step = max(1, _ELEMENTS // columns)
    for start in range(0, rows, step):
        x[start : start + step].masked_fill_(_mix(row_hash[start : start + step] ^ column_hash) < limit, 0.0)
    return x


def _mix(x: Tensor) -> Tensor:
    """Bijection of 32-bit numbers in which each input bit changes about half of the output bits; x is kept."""
    x = x & _WORD
    x ^= x >> 16
    x *= 0x2C1B3C6D
    x &= _WORD
    x ^= x >> 15
    x *= 0x5D9F3B1F
    x &= _WORD
    x ^= x >> 13
    x *= 0x297A2D39
    x &= _WORD
    x ^= x >> 16
    return x
