"""What a rank says about where it is: plain values, to be written to a file and read elsewhere."""

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import PurePath
from types import FrameType
from typing import Any

import numpy as np

from lumina_ft.batch import Batch
from lumina_ft.tokens import IGNORE, TYPE_ANSWER_MEDIA, TYPE_ANSWER_TEXT

WAIT = "wait"
"""`Position.inside` of a rank that waits for a collective entered before."""

_MAX_SAMPLE_IDS = 4
_MAX_FRAMES = 40
_COMMUNICATION = ("torch/distributed/", "deepspeed/comm/", "lumina_ft/parallel/collectives.py")


@dataclass(frozen=True)
class BatchShape:
    """What a pack holds.

    Attributes:
        samples: number of samples.
        tokens, valid: tokens with and without the padding tail.
        text, image: supervised positions.
        rows: dataset rows of the first samples.
        tasks: samples per task.
    """

    samples: int
    tokens: int
    valid: int
    text: int
    image: int
    rows: list[int]
    tasks: dict[str, int]


@dataclass(frozen=True)
class Position:
    """Where a rank is, as it says so itself.

    Attributes:
        step, steps: 1-based step of the stage and their number; 0 before the first one.
        micro_batch: 1-based; 0 outside.
        module: the last one entered, by name; empty before the first forward pass.
        batch: the last pack given to the model.
        collectives: number of collectives entered since the process group exists.
        collective: name of the last one entered.
        inside: that one, or `WAIT` for one that was started earlier; empty outside.
        held_up: inside a collective, but in code that isn't the communication library's.
        marks: signs of life so far.
        idle_seconds: time since the last one.
        stack: where the rank's thread is, innermost frame first.
        state: of its process, where another one says all this: `stopped`, `running`, …; then marks, times and stack are
            unknown.
    """

    rank: int
    stage: str
    step: int
    steps: int
    micro_batch: int
    phase: str
    module: str
    batch: BatchShape | None
    collectives: int
    collective: str
    inside: str
    held_up: bool
    marks: int
    idle_seconds: float
    stack: list[str]
    state: str

    def to_json(self) -> dict[str, Any]:
        """As `from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Position":
        """From a report file."""
        batch = values["batch"]
        return cls(**{**values, "batch": BatchShape(**batch) if batch else None})


def describe_batch(batch: Batch, tasks: tuple[str, ...]) -> BatchShape:
    """Count what a pack on the CPU holds."""
    types, labels = batch.type_ids.numpy(), batch.labels.numpy()
    names = [tasks[i] if 0 <= i < len(tasks) else f"task {i}" for i in batch.task_ids.tolist()]
    return BatchShape(
        samples=len(batch.sample_ids),
        tokens=len(types),
        valid=int(np.count_nonzero(batch.valid.numpy())),
        text=int(np.count_nonzero((types == TYPE_ANSWER_TEXT) & (labels[:, 0] != IGNORE))),
        image=int(np.count_nonzero((types == TYPE_ANSWER_MEDIA) & (labels != IGNORE).any(-1))),
        rows=batch.sample_ids[:_MAX_SAMPLE_IDS].tolist(),
        tasks=dict(Counter(names)),
    )


def is_communication(frame: str) -> bool:
    """Whether a line of `Position.stack` is in the library that the ranks talk through, or in what counts its calls."""
    return frame.startswith(_COMMUNICATION)


def describe_stack(frame: FrameType | None) -> list[str]:
    """`file:line in function` of a frame and its callers."""
    lines = []
    while frame is not None and len(lines) < _MAX_FRAMES:
        code = frame.f_code
        lines.append(f"{_short(code.co_filename)}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return lines


def _short(file: str) -> str:
    """Path from the package on: `torch/distributed/…`, `lumina_ft/…`; the last two parts of anything else."""
    parts = PurePath(file).parts
    for root in ("site-packages", "dist-packages"):
        if root in parts:
            return "/".join(parts[parts.index(root) + 1 :])
    if "lumina_ft" in parts:
        return "/".join(parts[len(parts) - 1 - parts[::-1].index("lumina_ft") :])
    return "/".join(parts[-2:])
