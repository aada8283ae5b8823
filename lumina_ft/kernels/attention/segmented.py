"""Segmented attention: each packed sample attends to itself only, so work falls from S^2 to the sum of L_i^2 (T7).

Shape legend: T tokens of all rows, n samples of a bucket, L longest sample of a bucket, N padded slots of all buckets,
Hq query heads, Hk key heads, D head dim.

Samples of similar length share a bucket and are padded to its longest, so many short samples cost a few calls. The plan
is built once per forward and shared by all layers.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lumina_ft.kernels.attention.ref import TokenMeta, pair_rule

SHORT_TOKENS = 32
"""Samples up to this length share one bucket: a separate call costs more than their padding."""
PADDED_LENGTH_RATIO = 0.75
"""Longer samples join a bucket if they are at least this share of its longest."""


@dataclass(frozen=True)
class Bucket:
    """Samples computed in one call.

    Attributes:
        samples: n. length: L.
        bias: [n, 1, L, L], 0 where allowed and -inf where not, in the dtype of the activations. A query without any
            allowed key (padding) has zeros instead; its output is dropped.
    """

    samples: int
    length: int
    bias: Tensor


@dataclass(frozen=True)
class SegmentedPlan:
    """Gathers between T tokens and N padded slots, and one bias per bucket.

    Attributes:
        slot_token: [N] int64, token of each slot; the sample's first one in unused slots.
        unused_slots: [N, 1, 1] bool, or None if every slot holds a token.
        token_slot: [T] int64, slot of each token; 0 outside samples.
        silent_tokens: [T, 1, 1] bool, tokens whose output is 0: outside samples, invalid, or with nothing to attend to.
        outside: [T, 1, 1] bool, tokens outside samples, or None if there are none.
    """

    buckets: tuple[Bucket, ...]
    slot_token: Tensor
    unused_slots: Tensor | None
    token_slot: Tensor
    silent_tokens: Tensor
    outside: Tensor | None

    @property
    def name(self) -> str:
        return "segmented"


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Sample numbers per bucket, longest bucket first; within a bucket in order of the pack."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    longest = 0
    for i in order:
        shares = lengths[i] >= PADDED_LENGTH_RATIO * longest or longest <= SHORT_TOKENS
        if groups and shares:
            groups[-1].append(i)
        else:
            groups.append([i])
            longest = lengths[i]
    return [sorted(group) for group in groups]


def plan_segments(
    starts: list[int],
    lengths: list[int],
    *,
    type_ids: Tensor,
    turn_ids: Tensor,
    block_ids: Tensor,
    is_clean: Tensor,
    valid: Tensor,
    has_metadata: bool,
    dtype: torch.dtype,
) -> SegmentedPlan:
    """Lay samples out in buckets and write the block-diffusion rule of each.

    Args:
        starts, lengths: samples in token order, on the host; lengths >= 1, without overlap.
        type_ids, turn_ids, block_ids: [T] int64. is_clean, valid: [T] bool.
        has_metadata: False allows every valid pair of a sample (spec §3).
        dtype: of the activations.
    """
    tokens = type_ids.shape[0]
    groups = group_by_length(lengths)
    slot_token, used = (x.to(type_ids.device) for x in _slots(groups, starts, lengths))
    # Unused slots write to the extra last element.
    token_slot = torch.zeros(tokens + 1, dtype=torch.int64, device=type_ids.device)
    numbers = torch.arange(slot_token.numel(), device=type_ids.device)
    token_slot = token_slot.scatter_(0, torch.where(used, slot_token, tokens), numbers)[:tokens]
    meta = [x.index_select(0, slot_token) for x in (type_ids, turn_ids, block_ids, is_clean, valid)]
    sizes = [len(group) * max(lengths[i] for i in group) for group in groups]
    buckets: list[Bucket] = []
    heard: list[Tensor] = []
    for group, *parts in zip(groups, *(x.split(sizes) for x in (*meta, used)), strict=True):
        kind, turn, block, clean, ok, real = (x.view(len(group), -1) for x in parts)
        detailed = ((block >= 0) & real).any(-1, keepdim=True)
        allowed = pair_rule(TokenMeta(kind, turn, block, clean, ok & real, has_metadata, detailed))
        hears = allowed.any(-1)
        forbidden = ~allowed & hears.unsqueeze(-1)
        bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(forbidden, float("-inf"))
        buckets.append(Bucket(len(group), hears.shape[1], bias.unsqueeze(1)))
        heard.append(hears.reshape(-1))
    silent = ~torch.cat(heard).index_select(0, token_slot)
    outside = None
    if sum(lengths) < tokens:
        outside = torch.ones_like(silent).index_fill_(0, slot_token[used], False)
        silent = silent | outside
    return SegmentedPlan(
        buckets=tuple(buckets),
        slot_token=slot_token,
        unused_slots=None if slot_token.numel() == sum(lengths) else ~used.view(-1, 1, 1),
        token_slot=token_slot,
        silent_tokens=silent.view(-1, 1, 1),
        outside=None if outside is None else outside.view(-1, 1, 1),
    )


def _slots(groups: list[list[int]], starts: list[int], lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Token of each padded slot and whether it is used; both [N], on the host.

    An unused slot names its own sample's first token: NaN there must not reach other samples through masked keys.
    """
    tokens: list[Tensor] = []
    used: list[Tensor] = []
    for group in groups:
        start = torch.tensor([starts[i] for i in group]).unsqueeze(1)
        size = torch.tensor([lengths[i] for i in group]).unsqueeze(1)
        column = torch.arange(int(size.max()))
        inside = column < size
        tokens.append(torch.where(inside, start + column, start).reshape(-1))
        used.append(inside.reshape(-1))
    return torch.cat(tokens), torch.cat(used)


class _ToSlots(torch.autograd.Function):
    """[T, heads, D] -> [N, heads, D]. Each token has one slot, so the adjoint is a gather, not an index_add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: SegmentedPlan) -> Tensor:
        ctx.plan = plan
        return x.index_select(0, plan.slot_token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        plan = ctx.plan
        out = grad.index_select(0, plan.token_slot)
        return (out if plan.outside is None else out.masked_fill_(plan.outside, 0.0)), None


class _ToTokens(torch.autograd.Function):
    """[N, heads, D] -> [T, heads, D], 0 for silent tokens."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, plan: SegmentedPlan) -> Tensor:
        ctx.plan = plan
        return y.index_select(0, plan.token_slot).masked_fill_(plan.silent_tokens, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        plan = ctx.plan
        out = grad.masked_fill(plan.silent_tokens, 0.0).index_select(0, plan.slot_token)
        return (out if plan.unused_slots is None else out.masked_fill_(plan.unused_slots, 0.0)), None


def segmented_attention(q: Tensor, k: Tensor, v: Tensor, plan: SegmentedPlan) -> Tensor:
    """Attention inside each sample. A query without any allowed key gets 0.

    Args:
        q: [T, Hq, D]. k, v: [T, Hk, D]; each key head serves Hq / Hk consecutive query heads.

    Returns:
        [T, Hq, D].
    """
    slots: tuple[Tensor, ...] = tuple(_ToSlots.apply(x, plan) for x in (q, k, v))  # pyright: ignore[reportAssignmentType]
    sizes = [bucket.samples * bucket.length for bucket in plan.buckets]
    parts = zip(*(x.split(sizes) for x in slots), strict=True)
    out = [_attend_bucket(q, k, v, bucket) for (q, k, v), bucket in zip(parts, plan.buckets, strict=True)]
    return _ToTokens.apply(out[0] if len(out) == 1 else torch.cat(out), plan)  # pyright: ignore[reportReturnType]


def _attend_bucket(q: Tensor, k: Tensor, v: Tensor, bucket: Bucket) -> Tensor:
    """[n * L, heads, D] of one bucket -> [n * L, Hq, D]."""
    q_nHLD, k_nHLD, v_nHLD = (x.view(bucket.samples, bucket.length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q_nHLD, k_nHLD, v_nHLD, attn_mask=bucket.bias, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).reshape(q.shape)
