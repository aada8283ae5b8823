"""Noised samples to one packed Batch. No randomness here, and no rule of the model: rows are joined as they are."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from lumina_ft.batch import Batch
from lumina_ft.data.noise import NoisedSample
from lumina_ft.errors import DataError
from lumina_ft.tokens import IGNORE, TokenSpec

FILLER_SAMPLE = -1
"""`sample_ids` and `task_ids` of the placeholder in a pack without samples."""

DTYPES: dict[str, torch.dtype] = {
    "input_ids": torch.int64,
    "labels": torch.int64,
    "type_ids": torch.uint8,
    "position_ids": torch.int64,
    "turn_ids": torch.int64,
    "block_ids": torch.int64,
    "is_clean": torch.bool,
    "noised": torch.bool,
    "cu_seqlens": torch.int32,
    "valid": torch.bool,
    "sample_ids": torch.int64,
    "task_ids": torch.int64,
}
"""The dtype of every field of a Batch."""


def collate(
    samples: Sequence[NoisedSample], spec: TokenSpec, pad_to: int | None, *, tasks: Sequence[str] = ()
) -> Batch:
    """Join samples into one pack.

    Args:
        samples: at least one.
        spec: gives the pad id and C.
        pad_to: S of the result; the tail is invalid and holds the pad id. None: no tail.
        tasks: names that `task_ids` counts; a task that isn't among them gets -1.

    Raises:
        DataError: the samples need more than `pad_to` rows.
    """
    layouts = [sample.layout for sample in samples]
    sizes = [len(layout) for layout in layouts]
    num_rows = sum(sizes)
    size = num_rows if pad_to is None else pad_to
    if num_rows > size:
        raise DataError(
            f"pack of {num_rows} tokens — over pad_to={size} — a pack must fit — plan with max_tokens={size}"
        )

    def rows(name: str, parts: list[NDArray], fill: int) -> Tensor:
        return _tensor(name, parts, size, fill)

    task_numbers = {task: number for number, task in enumerate(tasks)}
    return Batch(
        input_ids=rows("input_ids", [s.input_ids for s in samples], spec.text.pad),
        labels=rows("labels", [s.labels for s in samples], IGNORE),
        type_ids=rows("type_ids", [x.type_ids for x in layouts], 0),
        position_ids=rows("position_ids", [x.position_ids for x in layouts], 0),
        turn_ids=rows("turn_ids", [x.turn_ids for x in layouts], 0),
        block_ids=rows("block_ids", [x.block_ids for x in layouts], -1),
        is_clean=rows("is_clean", [x.is_clean for x in layouts], 0),
        noised=rows("noised", [s.noised for s in samples], 0),
        cu_seqlens=torch.tensor(np.cumsum([0, *sizes]), dtype=DTYPES["cu_seqlens"]),
        valid=torch.arange(size) < num_rows,
        sample_ids=torch.tensor([x.sample_index for x in layouts], dtype=DTYPES["sample_ids"]),
        task_ids=torch.tensor([task_numbers.get(x.task, -1) for x in layouts], dtype=DTYPES["task_ids"]),
    )


def empty_batch(spec: TokenSpec, pad_to: int | None = None) -> Batch:
    """A pack without samples, for ranks that have none left in the last step of an epoch.

    It must go through the model like any other (T1), so it is one invalid row (`pad_to` rows, if given) with pad id and
    type 0 in a segment of its own: `cu_seqlens` [0, 1] passes the strict bounds check, `sample_ids` and `task_ids` are
    [-1]. It is supervised nowhere and counts nowhere.
    """
    size = pad_to or 1
    columns = max(spec.num_codebooks, 1)
    values: dict[str, Tensor] = {
        name: torch.zeros(size, dtype=DTYPES[name])
        for name in ("type_ids", "position_ids", "turn_ids", "is_clean", "noised", "valid")
    }
    values["input_ids"] = torch.full((size, columns), spec.text.pad, dtype=DTYPES["input_ids"])
    values["labels"] = torch.full((size, columns), IGNORE, dtype=DTYPES["labels"])
    values["block_ids"] = torch.full((size,), -1, dtype=DTYPES["block_ids"])
    values["cu_seqlens"] = torch.tensor([0, 1], dtype=DTYPES["cu_seqlens"])
    values["sample_ids"] = torch.tensor([FILLER_SAMPLE], dtype=DTYPES["sample_ids"])
    values["task_ids"] = torch.tensor([FILLER_SAMPLE], dtype=DTYPES["task_ids"])
    return Batch(**{field.name: values[field.name] for field in fields(Batch)})


_NUMPY_DTYPES: dict[torch.dtype, DTypeLike] = {torch.int64: np.int64, torch.uint8: np.uint8, torch.bool: np.bool_}


def _tensor(name: str, parts: list[NDArray], size: int, fill: int) -> Tensor:
    """Join parts along rows into a tensor of the field's dtype with `size` rows."""
    out = np.empty((size, *parts[0].shape[1:]), _NUMPY_DTYPES[DTYPES[name]])
    end = sum(len(part) for part in parts)
    np.concatenate(parts, out=out[:end], casting="same_kind")
    out[end:] = fill
    return torch.from_numpy(out)
