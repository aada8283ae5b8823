"""Counter-based random numbers: every draw is a function of (stream, seed, epoch, sample, number) and of nothing else.

A generator with state would tie the noise of a sample to the samples before it; these draws are the same for any world
size, any order and after any resume. The function is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011), written on arrays so that a whole pack costs the same few numpy calls as one sample.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10


class Stream(IntEnum):
    """What a draw is for; streams never share numbers."""

    HOLD_OUT = 0
    CONDITION_DROP = 1
    TEXT_RATE = 2
    TEXT_ROW = 3
    IMAGE_RATIO = 4
    IMAGE_ROW = 5


def philox4x32(
    counters: tuple[NDArray[np.uint64], ...], key: tuple[int, int]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Ten rounds of Philox on many counters at once.

    Args:
        counters: four arrays of equal shape, each value < 2**32.
        key: two integers < 2**32.

    Returns:
        Four arrays of the same shape, values < 2**32.
    """
    c0, c1, c2, c3 = counters
    k0, k1 = key
    for _ in range(_ROUNDS):
        # Factors below 2**32: the 64-bit product is exact.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> _HALF) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _HALF) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniforms(
    stream: Stream, *, seed: int, epoch: int, samples: NDArray[np.integer], numbers: NDArray[np.integer] | int = 0
) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits.

    Args:
        stream: what the draws are for.
        seed: any integer >= 0; taken modulo 2**64.
        epoch: pass over the data, < 2**32.
        samples: [n] dataset row of each draw, < 2**32.
        numbers: which draw of that sample, for example a row or a turn; [n] or one for all.

    Returns:
        [n] float64.
    """
    sample = np.asarray(samples).astype(np.uint64)
    assert 0 <= epoch < 2**32 and (sample.size == 0 or int(sample.max()) < 2**32)
    number = np.broadcast_to(np.asarray(numbers).astype(np.uint64), sample.shape)
    constant = [np.broadcast_to(np.uint64(v), sample.shape) for v in (epoch, int(stream))]
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    high, low, _, _ = philox4x32((number, sample, constant[0], constant[1]), key)
    return ((high << np.uint64(21)) | (low >> np.uint64(11))).astype(np.float64) * 2.0**-53
