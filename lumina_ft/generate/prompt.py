"""Rows of one sample before decoding, and several of them as one pack.

Shape legend: P rows of a prompt, C codebooks, T rows of a pack.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lumina_ft.data.layout import Layout
from lumina_ft.errors import ConfigError, DataError
from lumina_ft.tokens import TYPE_ANSWER_MEDIA, TYPE_TEXT, TokenSpec

DEFAULT_PACK_TOKENS = 16384


class DiffusionModel(Protocol):
    """What decoding needs of a model; `U2ForDiffusion` has it."""

    @property
    def device(self) -> torch.device: ...
    def __call__(self, input_ids: Tensor, **inputs: Any) -> Any: ...
    def text_logits(self, hidden: Tensor) -> Tensor: ...
    def image_step(self, hidden: Tensor, codes_so_far: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Prompt:
    """Rows of one sample, on the CPU; tensors are never modified.

    Attributes:
        input_ids: [P, C] int64; text rows repeat one id.
        type_ids: [P] uint8, token types of spec §2.
        position_ids: [P] int64.
        turn_ids: [P] int64, block_ids: [P] int64, is_clean: [P] bool; all three, or None for decoding without
            metadata (text only).

    Raises:
        DataError: a shape that doesn't fit, or only some of the metadata.
    """

    input_ids: Tensor
    type_ids: Tensor
    position_ids: Tensor
    turn_ids: Tensor | None
    block_ids: Tensor | None
    is_clean: Tensor | None

    def __post_init__(self) -> None:
        ids = self.input_ids
        if ids.dim() != 2:
            raise DataError(
                f"input_ids — shape {list(ids.shape)} — must be [rows, codebooks] of one sample — "
                "pass several samples as several prompts"
            )
        metadata = self.metadata()
        if 0 < len(metadata) < 3:
            raise DataError(
                f"prompt — only {', '.join(metadata)} given — turn_ids, block_ids and is_clean go together — "
                "give all three, or none for a text prompt"
            )
        for name, value in {"type_ids": self.type_ids, "position_ids": self.position_ids, **metadata}.items():
            if value.shape != ids.shape[:1]:
                raise DataError(
                    f"{name} — shape {list(value.shape)} — "
                    f"must be [{len(ids)}], one entry per row of input_ids — cut or extend"
                )

    def metadata(self) -> dict[str, Tensor]:
        """Those of turn_ids, block_ids and is_clean that are given."""
        fields = {"turn_ids": self.turn_ids, "block_ids": self.block_ids, "is_clean": self.is_clean}
        return {name: value for name, value in fields.items() if value is not None}

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def same_rows(self, other: "Prompt") -> bool:
        """Whether both hold the same ids, types, positions and metadata."""
        mine, theirs = _fields(self), _fields(other)
        return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def _fields(prompt: Prompt) -> dict[str, Tensor]:
    return {
        "input_ids": prompt.input_ids,
        "type_ids": prompt.type_ids,
        "position_ids": prompt.position_ids,
        **prompt.metadata(),
    }


def extend(
    prompt: Prompt,
    ids: Tensor,
    *,
    type_ids: Tensor,
    block_ids: Tensor,
    is_clean: Tensor,
    turn: int | None = None,
) -> Prompt:
    """Append rows at the positions that follow.

    Args:
        prompt: what comes first.
        ids: [n] int64, repeated in all columns.
        type_ids: [n] uint8.
        block_ids: [n] int64.
        is_clean: [n] bool.
        turn: of the new rows; default: that of the last row.
    """
    count = len(ids)
    position = int(prompt.position_ids[-1]) + 1
    turn_ids = None
    if prompt.turn_ids is not None:
        turn_ids = torch.full((count,), int(prompt.turn_ids[-1]) if turn is None else turn)
    extra = Prompt(
        input_ids=ids[:, None].expand(count, prompt.input_ids.shape[1]),
        type_ids=type_ids,
        position_ids=torch.arange(position, position + count),
        turn_ids=turn_ids,
        block_ids=None if prompt.block_ids is None else block_ids,
        is_clean=None if prompt.is_clean is None else is_clean,
    )
    old, new = _fields(prompt), _fields(extra)
    return replace(prompt, **{name: torch.cat([old[name], new[name]]) for name in old})


def from_layout(layout: Layout) -> Prompt:
    """Rows of `data.layout.layout_prefix` as a prompt."""
    return Prompt(
        input_ids=torch.from_numpy(layout.ids).long(),
        type_ids=torch.from_numpy(layout.type_ids),
        position_ids=torch.from_numpy(layout.position_ids).long(),
        turn_ids=torch.from_numpy(layout.turn_ids).long(),
        block_ids=torch.from_numpy(layout.block_ids).long(),
        is_clean=torch.from_numpy(layout.is_clean),
    )


def begin_text_answer(prefix: Prompt, spec: TokenSpec) -> Prompt:
    """Append the row that starts a text answer in the next turn (spec §2)."""
    return _begin_answer(prefix, [spec.text.boa], [TYPE_TEXT])


def begin_image_answer(prefix: Prompt, spec: TokenSpec, height: int, width: int) -> Prompt:
    """Append a whole image answer with a masked grid, newline rows included, in the next turn (spec §2)."""
    grid = ([spec.media.mask] * width + [spec.media.newline]) * height
    ids = [spec.text.boa, spec.text.boi, *grid, spec.text.eoi, spec.text.eoa]
    types = [TYPE_TEXT] * 2 + [TYPE_ANSWER_MEDIA] * len(grid) + [TYPE_TEXT] * 2
    return _begin_answer(prefix, ids, types)


def _begin_answer(prefix: Prompt, ids: list[int], types: list[int]) -> Prompt:
    assert prefix.turn_ids is not None
    return extend(
        prefix,
        torch.tensor(ids),
        type_ids=torch.tensor(types, dtype=torch.uint8),
        block_ids=torch.zeros(len(ids), dtype=torch.int64),
        is_clean=torch.zeros(len(ids), dtype=torch.bool),
        turn=int(prefix.turn_ids.max()) + 1,
    )


def pack(prompts: Sequence[Prompt], device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """Concatenate prompts into the inputs of one forward pass.

    Returns:
        Keyword arguments of the model (fresh tensors, free to be modified), and the first row of every prompt [n].
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ends = lengths.cumsum(0)
    rows = [_fields(prompt) for prompt in prompts]
    inputs = {name: torch.cat([row[name] for row in rows]).to(device) for name in rows[0]}
    inputs["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(device, torch.int32)
    return inputs, ends - lengths


def chunks(lengths: Sequence[int], max_tokens: int) -> Iterator[range]:
    """Consecutive samples that fit into one pack; a sample longer than that goes alone."""
    start, total = 0, 0
    for index, length in enumerate(lengths):
        if index > start and total + length > max_tokens:
            yield range(start, index)
            start, total = index, 0
        total += length
    if start < len(lengths):
        yield range(start, len(lengths))


def sample_generators(seed: int, count: int, *, first: int = 0) -> list[torch.Generator]:
    """One generator per sample, from (seed, number of the sample): results don't depend on who else is in the pack.

    Args:
        seed: of the whole call.
        count: number of samples.
        first: number of the first sample.
    """
    states = (np.random.SeedSequence([seed, first + index]).generate_state(1, np.uint64)[0] for index in range(count))
    return [torch.Generator().manual_seed(int(state >> np.uint64(1))) for state in states]


def check_generators(temperature: float, count: int, generators: Sequence[torch.Generator] | None) -> None:
    """Sampling needs one generator per sample.

    Raises:
        ConfigError: a temperature that is negative or not finite, or generators missing or of another number.
    """
    if not 0 <= temperature < math.inf:
        raise ConfigError(
            f"temperature — {temperature} — must be at least 0 and finite — use 0 for the most likely tokens"
        )
    given = 0 if generators is None else len(generators)
    if temperature > 0 and given != count:
        raise ConfigError(
            f"temperature — {temperature} with {given} generators — needs one generator for each of {count} samples — "
            "give a seed"
        )
