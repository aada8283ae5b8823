# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""Triton kernels of the router: from logits to experts and their weights, and back. See `fused`.

Shape legend: T tokens, E experts, G groups of S experts, K chosen experts.
"""

import triton
import triton.language as tl

# Scores are compared between these: a NaN wins, as in torch.topk, and an eligible expert beats one that isn't. Sums of
# two stay finite.
_HIGHEST = tl.constexpr(1e30)
_LOWEST = tl.constexpr(-1e30)


@triton.jit
def drop_groups(
    biased, KEPT: tl.constexpr, PADDED_GROUPS: tl.constexpr, PADDED_SIZE: tl.constexpr, BLOCK_M: tl.constexpr
):
    """biased [BLOCK_M, PADDED_GROUPS, PADDED_SIZE] with -inf outside the KEPT groups whose two best sum highest."""
    group = tl.arange(0, PADDED_GROUPS)
    member = tl.arange(0, PADDED_SIZE)
    best = tl.max(biased, axis=2)
    first = tl.min(tl.where(biased == best[:, :, None], member[None, None, :], PADDED_SIZE), axis=2)
    rest = tl.where(member[None, None, :] == first[:, :, None], -float("inf"), biased)
    score = best + tl.max(rest, axis=2)
    kept = tl.zeros((BLOCK_M, PADDED_GROUPS), dtype=tl.int32)
    for _ in range(KEPT):
        top = tl.max(score, axis=1)
        chosen = tl.min(tl.where(score == top[:, None], group[None, :], PADDED_GROUPS), axis=1)
        hit = group[None, :] == chosen[:, None]
        kept = tl.where(hit, 1, kept)
        score = tl.where(hit, -float("inf"), score)
    return tl.where(kept[:, :, None] > 0, biased, -float("inf"))


@triton.jit
def route_kernel(
    logits_ptr,
    bias_ptr,
    index_ptr,
    weight_ptr,
    tokens,
    scaling,
    HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    KEPT: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    PADDED_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Choose TOP_K experts for BLOCK_M tokens; the lowest index wins a tie.

    Args:
        logits_ptr: [T, E] float32. bias_ptr: [E] float32, with HAS_BIAS.
        index_ptr: [T, K] int64, out. weight_ptr: [T, K] float32, out.
        PADDED_…: next powers of two.
    """
    experts = GROUPS * SIZE
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    group = tl.arange(0, PADDED_GROUPS)
    member = tl.arange(0, PADDED_SIZE)
    expert = group[:, None] * SIZE + member[None, :]
    exists = ((group[:, None] < GROUPS) & (member[None, :] < SIZE))[None, :, :]
    loaded = exists & (row < tokens)[:, None, None]
    logits = tl.load(logits_ptr + row[:, None, None] * experts + expert[None, :, :], mask=loaded, other=0.0)
    scores = 1.0 / (1.0 + tl.exp(-logits))
    biased = scores
    if HAS_BIAS:
        biased += tl.load(bias_ptr + expert, mask=(group[:, None] < GROUPS) & (member[None, :] < SIZE), other=0.0)
    biased = tl.where(biased == biased, tl.minimum(tl.maximum(biased, _LOWEST), _HIGHEST), _HIGHEST)
    biased = tl.where(exists, biased, -float("inf"))

    if KEPT < GROUPS:
        biased = drop_groups(biased, KEPT, PADDED_GROUPS, PADDED_SIZE, BLOCK_M)

    slot = tl.arange(0, PADDED_K)
    index = tl.zeros((BLOCK_M, PADDED_K), dtype=tl.int32)
    weight = tl.zeros((BLOCK_M, PADDED_K), dtype=tl.float32)
    for k in range(TOP_K):
        top = tl.max(tl.max(biased, axis=2), axis=1)
        is_top = biased == top[:, None, None]
        chosen = tl.min(tl.min(tl.where(is_top, expert[None, :, :], experts - 1), axis=2), axis=1)
        hit = exists & (expert[None, :, :] == chosen[:, None, None])
        score = tl.sum(tl.sum(tl.where(hit, scores, 0.0), axis=2), axis=1)
        index = tl.where(slot[None, :] == k, chosen[:, None], index)
        weight = tl.where(slot[None, :] == k, score[:, None], weight)
        biased = tl.where(hit, -float("inf"), biased)
    weight = weight / (tl.sum(weight, axis=1)[:, None] + 1e-20) * scaling

    stored = (row < tokens)[:, None] & (slot < TOP_K)[None, :]
    place = row[:, None] * TOP_K + slot[None, :]
    tl.store(index_ptr + place, index.to(tl.int64), mask=stored)
    tl.store(weight_ptr + place, weight, mask=stored)


@triton.jit
def route_backward_kernel(
    grad_ptr,
    logits_ptr,
    index_ptr,
    out_ptr,
    tokens,
    scaling,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Gradient of the logits of chosen experts, from that of their weights.

    With scores s, their sum S and weights w = scaling s / S: ds = scaling (dw - sum(dw s) / S) / S.

    Args:
        grad_ptr: [T, K] float32. logits_ptr: [T, E] float32. index_ptr: [T, K] int64.
        out_ptr: [T, E] float32, zero before.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.arange(0, PADDED_K)
    real = (row < tokens)[:, None] & (slot < TOP_K)[None, :]
    place = row[:, None] * TOP_K + slot[None, :]
    grad = tl.load(grad_ptr + place, mask=real, other=0.0)
    target = row[:, None] * EXPERTS + tl.load(index_ptr + place, mask=real, other=0)
    scores = 1.0 / (1.0 + tl.exp(-tl.load(logits_ptr + target, mask=real, other=0.0)))
    scores = tl.where(real, scores, 0.0)
    total = (tl.sum(scores, axis=1) + 1e-20)[:, None]
    mean = tl.sum(grad * scores, axis=1)[:, None] / total
    gradient = scaling * (grad - mean) / total * scores * (1.0 - scores)
    tl.store(out_ptr + target, gradient, mask=real)
