"""Triton kernels of the routed experts' forward pass; the backward pass uses the shrink and the combination too.

Shape legend: N rows sorted by expert, T tokens, H hidden, I expert width, E experts, r rank, C = r rounded up.

One program has one tile of rows, all of one expert, and one block of columns; programs of the same expert follow each
other, so that its weights and rows are read from L2. Rows are gathered by their slot (flat index into [T, K]) while a
product runs, never copied. A ragged tile repeats the expert's last row instead of masking each load: what it computes
there is not stored. Offsets of rows and of experts' matrices are int64: 256 experts exceed int32.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from lumina_ft.kernels.moe.kernel_dropout import column_hash, kept, row_hash


@triton.jit
def load_block(pointers, mask, WHOLE: tl.constexpr):
    """Load where `mask`, zeros elsewhere; without a mask where sizes divide."""
    if WHOLE:
        block = tl.load(pointers)
    else:
        block = tl.load(pointers, mask=mask, other=0.0)
    return block


@triton.jit
def store_block(pointers, block, live, columns, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):
    """Store the rows that are live and the columns that exist, rounded to the buffer's dtype. WHOLE: all exist."""
    mask = live[:, None]
    if not WHOLE:
        mask = mask & (columns < COLUMNS)[None, :]
    tl.store(pointers, block.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def tile_rows(first, end, order, ORDERED: tl.constexpr, BLOCK_M: tl.constexpr):
    """(which rows of a tile are its expert's, rows to read counted from the tile's first, their slots)."""
    local = tl.arange(0, BLOCK_M)
    live = first + local < end
    local = tl.minimum(local, end - 1 - first)
    if ORDERED:
        slots = tl.load(order + first + local)
    else:
        slots = first + local
    return live, local, slots


@triton.jit
def row_pointers(buffer, first, local, slots, COLUMNS: tl.constexpr, SLOTS: tl.constexpr, GATHER: tl.constexpr):
    """[BLOCK_M, 1] pointers to rows: those of the slots' tokens if GATHER, else the tile's own.

    Rows of a tile follow each other: one int64 for all, and int32 inside the tile, take half of the registers.
    """
    if GATHER:
        pointers = buffer + (slots // SLOTS).to(tl.int64)[:, None] * COLUMNS
    else:
        pointers = buffer + first.to(tl.int64) * COLUMNS + local[:, None] * COLUMNS
    return pointers


@triton.jit
def tile_offsets(columns, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr):
    """int32 offsets of a block from its tile's first row."""
    return tl.arange(0, BLOCK_M)[:, None] * COLUMNS + columns[None, :]


@triton.jit
def halves(block, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Left and right columns of a block. A whole epilogue at once doesn't fit in registers."""
    return block.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()


@triton.jit
def add_low_rank(
    acc, shrunk, matrix, first, local, expert, columns,
    OUTPUTS: tl.constexpr, RANK: tl.constexpr, RANK_COLUMNS: tl.constexpr, RANK_BLOCK: tl.constexpr,
    TRANSPOSED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """acc + shrunk M^T of a tile's rows and its expert's M [OUTPUTS, RANK], stored as [RANK, OUTPUTS] if TRANSPOSED."""
    base = matrix + expert.to(tl.int64) * OUTPUTS * RANK
    for start in tl.static_range(0, RANK_COLUMNS, RANK_BLOCK):
        rank = start + tl.arange(0, RANK_BLOCK)
        left = tl.load(row_pointers(shrunk, first, local, None, RANK_COLUMNS, 1, False) + rank[None, :])
        whole: tl.constexpr = (OUTPUTS % BLOCK_N == 0) and (RANK == RANK_COLUMNS)
        if TRANSPOSED:
            mask = (rank < RANK)[:, None] & (columns < OUTPUTS)[None, :]
            right = load_block(base + rank[:, None] * OUTPUTS + columns[None, :], mask, whole)
        else:
            mask = (columns < OUTPUTS)[:, None] & (rank < RANK)[None, :]
            right = load_block(base + columns[:, None] * RANK + rank[None, :], mask, whole).T
        acc = tl.dot(left, right, acc, input_precision="ieee")
    return acc


@triton.jit
def list_tiles(
    offsets, tile_expert, tile_row, bound,
    EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Expert and first row of every tile; -1 after the last. One program an expert, and one for the rest of the list.

    offsets: [E] int32 ends of the experts' rows. tile_expert, tile_row: [bound] int32.
    """
    expert = tl.program_id(0)
    index = tl.arange(0, EXPERTS_PADDED)
    ends = tl.load(offsets + index, mask=index < EXPERTS, other=0)
    starts = tl.load(offsets + index - 1, mask=(index > 0) & (index < EXPERTS), other=0)
    tiles = tl.cdiv(ends - starts, TILE_ROWS)
    first = tl.sum(tl.where(index < expert, tiles, 0))
    row = tl.sum(tl.where(index == expert, starts, 0))
    count = tl.sum(tl.where(index == expert, tiles, 0))
    label = expert
    if expert == EXPERTS:
        count = bound - first
        label = -1
    for start in range(0, count, BLOCK_T):
        step = start + tl.arange(0, BLOCK_T)
        tl.store(tile_expert + first + step, tl.zeros_like(step) + label, mask=step < count)
        tl.store(tile_row + first + step, row + step * TILE_ROWS, mask=step < count)


@triton.jit
def shrink(
    x, matrix, keys, order, offsets, tile_expert, tile_row, out, scale,
    ORDERED: tl.constexpr, GATHER: tl.constexpr, SLOTS: tl.constexpr, INPUTS: tl.constexpr,
    RANK: tl.constexpr, RANK_COLUMNS: tl.constexpr, RANK_BLOCK: tl.constexpr,
    TRANSPOSED: tl.constexpr, DROP_LIMIT: tl.constexpr, STREAM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[row] = scale * M drop(x[row]) for the expert's M: [r, INPUTS], or [INPUTS, r] as stored if TRANSPOSED.

    x: [T, INPUTS] if GATHER, else [N, INPUTS]. out: [N, C], zero from column r on.
    """
    blocks: tl.constexpr = RANK_COLUMNS // RANK_BLOCK
    tile = tl.program_id(0) // blocks
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    end = tl.load(offsets + expert)
    first = tl.load(tile_row + tile)
    live, local, slots = tile_rows(first, end, order, ORDERED, BLOCK_M)
    rank = tl.program_id(0) % blocks * RANK_BLOCK + tl.arange(0, RANK_BLOCK)
    inner = tl.arange(0, BLOCK_K)
    x_block = row_pointers(x, first, local, slots, INPUTS, SLOTS, GATHER) + inner[None, :]
    base = matrix + expert.to(tl.int64) * INPUTS * RANK
    if DROP_LIMIT > 0:
        hashes = row_hash(tl.load(keys + slots), STREAM)
    acc = tl.zeros((BLOCK_M, RANK_BLOCK), tl.float32)
    whole: tl.constexpr = INPUTS % BLOCK_K == 0
    for start in range(0, INPUTS, BLOCK_K):
        column = start + inner
        left = load_block(x_block + start, (column < INPUTS)[None, :], whole)
        if DROP_LIMIT > 0:
            left = tl.where(kept(hashes[:, None], column_hash(column)[None, :], DROP_LIMIT), left, 0.0)
        mask = (column < INPUTS)[:, None] & (rank < RANK)[None, :]
        if TRANSPOSED:
            right = base + column[:, None] * RANK + rank[None, :]
        else:
            right = base + rank[None, :] * INPUTS + column[:, None]
        acc = tl.dot(left, load_block(right, mask, whole and RANK == RANK_COLUMNS), acc, input_precision="ieee")
    target = out + first.to(tl.int64) * RANK_COLUMNS + tile_offsets(rank, RANK_COLUMNS, BLOCK_M)
    store_block(target, acc * scale, live, rank, RANK_COLUMNS, True)


@triton.jit
def activation(
    gate_acc, up_acc, factor, gate, up, hidden, row, live, columns,
    WIDTH: tl.constexpr, SAVE: tl.constexpr, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """factor * silu(gate) * up for some columns of a tile, whose first row is `row` elements into the buffers."""
    target = tile_offsets(columns, WIDTH, BLOCK_M)
    value = gate_acc * tl.sigmoid(gate_acc) * up_acc * factor
    if SAVE:
        store_block(gate + row + target, gate_acc, live, columns, WIDTH, WHOLE)
        store_block(up + row + target, up_acc, live, columns, WIDTH, WHOLE)
    store_block(hidden + row + target, value, live, columns, WIDTH, WHOLE)


@triton.jit
def gate_up(
    x, gate_matrix, up_matrix, gate_shrunk, gate_b, up_shrunk, up_b, weight, order, offsets, tile_expert, tile_row,
    gate, up, hidden,
    ORDERED: tl.constexpr, SLOTS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, SAVE: tl.constexpr,
    GATE_RANK: tl.constexpr, GATE_RANK_COLUMNS: tl.constexpr, GATE_RANK_BLOCK: tl.constexpr,
    UP_RANK: tl.constexpr, UP_RANK_COLUMNS: tl.constexpr, UP_RANK_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """hidden[row] = weight * silu(gate x[row]) * up x[row]; gate and up are stored too if SAVE.

    x: [T or N, H]. gate_matrix, up_matrix: [E, I, H]. weight: [N] float32 by slot. gate, up, hidden: [N, I].
    """
    blocks: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // blocks
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    end = tl.load(offsets + expert)
    first = tl.load(tile_row + tile)
    live, local, slots = tile_rows(first, end, order, ORDERED, BLOCK_M)
    columns = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    x_block = row_pointers(x, first, local, slots, HIDDEN, SLOTS, ORDERED) + inner[None, :]
    base = expert.to(tl.int64) * WIDTH * HIDDEN
    offset = columns[:, None] * HIDDEN + inner[None, :]
    gate_matrix, up_matrix = gate_matrix + base, up_matrix + base
    gate_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    whole_k: tl.constexpr = HIDDEN % BLOCK_K == 0
    whole: tl.constexpr = whole_k and WIDTH % BLOCK_N == 0
    for start in range(0, HIDDEN, BLOCK_K):
        inside = (start + inner < HIDDEN)[None, :]
        mask = (columns < WIDTH)[:, None] & inside
        left = load_block(x_block + start, inside, whole_k)
        gate_right = load_block(gate_matrix + start + offset, mask, whole)
        up_right = load_block(up_matrix + start + offset, mask, whole)
        gate_acc = tl.dot(left, gate_right.T, gate_acc, input_precision="ieee")
        up_acc = tl.dot(left, up_right.T, up_acc, input_precision="ieee")
    if GATE_RANK > 0:
        gate_acc = add_low_rank(
            gate_acc, gate_shrunk, gate_b, first, local, expert, columns,
            WIDTH, GATE_RANK, GATE_RANK_COLUMNS, GATE_RANK_BLOCK, False, BLOCK_N,
        )  # fmt: skip
    if UP_RANK > 0:
        up_acc = add_low_rank(
            up_acc, up_shrunk, up_b, first, local, expert, columns,
            WIDTH, UP_RANK, UP_RANK_COLUMNS, UP_RANK_BLOCK, False, BLOCK_N,
        )  # fmt: skip
    gate_left, gate_right = halves(gate_acc, BLOCK_M, BLOCK_N)
    up_left, up_right = halves(up_acc, BLOCK_M, BLOCK_N)
    row = first.to(tl.int64) * WIDTH
    factor = tl.load(weight + slots)[:, None]
    for side in tl.static_range(2):
        activation(
            gate_left if side == 0 else gate_right, up_left if side == 0 else up_right, factor,
            gate, up, hidden, row, live,
            tl.program_id(0) % blocks * BLOCK_N + side * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2),
            WIDTH, SAVE, WIDTH % BLOCK_N == 0, BLOCK_M,
        )  # fmt: skip


@triton.jit
def down(
    hidden, matrix, shrunk, b, offsets, tile_expert, tile_row, out,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    RANK: tl.constexpr, RANK_COLUMNS: tl.constexpr, RANK_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[row] = down hidden[row]. hidden: [N, I]. matrix: [E, H, I]. out: [N, H]."""
    blocks: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // blocks
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    end = tl.load(offsets + expert)
    first = tl.load(tile_row + tile)
    live, local, _ = tile_rows(first, end, None, False, BLOCK_M)
    columns = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    left_block = row_pointers(hidden, first, local, None, WIDTH, 1, False) + inner[None, :]
    right_block = matrix + expert.to(tl.int64) * HIDDEN * WIDTH + columns[:, None] * WIDTH + inner[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    whole_k: tl.constexpr = WIDTH % BLOCK_K == 0
    for start in range(0, WIDTH, BLOCK_K):
        inside = (start + inner < WIDTH)[None, :]
        left = load_block(left_block + start, inside, whole_k)
        mask = (columns < HIDDEN)[:, None] & inside
        right = load_block(right_block + start, mask, whole_k and HIDDEN % BLOCK_N == 0)
        acc = tl.dot(left, right.T, acc, input_precision="ieee")
    if RANK > 0:
        acc = add_low_rank(
            acc, shrunk, b, first, local, expert, columns, HIDDEN, RANK, RANK_COLUMNS, RANK_BLOCK, False, BLOCK_N
        )
    target = out + first.to(tl.int64) * HIDDEN + tile_offsets(columns, HIDDEN, BLOCK_M)
    store_block(target, acc, live, columns, HIDDEN, HIDDEN % BLOCK_N == 0)


@triton.jit
def combine(rows, inverse, out, SLOTS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_N: tl.constexpr):
    """out[token] = sum of the rows of its slots, in the order of the slots.

    rows: [N, H]. inverse: [T, K] int64, sorted row of each slot. out: [T, H].
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < HIDDEN
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for slot in tl.static_range(SLOTS):
        row = tl.load(inverse + token * SLOTS + slot).to(tl.int64)
        acc += load_block(rows + row * HIDDEN + columns, inside, HIDDEN % BLOCK_N == 0).to(tl.float32)
    tl.store(out + token * HIDDEN + columns, acc.to(out.dtype.element_ty), mask=inside)
