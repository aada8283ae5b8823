"""Triton kernels of attention over lists of tiles, forward and backward, for every mask that `tile_plan` can write.

Shape legend: T tokens, Hq query heads, Hk key heads, G = Hq / Hk, D head dim, D' = D rounded up to a power of two.

A program owns one tile of queries (or keys) of one head and walks the list of tiles that it meets: first those where
everything is allowed, without a mask, then the others. The sums of a row are always taken in the same order, by one
program, without atomics. Query-key products are kept in units of log2, as is the saved log-sum-exp [Hq, T].

Tokens past the end of a tile, which may be another sample's or invalid, are never loaded: whatever their memory holds,
NaN included, can't reach a sum.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from lumina_ft.kernels.attention import tile_pairs

NOWHERE = tl.constexpr(-(2**31))
"""Turn of what isn't inside a tile; no token has it."""
CLEAN_SHIFT = tl.constexpr(tile_pairs.CLEAN_SHIFT)


@triton.jit
def load_program(programs, number):
    """(first token, end of the tile, full tiles begin, partial tiles begin, both end) of a program."""
    row = programs + number * 5
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)


@triton.jit
def load_queries(meta, tokens, rows, inside):
    """(turn, block, rule) of queries; what isn't inside the tile sees nothing."""
    turn = tl.load(meta + rows, mask=inside, other=NOWHERE)
    block = tl.load(meta + tokens + rows, mask=inside, other=0)
    rule = tl.load(meta + 2 * tokens + rows, mask=inside, other=0)
    return turn, block, rule


@triton.jit
def load_keys(meta, tokens, rows, inside):
    """(turn, block, shift) of keys; what isn't inside the tile is seen by none that is inside its own."""
    turn = tl.load(meta + rows, mask=inside, other=NOWHERE)
    block = tl.load(meta + tokens + rows, mask=inside, other=0)
    shift = tl.load(meta + 3 * tokens + rows, mask=inside, other=0)
    return turn, block, shift


@triton.jit
def allowed_pairs(turn_q, block_q, rule_q, turn_k, block_k, shift_k):
    """The rule of `tile_plan`; shapes broadcast."""
    order = (block_k >= block_q).to(tl.int32) + (block_k > block_q).to(tl.int32)
    by_rule = ((rule_q >> (shift_k + order)) & 1) != 0
    return ((shift_k >= CLEAN_SHIFT) & (turn_k < turn_q)) | ((turn_k == turn_q) & by_rule)


@triton.jit
def load_rows(base, offsets, keep, WHOLE: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """[rows, D'] at base + offsets [rows]; zeros where not `keep` [rows] (unused if WHOLE) and past D."""
    dims = tl.arange(0, PADDED_DIM)
    pointers = base + offsets[:, None] + dims[None, :]
    if WHOLE and HEAD_DIM == PADDED_DIM:
        block = tl.load(pointers)
    elif WHOLE:
        block = tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM == PADDED_DIM:
        block = tl.load(pointers, mask=keep[:, None], other=0.0)
    else:
        block = tl.load(pointers, mask=keep[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    return block


@triton.jit
def store_rows(base, offsets, inside, block, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Write [rows, D'] at base + offsets [rows] where `inside` [rows], rounded to the buffer's dtype."""
    dims = tl.arange(0, PADDED_DIM)
    mask = inside[:, None]
    if HEAD_DIM != PADDED_DIM:
        mask = mask & (dims < HEAD_DIM)[None, :]
    tl.store(base + offsets[:, None] + dims[None, :], block.to(base.dtype.element_ty), mask=mask)


@triton.jit
def row_of(base, first, stride, head, HEAD_DIM: tl.constexpr):
    """Pointer to a token's first element in a head. Only this offset needs int64: tiles are small."""
    return base + first.to(tl.int64) * stride + head * HEAD_DIM


@triton.jit
def attend_tiles(
    state, query, turn_q, block_q, rule_q, k, v, meta, entries, begin, stop, k_stride, v_stride, tokens, scale,
    key_head,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the tiles entries[begin:stop] of keys to (sum of values, highest score, sum of weights) of a query tile."""
    acc, peak, total = state
    for at in range(begin, stop):
        first = tl.load(entries + 2 * at)
        index = tl.arange(0, BLOCK_N)
        rows = first + index
        inside = rows < tl.load(entries + 2 * at + 1)
        key_at = row_of(k, first, k_stride, key_head, HEAD_DIM)
        key = load_rows(key_at, index * k_stride, inside, not MASKED, HEAD_DIM, PADDED_DIM)
        scores = tl.dot(query, key.T, input_precision="ieee") * scale
        if MASKED:
            turn_k, block_k, shift_k = load_keys(meta, tokens, rows, inside)
            allowed = allowed_pairs(
                turn_q[:, None], block_q[:, None], rule_q[:, None], turn_k[None, :], block_k[None, :], shift_k[None, :]
            )
            scores = tl.where(allowed, scores, float("-inf"))
        top = tl.maximum(peak, tl.max(scores, 1))
        # Of a row that has met nothing allowed, -inf - -inf would be NaN.
        shift = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.math.exp2(scores - shift[:, None])
        shrink = tl.math.exp2(peak - shift)
        total = total * shrink + tl.sum(weights, 1)
        value_at = row_of(v, first, v_stride, key_head, HEAD_DIM)
        value = load_rows(value_at, index * v_stride, inside, not MASKED, HEAD_DIM, PADDED_DIM)
        acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        peak = top
    return acc, peak, total


@triton.jit
def forward(
    q, k, v, out, lse, meta, programs, entries, q_stride, k_stride, v_stride, tokens, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, PACK: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of one tile of queries. Grid: tiles x Hq / PACK, heads fastest.

    A tile has BLOCK_M / PACK tokens, each in PACK heads that share a key head: fewer tokens in a tile meet fewer keys
    in vain, while every key that is loaded still serves BLOCK_M rows.

    q: [T, Hq, D]. k, v: [T, Hk, D]. out: [T, Hq, D], 0 for queries that are invalid or see nothing. lse: [Hq, T]
    float32, inf for those, so that their weights come out as 0 in backward. Strides are elements per token; heads and
    dims are dense. scale: of the products, log2(e) included. meta, programs, entries: see `tile_plan`.
    """
    head = tl.program_id(0) % (HEADS // PACK) * PACK
    key_head = head // (HEADS // KEY_HEADS)
    first, end, full, partial, stop = load_program(programs, tl.program_id(0) // (HEADS // PACK))
    index, lane = tl.arange(0, BLOCK_M) // PACK, tl.arange(0, BLOCK_M) % PACK
    rows = first + index
    inside = rows < end
    turn_q, block_q, rule_q = load_queries(meta, tokens, rows, inside)
    query_at = row_of(q, first, q_stride, head, HEAD_DIM)
    query = load_rows(query_at, index * q_stride + lane * HEAD_DIM, inside, False, HEAD_DIM, PADDED_DIM)
    state = (
        tl.zeros((BLOCK_M, PADDED_DIM), tl.float32),
        tl.full((BLOCK_M,), float("-inf"), tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
    )
    state = attend_tiles(
        state, query, turn_q, block_q, rule_q, k, v, meta, entries, full, partial, k_stride, v_stride, tokens,
        scale, key_head, False, HEAD_DIM, PADDED_DIM, BLOCK_N,
    )  # fmt: skip
    acc, peak, total = attend_tiles(
        state, query, turn_q, block_q, rule_q, k, v, meta, entries, partial, stop, k_stride, v_stride, tokens,
        scale, key_head, True, HEAD_DIM, PADDED_DIM, BLOCK_N,
    )  # fmt: skip
    silent = total == 0.0
    divisor = tl.where(silent, 1.0, total)
    acc = tl.where(silent[:, None], 0.0, acc / divisor[:, None])
    out_at = row_of(out, first, HEADS * HEAD_DIM, head, HEAD_DIM)
    store_rows(out_at, index * (HEADS * HEAD_DIM) + lane * HEAD_DIM, inside, acc, HEAD_DIM, PADDED_DIM)
    log_sum = tl.where(silent, float("inf"), peak + tl.math.log2(divisor))
    tl.store(lse + (head + lane).to(tl.int64) * tokens + rows, log_sum, mask=inside)


@triton.jit
def query_gradient(
    q, k, v, out, grad_out, lse, grad_q, delta, meta, programs, entries, q_stride, k_stride, v_stride, tokens, scale,
    softmax_scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, PACK: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of queries, and sum(out * grad_out) of its rows. Grid and tiles as in `forward`.

    grad_out, grad_q: [T, Hq, D] dense. delta: [Hq, T] float32, read by `key_gradients`. softmax_scale: `scale` without
    log2(e). Others as in `forward`.
    """
    head = tl.program_id(0) % (HEADS // PACK) * PACK
    key_head = head // (HEADS // KEY_HEADS)
    first, end, full, partial, stop = load_program(programs, tl.program_id(0) // (HEADS // PACK))
    index, lane = tl.arange(0, BLOCK_M) // PACK, tl.arange(0, BLOCK_M) % PACK
    rows = first + index
    inside = rows < end
    turn_q, block_q, rule_q = load_queries(meta, tokens, rows, inside)
    dense = index * (HEADS * HEAD_DIM) + lane * HEAD_DIM
    grad_at = row_of(grad_out, first, HEADS * HEAD_DIM, head, HEAD_DIM)
    grad = load_rows(grad_at, dense, inside, False, HEAD_DIM, PADDED_DIM)
    out_at = row_of(out, first, HEADS * HEAD_DIM, head, HEAD_DIM)
    result = load_rows(out_at, dense, inside, False, HEAD_DIM, PADDED_DIM)
    row_delta = tl.sum(grad.to(tl.float32) * result.to(tl.float32), 1)
    per_row = (head + lane).to(tl.int64) * tokens + rows
    tl.store(delta + per_row, row_delta, mask=inside)
    log_sum = tl.load(lse + per_row, mask=inside, other=float("inf"))
    query_at = row_of(q, first, q_stride, head, HEAD_DIM)
    query = load_rows(query_at, index * q_stride + lane * HEAD_DIM, inside, False, HEAD_DIM, PADDED_DIM)
    acc = tl.zeros((BLOCK_M, PADDED_DIM), tl.float32)
    key_index = tl.arange(0, BLOCK_N)
    # One loop over both kinds of tiles: a sum that passes from one loop to another makes the products of Hopper wait
    # for each other, unless it changes between them as in `forward`.
    for at in range(full, stop):
        tile = tl.load(entries + 2 * at)
        key_rows = tile + key_index
        key_inside = key_rows < tl.load(entries + 2 * at + 1)
        key_at = row_of(k, tile, k_stride, key_head, HEAD_DIM)
        key = load_rows(key_at, key_index * k_stride, key_inside, False, HEAD_DIM, PADDED_DIM)
        value_at = row_of(v, tile, v_stride, key_head, HEAD_DIM)
        value = load_rows(value_at, key_index * v_stride, key_inside, False, HEAD_DIM, PADDED_DIM)
        turn_k, block_k, shift_k = load_keys(meta, tokens, key_rows, key_inside)
        weights = tl.math.exp2(tl.dot(query, key.T, input_precision="ieee") * scale - log_sum[:, None])
        if at >= partial:
            allowed = allowed_pairs(
                turn_q[:, None], block_q[:, None], rule_q[:, None], turn_k[None, :], block_k[None, :], shift_k[None, :]
            )
            weights = tl.where(allowed, weights, 0.0)
        change = weights * (tl.dot(grad, value.T, input_precision="ieee") - row_delta[:, None])
        acc = tl.dot(change.to(key.dtype), key, acc, input_precision="ieee")
    grad_at = row_of(grad_q, first, HEADS * HEAD_DIM, head, HEAD_DIM)
    store_rows(grad_at, dense, inside, acc * softmax_scale, HEAD_DIM, PADDED_DIM)


@triton.jit
def key_gradients(
    q, k, v, grad_out, lse, delta, grad_k, grad_v, meta, programs, entries, q_stride, k_stride, v_stride, tokens, scale,
    softmax_scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of keys and values, summed over the G query heads. Grid: tiles x Hk, heads fastest.

    grad_k, grad_v: [T, Hk, D] dense. programs, entries: of key tiles. Others as in `query_gradient`.
    """
    key_head = tl.program_id(0) % KEY_HEADS
    first, end, full, partial, stop = load_program(programs, tl.program_id(0) // KEY_HEADS)
    rows = first + tl.arange(0, BLOCK_N)
    inside = rows < end
    turn_k, block_k, shift_k = load_keys(meta, tokens, rows, inside)
    index = tl.arange(0, BLOCK_N)
    key_at = row_of(k, first, k_stride, key_head, HEAD_DIM)
    key = load_rows(key_at, index * k_stride, inside, False, HEAD_DIM, PADDED_DIM)
    value_at = row_of(v, first, v_stride, key_head, HEAD_DIM)
    value = load_rows(value_at, index * v_stride, inside, False, HEAD_DIM, PADDED_DIM)
    sum_k, sum_v = tl.zeros((BLOCK_N, PADDED_DIM), tl.float32), tl.zeros((BLOCK_N, PADDED_DIM), tl.float32)
    group: tl.constexpr = HEADS // KEY_HEADS
    query_index = tl.arange(0, BLOCK_M)
    # One loop over tiles and heads, so that the next head is loaded while this one is computed; and over both kinds of
    # tiles, as in `query_gradient`.
    for at in range(full * group, stop * group):
        entry = entries + at // group * 2
        tile = tl.load(entry)
        query_rows = tile + query_index
        query_inside = query_rows < tl.load(entry + 1)
        head = key_head * group + at % group
        query_at = row_of(q, tile, q_stride, head, HEAD_DIM)
        query = load_rows(query_at, query_index * q_stride, query_inside, False, HEAD_DIM, PADDED_DIM)
        grad_at = row_of(grad_out, tile, HEADS * HEAD_DIM, head, HEAD_DIM)
        grad = load_rows(grad_at, query_index * (HEADS * HEAD_DIM), query_inside, False, HEAD_DIM, PADDED_DIM)
        per_row = head.to(tl.int64) * tokens + query_rows
        log_sum = tl.load(lse + per_row, mask=query_inside, other=float("inf"))
        row_delta = tl.load(delta + per_row, mask=query_inside, other=0.0)
        turn_q, block_q, rule_q = load_queries(meta, tokens, query_rows, query_inside)
        weights = tl.math.exp2(tl.dot(key, query.T, input_precision="ieee") * scale - log_sum[None, :])
        if at >= partial * group:
            allowed = allowed_pairs(
                turn_q[None, :], block_q[None, :], rule_q[None, :], turn_k[:, None], block_k[:, None], shift_k[:, None]
            )
            weights = tl.where(allowed, weights, 0.0)
        sum_v = tl.dot(weights.to(grad.dtype), grad, sum_v, input_precision="ieee")
        change = weights * (tl.dot(value, grad.T, input_precision="ieee") - row_delta[None, :])
        sum_k = tl.dot(change.to(query.dtype), query, sum_k, input_precision="ieee")
    dense = index * (KEY_HEADS * HEAD_DIM)
    grad_at = row_of(grad_k, first, KEY_HEADS * HEAD_DIM, key_head, HEAD_DIM)
    store_rows(grad_at, dense, inside, sum_k * softmax_scale, HEAD_DIM, PADDED_DIM)
    grad_at = row_of(grad_v, first, KEY_HEADS * HEAD_DIM, key_head, HEAD_DIM)
    store_rows(grad_at, dense, inside, sum_v, HEAD_DIM, PADDED_DIM)
