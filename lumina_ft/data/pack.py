"""Which samples share a pack. Lengths in, row numbers out; nothing is split.

`best_fit` runs over windows of the shuffled samples, so its time is near linear. In a window, samples first go best-fit
in random order, which keeps long and short samples (and so tasks) mixed inside a pack. The samples of packs that are
not full then go once more, best-fit decreasing, if that saves a pack. What still doesn't fill its pack is carried into
the next window. Decreasing order alone fills 0.2 % better, but makes packs of near-equal lengths, so that a step would
see one task only.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lumina_ft.errors import DataError

WINDOW_SAMPLES = 4096
FULL_SHARE = 0.99
"""A pack this full is closed at the end of a pass."""


def plan_packs(lengths: NDArray[np.integer], max_tokens: int, method: str, seed: int) -> list[NDArray[np.int64]]:
    """Assign every sample to exactly one pack.

    Args:
        lengths: [n] rows of each sample, 1..max_tokens.
        max_tokens: rows that a pack may hold.
        method: `best_fit`; `greedy`: next-fit in the shuffled order; `none`: one sample a pack.
        seed: of the order of samples and packs; equal arguments give equal packs.

    Returns:
        Index arrays into `lengths`, in the order in which packs are to be read.

    Raises:
        DataError: a length outside 1..max_tokens.
    """
    lengths = np.asarray(lengths)
    bad = np.flatnonzero((lengths < 1) | (lengths > max_tokens))
    if len(bad):
        raise DataError(
            f"sample {int(bad[0])} of the plan — {int(lengths[bad[0]])} tokens — a sample has 1 to {max_tokens} tokens "
            "(data.max_pack_tokens) — raise the limit or drop the sample"
        )
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    order = rng.permutation(len(lengths))
    packs = _METHODS[method](order, lengths, max_tokens)
    # Best-fit emits full packs first; the shuffle spreads the loose ones over the epoch.
    return [packs[i] for i in rng.permutation(len(packs))]


def token_use(packs: Sequence[NDArray[np.integer]], lengths: NDArray[np.integer], max_tokens: int) -> float:
    """Share of the packs' room that samples fill, 0..1; 0 without packs."""
    if not packs:
        return 0.0
    return float(sum(int(np.asarray(lengths)[pack].sum()) for pack in packs) / (len(packs) * max_tokens))


def _one_each(order: NDArray[np.int64], lengths: NDArray[np.integer], max_tokens: int) -> list[NDArray[np.int64]]:
    del lengths, max_tokens
    return list(order[:, None])


def _next_fit(order: NDArray[np.int64], lengths: NDArray[np.integer], max_tokens: int) -> list[NDArray[np.int64]]:
    packs: list[list[int]] = []
    room = 0
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if length > room:
            packs.append([])
            room = max_tokens
        packs[-1].append(index)
        room -= length
    return _arrays(packs)


def _windowed_best_fit(
    order: NDArray[np.int64], lengths: NDArray[np.integer], max_tokens: int
) -> list[NDArray[np.int64]]:
    packs: list[list[int]] = []
    carried: list[int] = []
    for start in range(0, len(order), WINDOW_SAMPLES):
        window = np.concatenate([np.array(carried, np.int64), order[start : start + WINDOW_SAMPLES]])
        full, loose = _split_full(_best_fit(window, lengths, max_tokens), lengths, max_tokens)
        rest = np.array([i for pack in loose for i in pack], np.int64)
        decreasing = _best_fit(rest[np.argsort(-lengths[rest], kind="stable")], lengths, max_tokens)
        if len(decreasing) < len(loose):
            loose = decreasing
        packs += full
        carried = []
        if start + WINDOW_SAMPLES < len(order):
            done, loose = _split_full(loose, lengths, max_tokens)
            packs += done
            # The limit keeps the time linear where no pack can be full, for example when all lengths are equal.
            while loose and len(carried) + len(loose[0]) <= WINDOW_SAMPLES // 4:
                carried += loose.pop(0)
        packs += loose
    return _arrays(packs)


def _split_full(
    packs: list[list[int]], lengths: NDArray[np.integer], max_tokens: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Packs at or over FULL_SHARE, and the others with the emptiest first."""
    fill = [int(lengths[pack].sum()) for pack in packs]
    by_fill = sorted(range(len(packs)), key=fill.__getitem__)
    closed = FULL_SHARE * max_tokens
    return [packs[i] for i in by_fill if fill[i] >= closed], [packs[i] for i in by_fill if fill[i] < closed]


def _best_fit(order: NDArray[np.int64], lengths: NDArray[np.integer], max_tokens: int) -> list[list[int]]:
    """Put each sample, in order, into the open pack with the least room that still takes it.

    Bit r of `rooms` says that some pack has room for exactly r tokens, so the tightest pack that fits is the lowest bit
    at or above the length: a few machine-word scans, whatever the number of open packs.
    """
    packs: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            number = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, number = max_tokens, len(packs)
            packs.append([])
        packs[number].append(index)
        room -= length
        if room:
            by_room.setdefault(room, []).append(number)
            rooms |= 1 << room
    return packs


def _arrays(packs: list[list[int]]) -> list[NDArray[np.int64]]:
    return [np.array(pack, np.int64) for pack in packs]


_METHODS = {"best_fit": _windowed_best_fit, "greedy": _next_fit, "none": _one_each}
