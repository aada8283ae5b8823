"""Block-diffusion decoding of text answers, many samples in one pack (spec §7).

Block after block is appended as mask ids and filled in a fixed number of steps, the most confident positions first.
Decoded blocks turn clean; the beginning-of-answer row stays noisy, so later clean blocks can't see it.

Shape legend: n samples, m rows of a block, r rows of it still masked, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lumina_ft.errors import ConfigError, DataError
from lumina_ft.generate.prompt import (
    DEFAULT_PACK_TOKENS,
    DiffusionModel,
    Prompt,
    check_generators,
    chunks,
    extend,
    pack,
)
from lumina_ft.tokens import TYPE_ANSWER_TEXT

_LOGIT_ROWS = 512
"""Rows whose float64 logits are held at once: 0.6 GB at the published vocabulary."""


@dataclass(frozen=True)
class TextSettings:
    """How answers are decoded. Defaults are the published ones.

    Attributes:
        max_new_tokens: answer length, before the stop token is looked for.
        block_tokens: L, rows that are decoded together.
        steps_per_block: model calls per block; at most one per row is useful.
        temperature: 0 takes the most likely token.
        stop_id: an answer ends before the first of these; None: never.
        ban_mask_id: never propose the mask id. Off reproduces the published decoder.
        max_pack_tokens: rows in one forward pass.

    Raises:
        ConfigError: a value out of range.
    """

    max_new_tokens: int = 1024
    block_tokens: int = 32
    steps_per_block: int = 32
    temperature: float = 0.0
    stop_id: int | None = None
    ban_mask_id: bool = False
    max_pack_tokens: int = DEFAULT_PACK_TOKENS

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "block_tokens", "steps_per_block", "max_pack_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} — {getattr(self, name)} — must be at least 1 — use a positive number")


@torch.inference_mode()
def decode_text(
    model: DiffusionModel,
    prompts: Sequence[Prompt],
    *,
    mask_id: int,
    settings: TextSettings,
    generators: Sequence[torch.Generator] | None = None,
) -> list[Tensor]:
    """Answer every prompt.

    Args:
        model: in eval mode.
        prompts: rows up to and including the beginning-of-answer row, which is noisy, in the answer's turn and block 0.
            Without metadata the prompt sees only itself and every block sees itself and what is before it.
        mask_id: text mask id.
        settings: see `TextSettings`.
        generators: one per sample (CPU), needed at temperature > 0.

    Returns:
        Per prompt [<= max_new_tokens] int64 on the CPU, stop token excluded.

    Raises:
        DataError: an empty prompt, or prompts with and without metadata in one call.
        ConfigError: see `check_generators`.
    """
    check_generators(settings.temperature, len(prompts), generators)
    if any(len(prompt) == 0 for prompt in prompts):
        raise DataError("prompt — no rows — must end with the beginning-of-answer row — build it with the layout")
    if len({prompt.turn_ids is None for prompt in prompts}) > 1:
        raise DataError("prompts — some without metadata — all prompts of a call need the same kind — split the call")
    answers = [torch.empty(0, dtype=torch.int64) for _ in prompts]
    active = list(range(len(prompts)))
    for start in range(0, settings.max_new_tokens, settings.block_tokens):
        rows = min(settings.block_tokens, settings.max_new_tokens - start)
        for chunk in chunks([len(prompts[i]) + start + rows for i in active], settings.max_pack_tokens):
            samples = [active[place] for place in chunk]
            draws = None if generators is None else [generators[i] for i in samples]
            block = _decode_block(
                model, [prompts[i] for i in samples], [answers[i] for i in samples], rows, mask_id, settings, draws
            )
            for sample, ids in zip(samples, block, strict=True):
                answers[sample] = torch.cat([answers[sample], ids])
        active = [i for i in active if not _cut_at_stop(answers, i, settings.stop_id)]
    return answers


def _cut_at_stop(answers: list[Tensor], sample: int, stop_id: int | None) -> bool:
    """Cut an answer before its first stop token. Returns whether there was one; the sample then leaves the pack."""
    if stop_id is None:
        return False
    stops = (answers[sample] == stop_id).nonzero()
    if len(stops):
        answers[sample] = answers[sample][: int(stops[0])]
    return len(stops) > 0


def _decode_block(
    model: DiffusionModel,
    prompts: list[Prompt],
    decoded: list[Tensor],
    rows: int,
    mask_id: int,
    settings: TextSettings,
    generators: list[torch.Generator] | None,
) -> Tensor:
    """Fill one block of every sample; all have decoded the same number of rows. Returns [n, rows] int64 on the CPU."""
    done = len(decoded[0])
    block_ids = torch.arange(done + rows) // settings.block_tokens
    is_clean = torch.arange(done + rows) < done
    masks = torch.full((rows,), mask_id)
    types = torch.full((done + rows,), TYPE_ANSWER_TEXT, dtype=torch.uint8)
    samples = [
        extend(p, torch.cat([d, masks]), type_ids=types, block_ids=block_ids, is_clean=is_clean)
        for p, d in zip(prompts, decoded, strict=True)
    ]
    inputs, first = pack(samples, model.device)
    if prompts[0].turn_ids is None:
        del inputs["cu_seqlens"]
        inputs["allowed"] = block_mask([len(p) for p in prompts], done + rows, settings.block_tokens).to(model.device)
    prompt_lengths = torch.tensor([len(p) for p in prompts])
    block_rows = ((first + prompt_lengths + done)[:, None] + torch.arange(rows)).to(model.device)
    masked = torch.ones(block_rows.shape, dtype=torch.bool, device=model.device)
    for commit in commit_schedule(rows, settings.steps_per_block):
        columns = masked.nonzero()[:, 1].view(len(samples), -1)
        open_rows = block_rows.gather(1, columns)
        hidden = model(**inputs).hidden[open_rows.flatten()]
        tokens, confidence = _propose(model, hidden, open_rows.shape, mask_id, settings, generators)
        best = confidence.topk(commit, dim=1).indices
        inputs["input_ids"][open_rows.gather(1, best)] = tokens.gather(1, best)[..., None]
        masked.scatter_(1, columns.gather(1, best), False)
    return inputs["input_ids"][block_rows, 0].cpu()


def commit_schedule(rows: int, steps: int) -> list[int]:
    """Positions committed in each step: rows / steps, one more in the first rows mod steps; no step commits none."""
    return [count for step in range(steps) if (count := rows // steps + (step < rows % steps))]


def block_mask(prompt_lengths: Sequence[int], answer_rows: int, block_tokens: int) -> Tensor:
    """Attention of decoding without metadata: a prompt sees itself, a block sees the prompt and blocks up to its own.

    Returns:
        [T, T] bool, row = query.
    """
    parts = []
    for length in prompt_lengths:
        order = torch.cat([torch.full((length,), -1), torch.arange(answer_rows) // block_tokens])
        parts.append(order[:, None] >= order[None, :])
    return torch.block_diag(*parts).bool()


def _propose(
    model: DiffusionModel,
    hidden: Tensor,
    shape: torch.Size,
    mask_id: int,
    settings: TextSettings,
    generators: list[torch.Generator] | None,
) -> tuple[Tensor, Tensor]:
    """A token for every open row and the model's probability of it, in float64 as the published decoder.

    Sampling takes argmax of logit - T·ln(-ln U), the logarithm of e^logit / (-ln U)^T.

    Args:
        hidden: [n * r, H] states of the open rows.
        shape: (n, r).

    Returns:
        Tokens [n, r] int64 and temperature-free probabilities [n, r] float64.
    """
    samples, rows = shape
    group = max(1, _LOGIT_ROWS // rows)
    tokens, confidence = [], []
    for index in range(0, samples, group):
        logits = model.text_logits(hidden[index * rows : (index + group) * rows]).double()
        if settings.ban_mask_id:
            logits[:, mask_id] = -torch.inf
        scores = logits
        if settings.temperature > 0:
            assert generators is not None
            draws = [
                torch.rand((rows, logits.shape[1]), generator=generator, dtype=torch.float64)
                for generator in generators[index : index + group]
            ]
            scores = logits - settings.temperature * torch.log(-torch.log(torch.cat(draws).to(logits.device)))
        chosen = scores.argmax(1)
        tokens.append(chosen)
        confidence.append((logits.gather(1, chosen[:, None])[:, 0] - logits.logsumexp(1)).exp())
    return torch.cat(tokens).view(shape), torch.cat(confidence).view(shape)
