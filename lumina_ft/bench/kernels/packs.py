"""Packs of samples that kernels and training steps are measured on, and how much of the S x S pairs they allow."""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lumina_ft.kernels import allowed_mask
from lumina_ft.tokens import TYPE_ANSWER_MEDIA, TYPE_ANSWER_TEXT, TYPE_TEXT

SAMPLES = 8
FULL_SAMPLE = 2048
_BLOCK = 32


class Region(NamedTuple):
    """Neighbouring tokens of a sample.

    Attributes:
        tokens: of a sample of FULL_SAMPLE tokens.
        turn, kind: their turn_ids and type_ids.
        clean: whether this is no noisy copy.
        blocks: whether they are cut into blocks.
    """

    tokens: int
    turn: int
    kind: int
    clean: bool
    blocks: bool


LAYOUTS: dict[str, tuple[Region, ...]] = {
    "text": (
        Region(256, 0, TYPE_TEXT, True, False),
        Region(896, 1, TYPE_ANSWER_TEXT, False, True),
        Region(896, 1, TYPE_ANSWER_TEXT, True, True),
    ),
    "noisy and clean": (
        Region(1024, 1, TYPE_ANSWER_TEXT, False, True),
        Region(1024, 1, TYPE_ANSWER_TEXT, True, True),
    ),
    "two turns": (
        Region(128, 0, TYPE_TEXT, True, False),
        Region(384, 1, TYPE_ANSWER_TEXT, False, True),
        Region(128, 2, TYPE_TEXT, True, False),
        Region(512, 3, TYPE_ANSWER_TEXT, False, True),
        Region(384, 1, TYPE_ANSWER_TEXT, True, True),
        Region(512, 3, TYPE_ANSWER_TEXT, True, True),
    ),
    "image": (Region(256, 0, TYPE_TEXT, True, False), Region(1792, 1, TYPE_ANSWER_MEDIA, False, False)),
}
"""Prompt, noisy answers, clean copies of text answers."""


@dataclass(frozen=True)
class Pack:
    """Samples one after the other; S tokens.

    Attributes:
        type_ids, turn_ids, block_ids: [S] int64. is_clean: [S] bool.
        starts, lengths: of the samples.
    """

    type_ids: Tensor
    turn_ids: Tensor
    block_ids: Tensor
    is_clean: Tensor
    starts: list[int]
    lengths: list[int]

    @property
    def tokens(self) -> int:
        return self.type_ids.shape[0]

    @property
    def cu_seqlens(self) -> Tensor:
        """[n + 1] int64."""
        return torch.tensor([*self.starts, self.tokens])

    def to(self, device: torch.device) -> "Pack":
        tensors = ("type_ids", "turn_ids", "block_ids", "is_clean")
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})

    def plan_arguments(self) -> dict[str, Any]:
        """What attention plans of packed rows take; there is no padding."""
        return {
            "starts": self.starts,
            "lengths": self.lengths,
            "type_ids": self.type_ids,
            "turn_ids": self.turn_ids,
            "block_ids": self.block_ids,
            "is_clean": self.is_clean,
            "valid": torch.ones_like(self.is_clean),
            "has_metadata": True,
        }

    def sample_mask(self, number: int) -> Tensor:
        """[L, L] bool, the rule inside one sample."""
        at = slice(self.starts[number], self.starts[number] + self.lengths[number])
        return allowed_mask(
            self.type_ids[at],
            cu_seqlens=torch.tensor([0, self.lengths[number]], device=self.type_ids.device),
            turn_ids=self.turn_ids[at],
            is_clean=self.is_clean[at],
            block_ids=self.block_ids[at],
        )

    def dense_mask(self) -> Tensor:
        """[S, S] bool."""
        return torch.block_diag(*(self.sample_mask(i).to(torch.uint8) for i in range(len(self.starts)))).bool()

    @property
    def allowed_pairs(self) -> int:
        """Pairs that attend."""
        return sum(int(self.sample_mask(i).sum()) for i in range(len(self.starts)))


def build_pack(layout: str, *, sample_tokens: int = FULL_SAMPLE, samples: int = SAMPLES) -> Pack:
    """A pack of equal samples, on the CPU.

    Args:
        layout: key of LAYOUTS.
        sample_tokens: of each sample, about: regions and blocks shrink alike and are rounded down.
    """
    columns: list[list[Tensor]] = [[], [], [], []]
    for region in LAYOUTS[layout]:
        tokens = int(Fraction(region.tokens * sample_tokens, FULL_SAMPLE))
        block = max(4, _BLOCK * sample_tokens // FULL_SAMPLE)
        blocks = torch.arange(tokens) // block if region.blocks else torch.full((tokens,), -1)
        values = (torch.full((tokens,), region.kind), torch.full((tokens,), region.turn), blocks)
        for column, value in zip(columns, (*values, torch.full((tokens,), region.clean)), strict=True):
            column.append(value)
    length = sum(part.shape[0] for part in columns[0])
    type_ids, turn_ids, block_ids, is_clean = (torch.cat(column).repeat(samples) for column in columns)
    starts = [length * i for i in range(samples)]
    return Pack(type_ids, turn_ids, block_ids, is_clean, starts, [length] * samples)


def join(packs: list[Pack]) -> Pack:
    """One pack of all their samples."""
    lengths = [length for pack in packs for length in pack.lengths]
    return Pack(
        type_ids=torch.cat([pack.type_ids for pack in packs]),
        turn_ids=torch.cat([pack.turn_ids for pack in packs]),
        block_ids=torch.cat([pack.block_ids for pack in packs]),
        is_clean=torch.cat([pack.is_clean for pack in packs]),
        starts=[sum(lengths[:i]) for i in range(len(lengths))],
        lengths=lengths,
    )


def shares(pack: Pack) -> dict[str, float]:
    """Share of the S x S pairs that the rule allows (`exact`), and that whole samples take (`segmented`)."""
    total = pack.tokens**2
    return {
        "exact": pack.allowed_pairs / total,
        "segmented": sum(length**2 for length in pack.lengths) / total,
    }
