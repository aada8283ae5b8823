"""Block-diffusion noise (spec §6): which answer rows are masked, and what the model must predict there.

Text: one rate per sample, each answer row masked with that probability. Images: a share of the code rows, without
replacement, all codebooks of a row together; separators never. Every answer gets at least one masked row, so each
sample carries a signal. Draws depend on (seed, epoch, sample) only.

Shape legend: n rows of one sample, C columns, m supervisable rows of all samples, g answers ("groups") among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lumina_ft.config.schema import NoiseConfig
from lumina_ft.data.draws import Stream, uniforms
from lumina_ft.data.layout import Layout
from lumina_ft.tokens import IGNORE, TYPE_ANSWER_TEXT, TokenSpec


@dataclass(frozen=True)
class NoisedSample:
    """A layout after noise.

    Attributes:
        layout: the rows before noise; its ids are untouched.
        input_ids: [n, C] int32, the mask id in noised rows.
        labels: [n, C] int32, the original ids in noised rows, else -100.
        noised: [n] bool.
    """

    layout: Layout
    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    noised: NDArray[np.bool_]


def apply_noise(layout: Layout, noise: NoiseConfig, spec: TokenSpec, *, key: tuple[int, int, int]) -> NoisedSample:
    """Noise one sample.

    Args:
        layout: its rows.
        noise: distribution of the masked share.
        spec: gives the mask ids.
        key: (seed, epoch, sample index); equal keys give equal noise.
    """
    seed, epoch, index = key
    return noise_layouts([layout], noise, spec, seed=seed, epoch=epoch, indices=[index])[0]


def noise_layouts(
    layouts: Sequence[Layout],
    noise: NoiseConfig,
    spec: TokenSpec,
    *,
    seed: int,
    epoch: int,
    indices: Sequence[int] | None = None,
) -> list[NoisedSample]:
    """Noise many samples in one go; each gets what `apply_noise` alone would give it.

    Args:
        layouts: rows per sample.
        noise: distribution of the masked share.
        spec: gives the mask ids.
        seed, epoch: the run's seed and the pass over the data.
        indices: sample index that keys each layout's draws; default its own `sample_index`.
    """
    sizes = np.array([len(layout) for layout in layouts])
    ends = np.cumsum(sizes)
    rows = np.flatnonzero(np.concatenate([layout.supervisable for layout in layouts]))
    owner = np.searchsorted(ends, rows, side="right")
    keys = np.array([layout.sample_index for layout in layouts] if indices is None else indices)
    is_text = np.concatenate([layout.type_ids for layout in layouts])[rows] == TYPE_ANSWER_TEXT
    turns = np.concatenate([layout.turn_ids for layout in layouts])[rows]
    chosen = _chosen(owner, rows - (ends - sizes)[owner], turns, is_text, keys, noise, seed, epoch)

    input_ids = np.concatenate([layout.ids for layout in layouts])
    labels = np.full_like(input_ids, IGNORE)
    noised = np.zeros(len(input_ids), np.bool_)
    hit = rows[chosen]
    noised[hit] = True
    labels[hit] = input_ids[hit]
    input_ids[hit] = np.where(is_text[chosen], spec.text.mask, spec.media.mask).astype(np.int32)[:, None]
    return [
        NoisedSample(layout, input_ids[start:end], labels[start:end], noised[start:end])
        for layout, start, end in zip(layouts, (ends - sizes).tolist(), ends.tolist(), strict=True)
    ]


def _chosen(
    owner: NDArray[np.intp],
    row: NDArray[np.intp],
    turns: NDArray[np.int32],
    is_text: NDArray[np.bool_],
    keys: NDArray[np.int64],
    noise: NoiseConfig,
    seed: int,
    epoch: int,
) -> NDArray[np.bool_]:
    """Which of the m supervisable rows are masked.

    Args:
        owner: [m] which sample a row belongs to. row: [m] its place in that sample. turns: [m] its turn.
        is_text: [m] text answer or code of an image answer.
        keys: sample index of each sample.
    """
    chosen = np.zeros(len(row), np.bool_)
    if not len(row):
        return chosen

    def draw(stream: Stream, at: NDArray[np.integer], numbers: NDArray[np.integer] | int) -> NDArray[np.float64]:
        return uniforms(stream, seed=seed, epoch=epoch, samples=keys[owner[at]], numbers=numbers)

    # Rows of one answer are neighbours, so an answer is a run of equal (sample, turn).
    opens = np.append(True, (owner[1:] != owner[:-1]) | (turns[1:] != turns[:-1]))
    group = np.cumsum(opens) - 1
    first = np.flatnonzero(opens)
    for stream, kind in ((Stream.TEXT_ROW, True), (Stream.IMAGE_ROW, False)):
        at = np.flatnonzero(is_text == kind)
        if not len(at):
            continue
        score = draw(stream, at, row[at])
        starts = np.flatnonzero(opens[at])
        heads = first[is_text[first] == kind]
        if kind:
            low, high = noise.text_sigma
            rate = low + (high - low) * draw(Stream.TEXT_RATE, heads, 0)
            chosen[at] = _below_rate(score, rate, starts)
        else:
            low, high = noise.image_ratio_range
            share = low + (high - low) * draw(Stream.IMAGE_RATIO, heads, turns[heads])
            if noise.image_ratio == "cosine":
                share = np.cos(np.pi / 2 * share)
            chosen[at] = _smallest_share(score, share, starts, group[at])
    return chosen


def _below_rate(score: NDArray[np.float64], rate: NDArray[np.float64], starts: NDArray[np.intp]) -> NDArray[np.bool_]:
    """[m] rows with a score below their answer's rate [g]; if an answer has none, its smallest score."""
    sizes = np.diff(np.append(starts, len(score)))
    chosen = score < np.repeat(rate, sizes)
    smallest = np.minimum.reduceat(score, starts)
    return chosen | (score == np.repeat(smallest, sizes)) & np.repeat(~np.logical_or.reduceat(chosen, starts), sizes)


def _smallest_share(
    score: NDArray[np.float64], share: NDArray[np.float64], starts: NDArray[np.intp], group: NDArray[np.intp]
) -> NDArray[np.bool_]:
    """[m] the floor(share * size) rows, at least one, of each answer with the smallest scores: no replacement."""
    sizes = np.diff(np.append(starts, len(score)))
    keep = np.maximum(np.floor(share * sizes).astype(np.int64), 1)
    order = np.lexsort((score, group))
    rank = np.arange(len(score)) - np.repeat(starts, sizes)
    chosen = np.empty(len(score), np.bool_)
    chosen[order] = rank < np.repeat(keep, sizes)
    return chosen
