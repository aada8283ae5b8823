"""The packed batch: what data produces and models consume.

Shape legend: S tokens of one pack, C codebooks, n samples in the pack. B is always 1 and has no axis here.
"""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lumina_ft.tokens import IGNORE, TYPE_ANSWER_MEDIA, TYPE_ANSWER_TEXT


class LossSum(NamedTuple):
    """A loss before division: `total` in nats (0-dim, carries gradient), `count` in positions (0-dim)."""

    total: Tensor
    count: Tensor


@dataclass(frozen=True)
class Batch:
    """One pack. Masks are carried, never re-derived from ids.

    Attributes:
        input_ids: [S, C] int64; text rows repeat one id in all columns.
        labels: [S, C] int64; -100 where not supervised. Text supervision sits in column 0 (all columns repeat it).
        type_ids: [S] uint8: 1 text/special, 2 media prompt, 3 text answer, 4 media answer; 0 in the padding tail.
        position_ids: [S] int64, restarting at 0 per sample.
        turn_ids: [S] int64. block_ids: [S] int64, block of an answer row; -1 where there is none (spec §2).
        is_clean: [S] bool. noised: [S] bool, rows whose ids were replaced by a mask id.
        cu_seqlens: [n + 1] int32, starts at 0, strictly increasing, last entry = end of the last sample (<= S).
        valid: [S] bool, False in the padding tail.
        sample_ids: [n] int64, row numbers in the dataset.
        task_ids: [n] int64, index into the dataset's task list.
    """

    input_ids: Tensor
    labels: Tensor
    type_ids: Tensor
    position_ids: Tensor
    turn_ids: Tensor
    block_ids: Tensor
    is_clean: Tensor
    noised: Tensor
    cu_seqlens: Tensor
    valid: Tensor
    sample_ids: Tensor
    task_ids: Tensor

    @property
    def num_tokens(self) -> int:
        """S, padding included."""
        return self.input_ids.shape[0]

    @property
    def num_valid(self) -> int:
        """Tokens that belong to a sample."""
        return int(self.valid.sum())

    def supervised_counts(self) -> dict[str, int]:
        """Denominators of the losses, known before any forward pass.

        Returns:
            `text`: supervised type-3 positions; `image`: supervised type-4 positions times C; `balance`: valid tokens.
        """
        text = (self.type_ids == TYPE_ANSWER_TEXT) & (self.labels[:, 0] != IGNORE)
        image = (self.type_ids == TYPE_ANSWER_MEDIA) & (self.labels != IGNORE).any(-1)
        return {
            "text": int(text.sum()),
            "image": int(image.sum()) * self.labels.shape[1],
            "balance": self.num_valid,
        }

    def model_inputs(self) -> dict[str, Tensor]:
        """Keyword arguments of a model's forward (everything but the bookkeeping fields)."""
        skip = {"noised", "sample_ids", "task_ids"}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skip}

    def to(self, device: torch.device | str) -> "Batch":
        """Move every tensor; dtypes are never changed (integers must not pass through floats, T2)."""
        return replace(self, **{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})
