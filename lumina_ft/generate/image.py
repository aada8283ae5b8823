"""Image decoding in spatial rounds with guidance on hidden states, many samples in one pack (spec §7).

Every round predicts all masked positions, codebook after codebook, keeps the most certain ones and masks the rest
again, until the last round keeps all.

Shape legend: n samples, R answer-media rows of all samples, M of them masked, C codebooks, K codes, H hidden.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lumina_ft.errors import ConfigError, DataError
from lumina_ft.generate.prompt import (
    DEFAULT_PACK_TOKENS,
    DiffusionModel,
    Prompt,
    check_generators,
    chunks,
    pack,
)
from lumina_ft.tokens import TYPE_ANSWER_MEDIA, TYPE_MEDIA, TokenSpec


@dataclass(frozen=True)
class ImagePrompt:
    """One image to decode: the conditional rows and the branches that guidance pushes away from.

    All branches end with the same answer: <answer>, <BOI>, the masked grid, <EOI>, </answer>.

    Attributes:
        cond: prefix, source image if any, answer.
        uncond: prefix with the user turn replaced; for `guidance`.
        uncond_text: source image kept, instruction replaced; for `guidance_text` (editing).
        uncond_image: instruction kept, no source image; for `guidance_image` (editing).
    """

    cond: Prompt
    uncond: Prompt | None = None
    uncond_text: Prompt | None = None
    uncond_image: Prompt | None = None


@dataclass(frozen=True)
class ImageSettings:
    """How images are decoded. Defaults are the published ones for text-to-image.

    Attributes:
        rounds: model calls.
        guidance: g of (1+g)·conditional - g·unconditional; 0 runs the conditional branch alone, below 0 the
            unconditional one alone.
        guidance_text: weight of the text-negative branch, only together with guidance_image and guidance 0.
        guidance_image: weight of the image-negative branch.
        temperature: 0 takes the most likely codes.
        max_pack_tokens: rows in one forward pass.

    Raises:
        ConfigError: a value out of range, or a combination that isn't defined.
    """

    rounds: int = 96
    guidance: float = 3.0
    guidance_text: float | None = None
    guidance_image: float | None = None
    temperature: float = 1.0
    max_pack_tokens: int = DEFAULT_PACK_TOKENS

    def __post_init__(self) -> None:
        for name in ("rounds", "max_pack_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} — {getattr(self, name)} — must be at least 1 — use a positive number")
        for name in ("guidance", "guidance_text", "guidance_image"):
            if not math.isfinite(getattr(self, name) or 0):
                raise ConfigError(f"{name} — {getattr(self, name)} — must be finite — use a number such as 3")
        if (self.guidance_text is None) != (self.guidance_image is None):
            raise ConfigError(
                f"guidance_text={self.guidance_text}, guidance_image={self.guidance_image} — only one is set — "
                "dual guidance needs both — set both or neither"
            )
        if self.dual and self.guidance != 0:
            raise ConfigError(
                f"guidance={self.guidance} — together with guidance_text and guidance_image — single and dual guidance "
                "exclude each other — set guidance to 0"
            )

    @property
    def dual(self) -> bool:
        """Guidance by text and source image separately."""
        return self.guidance_text is not None


@torch.inference_mode()
def decode_images(
    model: DiffusionModel,
    prompts: Sequence[ImagePrompt],
    *,
    spec: TokenSpec,
    settings: ImageSettings,
    generators: Sequence[torch.Generator] | None = None,
) -> list[Tensor]:
    """Fill the masked grid of every prompt.

    Args:
        model: in eval mode.
        prompts: grids may differ in size.
        spec: ids of the model; codes are drawn below its `media.codebook_size`, which may be less than the head has.
        settings: see `ImageSettings`.
        generators: one per sample (CPU), needed at temperature > 0.

    Returns:
        Per prompt [positions, C] int64 codes on the CPU in row order, newline rows left out.

    Raises:
        DataError: an answer that isn't laid out as required, or branches whose answers differ.
        ConfigError: a branch that the guidance needs is missing; see `check_generators`.
    """
    check_generators(settings.temperature, len(prompts), generators)
    branches = [_used_branches(index, prompt, settings) for index, prompt in enumerate(prompts)]
    for index, used in enumerate(branches):
        for name, branch in used.items():
            _check_answer(f"prompt {index}, {name}", branch, spec)
        _check_same_answer(index, used, spec)
    out: list[Tensor] = []
    for chunk in chunks([sum(len(b) for b in used.values()) for used in branches], settings.max_pack_tokens):
        draws = None if generators is None else [generators[i] for i in chunk]
        out += _decode_chunk(model, [branches[i] for i in chunk], spec, settings, draws)
    return out


def _used_branches(index: int, prompt: ImagePrompt, settings: ImageSettings) -> dict[str, Prompt]:
    """Branches that contribute, by name; `cond` is left out where it has no weight."""
    if settings.dual:
        if prompt.uncond_text is None or prompt.uncond_image is None:
            raise ConfigError(
                f"guidance_text — prompt {index} has no text- or image-negative branch — dual guidance needs both — "
                "give them, or use guidance"
            )
        if not (prompt.cond.type_ids == TYPE_MEDIA).any():
            raise ConfigError(
                f"guidance_image — prompt {index} has no source image — dual guidance is for editing — use guidance"
            )
        return {"cond": prompt.cond, "uncond_text": prompt.uncond_text, "uncond_image": prompt.uncond_image}
    if settings.guidance == 0:
        return {"cond": prompt.cond}
    if prompt.uncond is None:
        raise ConfigError(
            f"guidance — {settings.guidance}, but prompt {index} has no unconditional branch — "
            "guidance needs one — give it, or set guidance to 0"
        )
    if settings.guidance < 0:
        return {"uncond": prompt.uncond}
    if prompt.uncond.same_rows(prompt.cond):
        return {"cond": prompt.cond}
    return {"cond": prompt.cond, "uncond": prompt.uncond}


def _check_answer(where: str, rows: Prompt, spec: TokenSpec) -> None:
    """The answer must be BOA, BOI, media rows without a gap, EOI, EOA at the very end, and hold a masked row."""
    if rows.turn_ids is None:
        raise DataError(f"{where} — no turn_ids, block_ids, is_clean — image decoding needs them — give all three")
    media = (rows.type_ids == TYPE_ANSWER_MEDIA).nonzero()[:, 0]
    text = spec.text
    if len(media) == 0:
        raise DataError(f"{where} — no row of type 4 — the answer must hold the masked grid — build it with the layout")
    first, last = int(media[0]), int(media[-1])
    framed = (
        first >= 2
        and last + 3 == len(rows)
        and last - first + 1 == len(media)
        and rows.input_ids[first - 2 : first, 0].tolist() == [text.boa, text.boi]
        and rows.input_ids[last + 1 :, 0].tolist() == [text.eoi, text.eoa]
    )
    if not framed:
        raise DataError(
            f"{where} — type-4 rows {first}..{last} of {len(rows)} — must stand, without a gap, between <answer> <BOI> "
            "and <EOI> </answer> at the end — build the prompt with the layout"
        )
    masked = rows.input_ids[first : last + 1] == spec.media.mask
    if not masked.any():
        raise DataError(f"{where} — no media row holds the mask id {spec.media.mask} — nothing to decode — mask rows")
    partly = (masked.any(1) != masked.all(1)).nonzero()
    if len(partly):
        raise DataError(
            f"{where}, row {first + int(partly[0])} — only some codebooks are masked — must be all or none — fix it"
        )


def _check_same_answer(index: int, used: dict[str, Prompt], spec: TokenSpec) -> None:
    """Rows of type 4 must agree between branches: same number, same ids (so the same mask pattern)."""
    answers = {name: branch.input_ids[branch.type_ids == TYPE_ANSWER_MEDIA] for name, branch in used.items()}
    reference_name, reference = next(iter(answers.items()))
    for name, answer in answers.items():
        if len(answer) != len(reference):
            raise DataError(
                f"prompt {index} — {name} has {len(answer)} media rows, {reference_name} has {len(reference)} — "
                "branches decode the same grid — use one grid"
            )
        if not torch.equal(answer, reference):
            raise DataError(
                f"prompt {index} — media rows of {name} and {reference_name} differ — "
                "branches need the same mask pattern and codes — use one grid"
            )


class _Grid(NamedTuple):
    """Answer-media rows of a chunk.

    Attributes:
        rows: [R] row in the pack, per branch name and in sample order.
        sample: [R] number of the sample.
        newline: [R] bool.
    """

    rows: dict[str, Tensor]
    sample: Tensor
    newline: Tensor


def _decode_chunk(
    model: DiffusionModel,
    branches: list[dict[str, Prompt]],
    spec: TokenSpec,
    settings: ImageSettings,
    generators: list[torch.Generator] | None,
) -> list[Tensor]:
    """Decode the samples of one pack together."""
    names = sorted({name for used in branches for name in used})
    places = [(index, name) for name in names for index, used in enumerate(branches) if name in used]
    inputs, first = pack([branches[index][name] for index, name in places], model.device)
    grid = _locate(branches, names, dict(zip(places, first.tolist(), strict=True)), spec, model.device)
    masked = inputs["input_ids"][grid.rows[names[0]], 0] == spec.media.mask
    start_counts = torch.bincount(grid.sample[masked], minlength=len(branches))
    for step in range(settings.rounds):
        hidden = model(**inputs).hidden
        states = _guide({name: hidden[rows[masked]] for name, rows in grid.rows.items()}, settings)
        codes, scores = _sample_codes(model, states, grid.sample[masked], spec, settings, generators)
        keep = _keep_masked(start_counts, step, settings.rounds)
        again = _lowest(scores, grid.sample[masked], keep)
        codes[again] = spec.media.mask
        for rows in grid.rows.values():
            inputs["input_ids"][rows[masked]] = codes
        masked = masked.clone()
        masked[masked.nonzero()[:, 0][~again]] = False
        if not masked.any():
            break
    codes = inputs["input_ids"][grid.rows[names[0]]].cpu()
    sample, newline = grid.sample.cpu(), grid.newline.cpu()
    return [codes[(sample == index) & ~newline] for index in range(len(branches))]


def _locate(
    branches: list[dict[str, Prompt]],
    names: list[str],
    starts: dict[tuple[int, str], int],
    spec: TokenSpec,
    device: torch.device,
) -> _Grid:
    """Find the answer-media rows of every sample in every branch.

    A branch that a sample leaves out, because its rows equal the conditional ones, is read from the latter.
    """
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    sample, newline = [], []
    for index, used in enumerate(branches):
        default = next(iter(used))
        for name in names:
            name_used = name if name in used else default
            media = (used[name_used].type_ids == TYPE_ANSWER_MEDIA).nonzero()[:, 0]
            rows[name].append(media + starts[index, name_used])
        answer = used[default].input_ids[used[default].type_ids == TYPE_ANSWER_MEDIA]
        sample.append(torch.full((len(answer),), index))
        newline.append(answer[:, 0] == spec.media.newline)
    return _Grid(
        {name: torch.cat(parts).to(device) for name, parts in rows.items()},
        torch.cat(sample).to(device),
        torch.cat(newline).to(device),
    )


def _guide(states: dict[str, Tensor], settings: ImageSettings) -> Tensor:
    """Combine branch states [M, H] (spec §7)."""
    if settings.dual:
        assert settings.guidance_text is not None and settings.guidance_image is not None
        cond = states["cond"]
        text = settings.guidance_text * (cond - states["uncond_text"])
        return cond + text + settings.guidance_image * (cond - states["uncond_image"])
    if len(states) == 1:
        return next(iter(states.values()))
    return (1 + settings.guidance) * states["cond"] - settings.guidance * states["uncond"]


def _sample_codes(
    model: DiffusionModel,
    states: Tensor,
    sample: Tensor,
    spec: TokenSpec,
    settings: ImageSettings,
    generators: list[torch.Generator] | None,
) -> tuple[Tensor, Tensor]:
    """Codes of all masked positions, codebook after codebook; only those below `spec.media.codebook_size`.

    Args:
        states: [M, H]. sample: [M], ascending.

    Returns:
        Codes [M, C] int64 and scores [M] float32: ln of the mean probability, plus T times Gumbel noise.
    """
    codes = torch.empty((len(states), 0), dtype=torch.int64, device=states.device)
    probability = torch.zeros(len(states), device=states.device)
    temperature = settings.temperature
    counts = torch.bincount(sample, minlength=0 if generators is None else len(generators)).tolist()
    for _ in range(spec.num_codebooks):
        logits = model.image_step(states, codes)[:, : spec.media.codebook_size].float()
        scores = logits
        if temperature > 0:
            assert generators is not None
            logits = logits / temperature
            scores = logits + _gumbel(generators, counts, logits.shape[1]).to(logits.device)
        chosen = scores.argmax(1, keepdim=True)
        probability += logits.softmax(1).gather(1, chosen)[:, 0]
        codes = torch.cat([codes, chosen], dim=1)
    certainty = (probability / spec.num_codebooks).log()
    if temperature > 0:
        assert generators is not None
        certainty = certainty + temperature * _gumbel(generators, counts, 1)[:, 0].to(certainty.device)
    return codes, certainty


def _gumbel(generators: list[torch.Generator], counts: list[int], width: int) -> Tensor:
    """[sum(counts), width] float32 Gumbel noise; every sample draws from its own generator."""
    draws = [
        torch.rand((count, width), generator=generator, dtype=torch.float64)
        for count, generator in zip(counts, generators, strict=True)
        if count
    ]
    # float64: a float32 uniform can be exactly 0, whose logarithm is infinite
    return -torch.log(-torch.log(torch.cat(draws))).float()


def _keep_masked(start_counts: Tensor, step: int, rounds: int) -> Tensor:
    """Positions that stay masked after a round, per sample: max(1, ⌊M₀·cos(π(s+1)/2R)⌋), none after the last."""
    if step + 1 == rounds:
        return torch.zeros_like(start_counts)
    share = math.cos(math.pi * (step + 1) / (2 * rounds))
    return (start_counts.double() * share).floor().long().clamp(min=1)


def _lowest(scores: Tensor, sample: Tensor, keep: Tensor) -> Tensor:
    """The `keep[i]` lowest scores of each sample i, but never all of them, as [M] bool."""
    counts = torch.bincount(sample, minlength=len(keep))
    keep = torch.minimum(keep, (counts - 1).clamp(min=0))
    order = scores.argsort(stable=True)
    order = order[sample[order].argsort(stable=True)]
    starts = counts.cumsum(0) - counts
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - starts[sample[order]]
    return rank < keep[sample]
