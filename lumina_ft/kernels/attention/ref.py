"""Reference attention: the packed block-diffusion rule as a dense mask (T6, spec §3).

Shape legend: S tokens of one row, B rows, Hq query heads, Hk key heads, D head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lumina_ft.tokens import TYPE_ANSWER_MEDIA, TYPE_ANSWER_TEXT, TYPE_TEXT

# Bits: the key's block lies before, at or after the query's.
BEFORE, SAME, AFTER = 1, 2, 4
_NO, _UP_TO, _YES = 0, BEFORE | SAME, BEFORE | SAME | AFTER

# Rows: noisy text, noisy answer media, other noisy, clean text, other clean queries.
# Columns: noisy text, noisy special, noisy media, clean text, clean special, clean media keys.
SAME_TURN_RULE = (
    (SAME, _UP_TO, _NO, BEFORE, _NO, _NO),
    (_YES, _YES, _YES, _NO, _NO, _NO),
    (_NO, _YES, _YES, _NO, _NO, _NO),
    (_NO, _NO, _NO, _UP_TO, _UP_TO, _NO),
    (_NO, _NO, _NO, _NO, _YES, _YES),
)
CLEAN_KEYS = 3
"""Columns from here on are of clean keys."""


@dataclass(frozen=True)
class TokenMeta:
    """What the rule reads of each token; all tensors share one shape [..., L], L tokens of a sample or of a row.

    Attributes:
        type_ids: int64, as in `lumina_ft.tokens`.
        turn_ids: int64. block_ids: int64, -1 outside blocks. is_clean: bool.
        valid: bool; an invalid token neither attends nor is attended to.
        has_metadata: False drops the rule: every valid pair of a sample is allowed.
        detailed: bool [..., 1], whether any token of the sample has a block id >= 0; a bool broadcastable per token.
    """

    type_ids: Tensor
    turn_ids: Tensor
    block_ids: Tensor
    is_clean: Tensor
    valid: Tensor
    has_metadata: bool
    detailed: Tensor


def pair_rule(meta: TokenMeta) -> Tensor:
    """Allowed pairs, sample borders left out.

    Returns:
        bool [..., L, L]; row = query, column = key.
    """
    allowed = meta.valid.unsqueeze(-1) & meta.valid.unsqueeze(-2)
    if not meta.has_metadata:
        return allowed
    turn_q, turn_k = meta.turn_ids.unsqueeze(-1), meta.turn_ids.unsqueeze(-2)
    clean_q, clean_k = meta.is_clean.unsqueeze(-1), meta.is_clean.unsqueeze(-2)
    earlier = (turn_k < turn_q) & clean_k
    # Without block ids: noisy sees noisy, clean sees clean of its own turn; earlier turns as always.
    same_turn = torch.where(meta.detailed.unsqueeze(-1), _block_rule(meta), clean_q == clean_k)
    return allowed & (earlier | ((turn_k == turn_q) & same_turn))


def token_kinds(type_ids: Tensor, is_clean: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's row and column in `SAME_TURN_RULE`.

    Args:
        type_ids: int64. is_clean: bool, of the same shape.

    Returns:
        int64, of the same shape: the row of the token as a query, its column as a key.
    """
    text = type_ids == TYPE_ANSWER_TEXT
    special = type_ids == TYPE_TEXT
    visual = type_ids == TYPE_ANSWER_MEDIA
    query_kind = torch.where(is_clean, 4 - text.long(), 2 - 2 * text.long() - visual.long())
    return query_kind, 2 - 2 * text.long() - special.long() + CLEAN_KEYS * is_clean.long()


def _block_rule(meta: TokenMeta) -> Tensor:
    """The same-turn table of spec §3. Returns bool [..., L, L]."""
    query_kind, key_kind = token_kinds(meta.type_ids, meta.is_clean)
    table = torch.tensor(SAME_TURN_RULE, dtype=torch.uint8, device=meta.type_ids.device)
    rule = table[query_kind.unsqueeze(-1), key_kind.unsqueeze(-2)]
    block_q, block_k = meta.block_ids.unsqueeze(-1), meta.block_ids.unsqueeze(-2)
    order = 1 + (block_k >= block_q).to(torch.uint8) + 2 * (block_k > block_q).to(torch.uint8)
    return (rule & order) != 0


def allowed_mask(
    type_ids: Tensor,
    *,
    cu_seqlens: Tensor,
    valid: Tensor | None = None,
    turn_ids: Tensor | None = None,
    is_clean: Tensor | None = None,
    block_ids: Tensor | None = None,
) -> Tensor:
    """Dense rule of one packed row. S x S: for checks and small inputs only.

    Tokens after the last bound form a sample of their own. The coarse rule (no block ids) is chosen per sample, so that
    one sample never changes another's mask.

    Args:
        type_ids: [S] int. cu_seqlens: [n + 1] int, from 0 to at most S.
        valid: [S] bool; None: all valid.
        turn_ids, block_ids: [S] int; is_clean: [S] bool. With neither turn_ids nor is_clean every pair of a sample is
            allowed; with one of them the other counts as 0. Without block_ids the coarse rule holds.

    Returns:
        bool [S, S]; row = query, column = key.
    """
    tokens = type_ids.shape[0]
    index = torch.arange(tokens, device=type_ids.device)
    sample = torch.searchsorted(cu_seqlens[1:].to(index), index, right=True)
    blocks = torch.full_like(index, -1) if block_ids is None else block_ids.long()
    detailed = torch.zeros(tokens + 1, dtype=torch.int64, device=index.device)
    detailed = detailed.index_add_(0, sample, (blocks >= 0).long()) > 0
    meta = TokenMeta(
        type_ids=type_ids.long(),
        turn_ids=torch.zeros_like(index) if turn_ids is None else turn_ids.long(),
        block_ids=blocks,
        is_clean=torch.zeros_like(index, dtype=torch.bool) if is_clean is None else is_clean.bool(),
        valid=torch.ones_like(index, dtype=torch.bool) if valid is None else valid.bool(),
        has_metadata=turn_ids is not None or is_clean is not None,
        detailed=detailed[sample],
    )
    return pair_rule(meta) & (sample.unsqueeze(-1) == sample.unsqueeze(-2))


@dataclass(frozen=True)
class DensePlan:
    """A ready S x S mask, shared by all layers.

    Attributes:
        allowed: [B, S, S] bool.
    """

    allowed: Tensor

    @property
    def name(self) -> str:
        return "dense"


def dense_attention(q: Tensor, k: Tensor, v: Tensor, plan: DensePlan) -> Tensor:
    """Softmax attention written out. A query without any allowed key gets 0.

    Args:
        q: [B * S, Hq, D]. k, v: [B * S, Hk, D]; each key head serves Hq / Hk consecutive query heads.

    Returns:
        [B * S, Hq, D].
    """
    rows, tokens = plan.allowed.shape[:2]
    heads, head_dim = q.shape[1:]
    repeat = heads // k.shape[1]
    q_BHSD = q.view(rows, tokens, heads, head_dim).transpose(1, 2)
    k_BHSD = k.view(rows, tokens, -1, head_dim).transpose(1, 2).repeat_interleave(repeat, dim=1)
    v_BHSD = v.view(rows, tokens, -1, head_dim).transpose(1, 2).repeat_interleave(repeat, dim=1)
    allowed = plan.allowed.unsqueeze(1)
    scores = (q_BHSD @ k_BHSD.transpose(-1, -2)).float() * head_dim**-0.5
    # The lowest finite value, not -inf: a query with nothing allowed must not turn into NaN before it is zeroed.
    scores = scores.masked_fill(~allowed, torch.finfo(torch.float32).min)
    weights = scores.softmax(-1).masked_fill(~allowed, 0.0)
    out = weights.to(v.dtype) @ v_BHSD
    return out.transpose(1, 2).reshape(rows * tokens, heads, head_dim)
