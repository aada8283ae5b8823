"""Triton kernels of the routed experts' backward pass. Conventions and shape legend: see `kernel_forward`."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from lumina_ft.kernels.moe.kernel_dropout import column_hash, kept, row_hash
from lumina_ft.kernels.moe.kernel_forward import (
    add_low_rank,
    halves,
    load_block,
    row_pointers,
    store_block,
    tile_offsets,
    tile_rows,
)


@triton.jit
def add_dropped(
    acc, shrunk, a, hashes, first, local, expert, columns,
    INPUTS: tl.constexpr, RANK: tl.constexpr, RANK_COLUMNS: tl.constexpr, RANK_BLOCK: tl.constexpr,
    DROP_LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """acc + drop(shrunk A) for some columns. hashes: of the rows."""
    zero = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    term = add_low_rank(
        zero, shrunk, a, first, local, expert, columns, INPUTS, RANK, RANK_COLUMNS, RANK_BLOCK, True, BLOCK_N
    )
    return acc + tl.where(kept(hashes, column_hash(columns)[None, :], DROP_LIMIT), term, 0.0)


@triton.jit
def joined(left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The block that has these `halves`."""
    return tl.join(left, right).permute(0, 2, 1).reshape(BLOCK_M, BLOCK_N)


@triton.jit
def add_dropped_halves(
    acc, shrunk, a, hashes, first, local, expert, start,
    INPUTS: tl.constexpr, RANK: tl.constexpr, RANK_COLUMNS: tl.constexpr, RANK_BLOCK: tl.constexpr,
    DROP_LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`add_dropped` for the columns from `start` on, one half after the other."""
    half: tl.constexpr = BLOCK_N // 2
    columns = start + tl.arange(0, half)
    left, right = halves(acc, BLOCK_M, BLOCK_N)
    left = add_dropped(
        left, shrunk, a, hashes, first, local, expert, columns,
        INPUTS, RANK, RANK_COLUMNS, RANK_BLOCK, DROP_LIMIT, BLOCK_M, half,
    )  # fmt: skip
    right = add_dropped(
        right, shrunk, a, hashes, first, local, expert, columns + half,
        INPUTS, RANK, RANK_COLUMNS, RANK_BLOCK, DROP_LIMIT, BLOCK_M, half,
    )  # fmt: skip
    return joined(left, right, BLOCK_M, BLOCK_N)


@triton.jit
def add_input_low_rank(
    acc, shrunk, a, first, local, slots, expert, columns, keys,
    INPUTS: tl.constexpr, RANK: tl.constexpr, RANK_COLUMNS: tl.constexpr, RANK_BLOCK: tl.constexpr,
    DROP_LIMIT: tl.constexpr, STREAM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """acc + drop(shrunk A), what a projection's low-rank term adds to the gradient of its input."""
    if DROP_LIMIT > 0:
        # What is dropped is known only after the product, which needs registers of its own: a quarter at a time.
        half: tl.constexpr = BLOCK_N // 2
        hashes = row_hash(tl.load(keys + slots), STREAM)[:, None]
        start = tl.min(columns, axis=0)
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        left = add_dropped_halves(
            left, shrunk, a, hashes, first, local, expert, start,
            INPUTS, RANK, RANK_COLUMNS, RANK_BLOCK, DROP_LIMIT, BLOCK_M, half,
        )  # fmt: skip
        right = add_dropped_halves(
            right, shrunk, a, hashes, first, local, expert, start + half,
            INPUTS, RANK, RANK_COLUMNS, RANK_BLOCK, DROP_LIMIT, BLOCK_M, half,
        )  # fmt: skip
        acc = joined(left, right, BLOCK_M, BLOCK_N)
    else:
        acc = add_low_rank(
            acc, shrunk, a, first, local, expert, columns, INPUTS, RANK, RANK_COLUMNS, RANK_BLOCK, True, BLOCK_N
        )
    return acc


@triton.jit
def activation_grad(
    acc, factor, gate, up, gate_grad, up_grad, hidden, row, live, columns,
    WIDTH: tl.constexpr, NEED_INPUTS: tl.constexpr, NEED_HIDDEN: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Through factor * silu(gate) * up for some columns; acc is the gradient of that. See `hidden_grad`.

    gate, up: pointers to the tile's first row, which is `row` elements into the other buffers.

    Returns the sums over the columns of what belongs to the factors' gradients.
    """
    target = tile_offsets(columns, WIDTH, BLOCK_M)
    inside = live[:, None]
    if not WHOLE:
        inside = inside & (columns < WIDTH)[None, :]
    gate_value = tl.load(gate + target, mask=inside, other=0.0).to(tl.float32)
    up_value = tl.load(up + target, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate_value)
    silu = gate_value * sigmoid
    if NEED_HIDDEN:
        store_block(hidden + row + target, silu * up_value * factor, live, columns, WIDTH, WHOLE)
    part = tl.sum(acc * silu * up_value, axis=1)
    if NEED_INPUTS:
        acc *= factor
        store_block(up_grad + row + target, acc * silu, live, columns, WIDTH, WHOLE)
        slope = sigmoid * (1.0 + gate_value * (1.0 - sigmoid))
        store_block(gate_grad + row + target, acc * up_value * slope, live, columns, WIDTH, WHOLE)
    return part


@triton.jit
def hidden_grad(
    grad, matrix, shrunk, a, gate, up, weight, keys, order, offsets, tile_expert, tile_row,
    gate_grad, up_grad, hidden, weight_parts, num_rows,
    ORDERED: tl.constexpr, SLOTS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    RANK: tl.constexpr, RANK_COLUMNS: tl.constexpr, RANK_BLOCK: tl.constexpr,
    DROP_LIMIT: tl.constexpr, STREAM: tl.constexpr,
    NEED_INPUTS: tl.constexpr, NEED_HIDDEN: tl.constexpr, NEED_WEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradient of the hidden layer, and through the gated activation and the routing weight in the same program.

    grad: [T or N, H], of the output. matrix: [E, H, I], down. shrunk: [N, C], the gradient times down's B.
    gate, up: [N, I], saved. gate_grad, up_grad: [N, I], written if NEED_INPUTS. hidden: [N, I], the weighted hidden
    layer again, if NEED_HIDDEN. weight_parts: [column blocks, N] float32, parts of the routing weights' gradients, if
    NEED_WEIGHT.
    """
    blocks: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    end = tl.load(offsets + expert)
    first = tl.load(tile_row + tile)
    live, local, slots = tile_rows(first, end, order, ORDERED, BLOCK_M)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    left_block = row_pointers(grad, first, local, slots, HIDDEN, SLOTS, ORDERED) + inner[None, :]
    right_block = matrix + expert.to(tl.int64) * HIDDEN * WIDTH + inner[:, None] * WIDTH + columns[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    whole_k: tl.constexpr = HIDDEN % BLOCK_K == 0
    whole_n: tl.constexpr = WIDTH % BLOCK_N == 0
    for start in range(0, HIDDEN, BLOCK_K):
        inside = start + inner < HIDDEN
        left = load_block(left_block + start, inside[None, :], whole_k)
        mask = inside[:, None] & (columns < WIDTH)[None, :]
        right = load_block(right_block + start * WIDTH, mask, whole_k and whole_n)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    if RANK > 0:
        acc = add_input_low_rank(
            acc, shrunk, a, first, local, slots, expert, columns, keys,
            WIDTH, RANK, RANK_COLUMNS, RANK_BLOCK, DROP_LIMIT, STREAM, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    half: tl.constexpr = BLOCK_N // 2
    left, right = halves(acc, BLOCK_M, BLOCK_N)
    row = first.to(tl.int64) * WIDTH
    factor = tl.load(weight + slots)[:, None]
    part = tl.zeros((BLOCK_M,), tl.float32)
    for side in tl.static_range(2):
        part += activation_grad(
            left if side == 0 else right, factor, gate + row, up + row, gate_grad, up_grad, hidden, row, live,
            block * BLOCK_N + side * half + tl.arange(0, half), WIDTH, NEED_INPUTS, NEED_HIDDEN, whole_n, BLOCK_M,
        )  # fmt: skip
    if NEED_WEIGHT:
        tl.store(weight_parts + block.to(tl.int64) * num_rows + first + tl.arange(0, BLOCK_M), part, mask=live)


@triton.jit
def input_grad(
    gate_grad, up_grad, gate_matrix, up_matrix, gate_shrunk, gate_a, up_shrunk, up_a, keys, order,
    offsets, tile_expert, tile_row, out,
    ORDERED: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    GATE_RANK: tl.constexpr, GATE_RANK_COLUMNS: tl.constexpr, GATE_RANK_BLOCK: tl.constexpr,
    GATE_DROP_LIMIT: tl.constexpr, GATE_STREAM: tl.constexpr,
    UP_RANK: tl.constexpr, UP_RANK_COLUMNS: tl.constexpr, UP_RANK_BLOCK: tl.constexpr,
    UP_DROP_LIMIT: tl.constexpr, UP_STREAM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[row], gradient of the row's input: gate_grad[row] gate + up_grad[row] up, both in one loop.

    gate_grad, up_grad: [N, I]. gate_matrix, up_matrix: [E, I, H]. gate_shrunk, up_shrunk: [N, C]. out: [N, H].
    """
    blocks: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // blocks
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    end = tl.load(offsets + expert)
    first = tl.load(tile_row + tile)
    live, local, slots = tile_rows(first, end, order, ORDERED, BLOCK_M)
    columns = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    gate_block = row_pointers(gate_grad, first, local, None, WIDTH, 1, False) + inner[None, :]
    up_block = row_pointers(up_grad, first, local, None, WIDTH, 1, False) + inner[None, :]
    right = expert.to(tl.int64) * WIDTH * HIDDEN + inner[:, None] * HIDDEN + columns[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    whole_k: tl.constexpr = WIDTH % BLOCK_K == 0
    whole: tl.constexpr = whole_k and HIDDEN % BLOCK_N == 0
    for start in range(0, WIDTH, BLOCK_K):
        inside = start + inner < WIDTH
        mask = inside[:, None] & (columns < HIDDEN)[None, :]
        gate_left = load_block(gate_block + start, inside[None, :], whole_k)
        gate_right = load_block(gate_matrix + right + start * HIDDEN, mask, whole)
        acc = tl.dot(gate_left, gate_right, acc, input_precision="ieee")
        up_left = load_block(up_block + start, inside[None, :], whole_k)
        up_right = load_block(up_matrix + right + start * HIDDEN, mask, whole)
        acc = tl.dot(up_left, up_right, acc, input_precision="ieee")
    if GATE_RANK > 0:
        acc = add_input_low_rank(
            acc, gate_shrunk, gate_a, first, local, slots, expert, columns, keys,
            HIDDEN, GATE_RANK, GATE_RANK_COLUMNS, GATE_RANK_BLOCK, GATE_DROP_LIMIT, GATE_STREAM, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    if UP_RANK > 0:
        acc = add_input_low_rank(
            acc, up_shrunk, up_a, first, local, slots, expert, columns, keys,
            HIDDEN, UP_RANK, UP_RANK_COLUMNS, UP_RANK_BLOCK, UP_DROP_LIMIT, UP_STREAM, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    target = out + first.to(tl.int64) * HIDDEN + tile_offsets(columns, HIDDEN, BLOCK_M)
    store_block(target, acc, live, columns, HIDDEN, HIDDEN % BLOCK_N == 0)


@triton.jit
def source_rows(rows, live, order, GATHER: tl.constexpr, SLOTS: tl.constexpr):
    """Rows of a buffer that belong to sorted rows: tokens if GATHER, else the rows themselves."""
    if GATHER:
        source = tl.load(order + rows, mask=live, other=0) // SLOTS
    else:
        source = rows
    return source.to(tl.int64)


@triton.jit
def weight_grad(
    left, right, order, offsets, out,
    LEFT_GATHER: tl.constexpr, RIGHT_GATHER: tl.constexpr, SLOTS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[expert] = left^T right over the expert's rows; zero if it has none.

    left: [T or N, OUTPUTS]. right: [T or N, INPUTS]. out: [E, OUTPUTS, INPUTS].
    """
    expert = tl.program_id(1)
    blocks: tl.constexpr = (INPUTS + BLOCK_N - 1) // BLOCK_N
    outputs = tl.program_id(0) // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    inputs = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, end, BLOCK_K):
        rows = start + tl.arange(0, BLOCK_K)
        live = rows < end
        left_rows = source_rows(rows, live, order, LEFT_GATHER, SLOTS)
        right_rows = source_rows(rows, live, order, RIGHT_GATHER, SLOTS)
        left_mask, right_mask = live[:, None], live[:, None]
        if OUTPUTS % BLOCK_M != 0:
            left_mask = left_mask & (outputs < OUTPUTS)[None, :]
        if INPUTS % BLOCK_N != 0:
            right_mask = right_mask & (inputs < INPUTS)[None, :]
        left_block = tl.load(left + left_rows[:, None] * OUTPUTS + outputs[None, :], mask=left_mask, other=0.0)
        right_block = tl.load(right + right_rows[:, None] * INPUTS + inputs[None, :], mask=right_mask, other=0.0)
        acc = tl.dot(left_block.T, right_block, acc, input_precision="ieee")
    target = out + expert.to(tl.int64) * OUTPUTS * INPUTS + outputs[:, None] * INPUTS + inputs[None, :]
    store_block(target, acc, outputs < OUTPUTS, inputs, INPUTS, INPUTS % BLOCK_N == 0)


@triton.jit
def rank_grad(
    wide, shrunk, keys, order, offsets, out,
    ORDERED: tl.constexpr, GATHER: tl.constexpr, SLOTS: tl.constexpr, FEATURES: tl.constexpr,
    RANK: tl.constexpr, RANK_COLUMNS: tl.constexpr, RANK_BLOCK: tl.constexpr, RANK_ROWS: tl.constexpr,
    TRANSPOSED: tl.constexpr, DROP_LIMIT: tl.constexpr, STREAM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[expert] = shrunk^T drop(wide) over the expert's rows; zero if it has none.

    The dropped operand is the right one, which Hopper's matrix units read from shared memory: from registers, where
    dropping leaves it, they would wait for each other. Their left one has at least 64 rows: RANK_ROWS, of which
    RANK_BLOCK are used.

    wide: [T, FEATURES] if GATHER, else [N, FEATURES]. shrunk: [N, C]. out: [E, r, FEATURES], or [E, FEATURES, r] if
    TRANSPOSED.
    """
    expert = tl.program_id(1)
    blocks: tl.constexpr = RANK_COLUMNS // RANK_BLOCK
    features = tl.program_id(0) // blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.arange(0, RANK_ROWS)
    rank = tl.program_id(0) % blocks * RANK_BLOCK + part
    first = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    acc = tl.zeros((RANK_ROWS, BLOCK_N), tl.float32)
    for start in range(first, end, BLOCK_K):
        rows = start + tl.arange(0, BLOCK_K)
        live = rows < end
        mask = live[:, None]
        if FEATURES % BLOCK_N != 0:
            mask = mask & (features < FEATURES)[None, :]
        wide_rows = source_rows(rows, live, order, GATHER, SLOTS)
        right = tl.load(wide + wide_rows[:, None] * FEATURES + features[None, :], mask=mask, other=0.0)
        if DROP_LIMIT > 0:
            slots = source_rows(rows, live, order, ORDERED, 1)
            hashes = row_hash(tl.load(keys + slots, mask=live, other=0), STREAM)
            right = tl.where(kept(hashes[:, None], column_hash(features)[None, :], DROP_LIMIT), right, 0.0)
        narrow = shrunk + rows.to(tl.int64)[:, None] * RANK_COLUMNS + rank[None, :]
        left = tl.load(narrow, mask=live[:, None] & (part < RANK_BLOCK)[None, :], other=0.0)
        acc = tl.dot(left.T, right, acc, input_precision="ieee")
    base = out + expert.to(tl.int64) * FEATURES * RANK
    if TRANSPOSED:
        target = base + features[None, :] * RANK + rank[:, None]
    else:
        target = base + rank[:, None] * FEATURES + features[None, :]
    store_block(target, acc, (part < RANK_BLOCK) & (rank < RANK), features, FEATURES, FEATURES % BLOCK_N == 0)
