"""The stored form of a sample: an ordered list of segments, before layout, condition drop and noise.

One schema carries every task: text, understanding, text-to-image, editing, video, 3D, multi-turn. Layout rules live in
`layout.py`, storage in `shards.py`.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Role(IntEnum):
    SYSTEM = 0
    USER = 1
    ASSISTANT = 2


class Kind(IntEnum):
    TEXT = 0
    IMAGE = 1
    VIDEO = 2
    OBJECT_3D = 3


@dataclass(frozen=True)
class Segment:
    """A run of text tokens or one medium inside a turn.

    Attributes:
        turn: index of the message in the conversation, system excluded: users 0, 2, 4…, answers 1, 3, 5….
        text_ids: [n] int32 for TEXT, no control ids; empty otherwise.
        codes: [n, C] uint16 for media, in storage order; shape (0, C) for text.
        shape: (height, width) of the code grid of an IMAGE; empty for other kinds.
        coords: [n, k] int32 of VIDEO and OBJECT_3D rows (columns as in spec §4); shape (0, 0) otherwise.
    """

    role: Role
    turn: int
    kind: Kind
    text_ids: NDArray[np.int32]
    codes: NDArray[np.uint16]
    shape: tuple[int, ...] = ()
    coords: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class Sample:
    """One row of a built dataset.

    Attributes:
        index: row number in the dataset; the id that noise, drops and hold-out are keyed by.
        task: name such as `text`, `understand`, `t2i`.
        source: `file:line` of the raw row, for messages.
    """

    index: int
    task: str
    segments: tuple[Segment, ...]
    source: str = ""
