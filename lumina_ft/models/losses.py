"""Losses as named sums: the loop divides once per optimizer step by global counts (spec §5, T3-T5).

Shape legend: T tokens, C codebooks, m supervised text tokens, n supervised image positions, V text rows, K image codes,
L MoE layers, E experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lumina_ft.batch import LossSum
from lumina_ft.errors import DataError
from lumina_ft.models.inputs import ModelInputs, as_int64
from lumina_ft.models.u2_config import U2Config
from lumina_ft.tokens import IGNORE, TYPE_ANSWER_MEDIA, TYPE_ANSWER_TEXT


@dataclass(frozen=True)
class RowSet:
    """Rows that a conditional head runs on; never empty, so that its parameters take part on every rank (T1).

    Attributes:
        rows: [n] int64, or [1] pointing at token 0 when there is no real row.
        weight: 1.0, or 0.0 for the stand-in row.
        count: n, without the stand-in.
    """

    rows: Tensor
    weight: float
    count: int

    @classmethod
    def of(cls, selected: Tensor) -> "RowSet":
        """Rows where `selected` [T] bool is set."""
        rows = selected.nonzero().squeeze(1)
        count = rows.shape[0]
        return cls(rows if count else rows.new_zeros(1), 1.0 if count else 0.0, count)


@dataclass(frozen=True)
class Targets:
    """Normalised labels.

    Attributes:
        text, image: supervised rows.
        text_ids: [m] int64. image_codes: [n, C] int64. Stand-in rows have target 0.
    """

    text: RowSet
    text_ids: Tensor
    image: RowSet
    image_codes: Tensor


def normalise_labels(labels: Tensor, inputs: ModelInputs, config: U2Config) -> Targets:
    """Find and check supervised positions (T3).

    Text: type 3, column 0 set. Image: type 4, any column set; then all must be. Padding is never supervised.

    Args:
        labels: [B, S, C], [S, C], or one column [B, S], [S] when no image position is supervised; -100 elsewhere.

    Raises:
        DataError: ambiguous or wrong shape, half precision, a partly labelled image position, a label out of range.
    """
    flat = _flat_labels(as_int64(labels, "labels"), inputs, config.id_columns)
    text = (inputs.type_ids == TYPE_ANSWER_TEXT) & inputs.valid & (flat[:, 0] != IGNORE)
    image = (inputs.type_ids == TYPE_ANSWER_MEDIA) & inputs.valid & (flat != IGNORE).any(1)
    _check_labels(flat, text, image, inputs, config)
    text_rows, image_rows = RowSet.of(text), RowSet.of(image)
    codes = flat.index_select(0, image_rows.rows).clamp(min=0) * int(image_rows.count > 0)
    return Targets(
        text=text_rows,
        text_ids=flat[:, 0].index_select(0, text_rows.rows).clamp(min=0),
        image=image_rows,
        image_codes=codes.expand(-1, config.id_columns),
    )


def _flat_labels(labels: Tensor, inputs: ModelInputs, columns: int) -> Tensor:
    """[T, C], or [T, 1] for labels without a codebook axis."""
    rows, tokens = inputs.rows, inputs.tokens
    shape = tuple(labels.shape)
    if shape == (rows, tokens, columns) or (rows == 1 and shape == (tokens, columns)):
        return labels.reshape(-1, columns)
    if shape == (rows, tokens) and tokens == columns:
        raise DataError(
            f"labels — shape {list(shape)} — with {columns} codebooks it could mean [B, S] or [S, C] — "
            f"pass [{rows}, {tokens}, {columns}]"
        )
    if shape == (rows, tokens) or (rows == 1 and shape == (tokens,)):
        return labels.reshape(-1, 1)
    raise DataError(
        f"labels — shape {list(shape)} — must be [{rows}, {tokens}, {columns}], [{tokens}, {columns}] or "
        f"[{rows}, {tokens}] like input_ids — reshape"
    )


def _check_labels(flat: Tensor, text: Tensor, image: Tensor, inputs: ModelInputs, config: U2Config) -> None:
    """One host read for all label checks."""
    column = flat[:, 0]
    bad_text = text & ((column < 0) | (column >= (config.text_rows or 0)))
    one_column = image & (flat.shape[1] < config.id_columns)
    partial = image & (flat == IGNORE).any(1)
    codes = config.image_head_classes
    bad_code = image & (((flat < 0) & (flat != IGNORE)) | (flat >= codes)).any(1)
    checks = (
        (one_column, f"no codebook axis — image positions need [S, {config.id_columns}] labels — pass all codebooks"),
        (partial, "only some codebooks are set — an image position needs all or none — set the others or use -100"),
        (bad_code, f"code out of range — must be 0 to {codes - 1} — check the codec"),
        (bad_text, f"id out of range — must be -100 or 0 to {(config.text_rows or 0) - 1} — check the tokenizer"),
    )
    failed = torch.stack([mask.any() for mask, _ in checks]).tolist()
    for wrong, (mask, message) in zip(failed, checks, strict=True):
        if wrong:
            token = int(mask.nonzero()[0])
            raise DataError(f"labels — {flat[token].tolist()} at {inputs.where(token)} — {message}")


def count_experts(topk_idx: list[Tensor], counted: Tensor, num_experts: int) -> Tensor:
    """Tokens per expert and layer.

    Args:
        topk_idx: per layer [T, K] int64. counted: [T] bool, tokens that count.

    Returns:
        [L, E] int64.
    """
    counts = torch.zeros(len(topk_idx), num_experts, dtype=torch.int64, device=counted.device)
    if topk_idx:
        chosen = torch.stack(topk_idx)
        weight = counted.long().view(1, -1, 1).expand_as(chosen)
        counts.scatter_add_(1, chosen.flatten(1), weight.flatten(1))
    return counts


def balance_per_layer(router_logits: list[Tensor], topk_idx: list[Tensor], counted: Tensor) -> Tensor:
    """E * sum_e f_e * P_e per layer (T5).

    f is the share of slots routed to an expert; P the mean softmax probability, although routing uses sigmoids.

    Args:
        router_logits: per layer [T, E] float32. topk_idx: per layer [T, K] int64.
        counted: [T] bool; without any token the result is 0.

    Returns:
        [L] float32; 1.0 means perfectly even.
    """
    logits = torch.stack(router_logits)
    experts = logits.shape[-1]
    tokens = counted.sum().clamp(min=1)
    share = count_experts(topk_idx, counted, experts).float() / (tokens * topk_idx[0].shape[1])
    # A product with the mask would let a non-finite padding row in; padding is finite, see `finite`.
    mean_probability = (logits.softmax(-1) * counted.view(1, -1, 1)).sum(1) / tokens
    return experts * (share * mean_probability).sum(-1)


def balance_loss(router_logits: list[Tensor], topk_idx: list[Tensor], counted: Tensor) -> LossSum:
    """Mean over layers, times the counted tokens: dividing by the global token count weights packs by their size.

    Args and raises as `balance_per_layer`; a model without MoE layers has loss 0.
    """
    count = counted.sum()
    if not router_logits:
        return LossSum(torch.zeros((), device=counted.device), count)
    return LossSum(balance_per_layer(router_logits, topk_idx, counted).mean() * count, count)
