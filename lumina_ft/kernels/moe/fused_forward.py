"""Forward pass of routed experts as a few Triton launches (M5).

Shape legend: T tokens, H hidden, I expert width, E experts, K chosen experts per token, N = T * K sorted rows, r rank,
C = r rounded up. A slot is a flat index into [T, K].

The body reads no tensor value on the host and runs on meta tensors under `launch.record_launches`.
"""

from typing import NamedTuple

from torch import Tensor

from lumina_ft.kernels.launch import launch, tile_for
from lumina_ft.kernels.moe.dropout import drop_limit
from lumina_ft.kernels.moe.weights import Experts, Lora
from lumina_ft.kernels.tiles import Tile

RANK_BLOCK = 64
"""Ranks above this are computed in parts of as many columns, which keeps accumulators in registers."""


class RoutedRows(NamedTuple):
    """Which expert and which routing weight each sorted row has.

    Attributes:
        offsets: [E] int32 ends of the experts' rows.
        weight: [N] float32 by slot.
        keys: [N] int64 by slot, see `moe.dropout`; None: nothing is dropped.
        order: [N] int64 slot of each sorted row; None: inputs are sorted rows already, and slots are rows.
        inverse: [T, K] int64 sorted row of each slot; None as `order` is.
    """

    offsets: Tensor
    weight: Tensor
    keys: Tensor | None
    order: Tensor | None
    inverse: Tensor | None

    @property
    def slots(self) -> int:
        """K; 1 for rows that are sorted already."""
        return 1 if self.inverse is None else self.inverse.shape[1]


class ForwardResult(NamedTuple):
    """Attributes:
    out: [T, H], or [N, H] for rows that are sorted already.
    gate, up: [N, I], without the routing weight; without elements unless they are to be saved.
    gate_shrunk, up_shrunk, down_shrunk: [N, C] scaled A drop(x); without elements if the projection has no adapter.
    """

    out: Tensor
    gate: Tensor
    up: Tensor
    gate_shrunk: Tensor
    up_shrunk: Tensor
    down_shrunk: Tensor


class Tiles:
    """Lists of row tiles of one pass, one for each tile height that its kernels use.

    Args:
        rows: of the pass.
    """

    def __init__(self, rows: RoutedRows) -> None:
        self.rows = rows
        self._lists: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, height: int) -> tuple[Tensor, Tensor]:
        """([tiles] int32 experts, [tiles] int32 first rows) in order; expert -1 after the last tile.

        Their number is a bound known without reading the offsets: each expert has at most one ragged tile.

        Args:
            height: rows of a tile.
        """
        if height not in self._lists:
            self._lists[height] = self._make(height)
        return self._lists[height]

    def _make(self, height: int) -> tuple[Tensor, Tensor]:
        from lumina_ft.kernels.moe import kernel_forward as kernels

        offsets, count = self.rows.offsets, self.rows.weight.numel()
        experts = offsets.numel()
        bound = count // height + min(experts, count)
        expert, row = offsets.new_empty(bound), offsets.new_empty(bound)
        constants = {"EXPERTS": experts, "EXPERTS_PADDED": next_power_of_2(experts), "TILE_ROWS": height}
        tile = tile_for("moe_tiles", "int32", offsets.device)
        grid = (experts + 1 if bound else 0,)
        args = (offsets, expert, row, bound)
        launch("moe_tiles", "int32", kernels.list_tiles, grid, tile, args, constants)
        return expert, row


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, which is positive."""
    return 1 << (n - 1).bit_length()


def rank_sizes(rank: int) -> tuple[int, int]:
    """(columns of a buffer for this rank, columns computed at a time); matrix units take no fewer than 16."""
    block = min(max(16, next_power_of_2(rank)), RANK_BLOCK)
    return -(-rank // block) * block, block


def rank_constants(prefix: str, lora: Lora | None) -> dict[str, int]:
    """The constants by which kernels know a low-rank term; rank 0 is none.

    Args:
        prefix: of the constants' names.
    """
    rank = 0 if lora is None else lora.a.shape[1]
    columns, block = rank_sizes(rank) if rank else (16, 16)
    return {f"{prefix}RANK": rank, f"{prefix}RANK_COLUMNS": columns, f"{prefix}RANK_BLOCK": block}


def dropout_constants(prefix: str, lora: Lora | None, keys: Tensor | None) -> dict[str, int]:
    """The constants by which kernels know a term's dropout; limit 0 is none. Args as `rank_constants`."""
    if lora is None or keys is None:
        return {f"{prefix}DROP_LIMIT": 0, f"{prefix}STREAM": 0}
    return {f"{prefix}DROP_LIMIT": drop_limit(lora.dropout), f"{prefix}STREAM": lora.stream}


def effective_scale(lora: Lora, keys: Tensor | None) -> float:
    """Factor of B A drop(x): dropped inputs are made up for by scaling the others."""
    return lora.scale if keys is None else lora.scale / (1.0 - lora.dropout)


def dtype_name(x: Tensor) -> str:
    """Name under which tiles for this dtype are listed."""
    return str(x.dtype).removeprefix("torch.")


def blocks_of(size: int, tile: Tile, name: str) -> int:
    """How many blocks cover a size."""
    return -(-size // tile.blocks[name])


def shrink(x: Tensor, rows: RoutedRows, tiles: Tiles, lora: Lora, *, gather: bool, backward: bool = False) -> Tensor:
    """scale A drop(x), or in backward scale x B: rows times a narrow matrix of a low-rank term.

    Args:
        x: [T, inputs] if `gather`, else [N, inputs].

    Returns:
        [N, C] in the dtype of x.
    """
    from lumina_ft.kernels.moe import kernel_forward as kernels

    matrix = lora.b if backward else lora.a
    constants = {
        "ORDERED": rows.order is not None,
        "GATHER": gather and rows.order is not None,
        "SLOTS": rows.slots,
        "INPUTS": x.shape[1],
        "TRANSPOSED": backward,
        **rank_constants("", lora),
        **dropout_constants("", None if backward else lora, rows.keys),
    }
    out = x.new_empty(rows.weight.numel(), constants["RANK_COLUMNS"])
    tile = tile_for("moe_shrink", dtype_name(x), x.device)
    lists = tiles.of(tile.blocks["BLOCK_M"])
    args = (x, matrix, rows.keys, rows.order, rows.offsets, *lists, out, effective_scale(lora, rows.keys))
    grid = (lists[0].numel() * (constants["RANK_COLUMNS"] // constants["RANK_BLOCK"]),)
    launch("moe_shrink", dtype_name(x), kernels.shrink, grid, tile, args, constants)
    return out


def combine_rows(values: Tensor, rows: RoutedRows) -> Tensor:
    """[N, H] sorted rows -> [T, H] sums over each token's slots, in float32 and in the order of the slots."""
    if rows.inverse is None:
        return values
    from lumina_ft.kernels.moe import kernel_forward as kernels

    tokens, hidden = rows.inverse.shape[0], values.shape[1]
    out = values.new_empty(tokens, hidden)
    tile = tile_for("moe_combine", dtype_name(values), values.device)
    grid = (tokens, blocks_of(hidden, tile, "BLOCK_N"))
    constants = {"SLOTS": rows.slots, "HIDDEN": hidden}
    launch("moe_combine", dtype_name(values), kernels.combine, grid, tile, (values, rows.inverse, out), constants)
    return out


def forward_pass(x: Tensor, rows: RoutedRows, experts: Experts, *, save: bool) -> ForwardResult:
    """Weighted outputs of the experts.

    Args:
        x: [T, H], or [N, H] sorted rows if `rows` has no order.
        experts: of this rank.
        save: keep what backward needs.
    """
    tiles = Tiles(rows)

    def shrunk(value: Tensor, lora: Lora | None, *, gather: bool) -> Tensor:
        return x.new_empty(0) if lora is None else shrink(value, rows, tiles, lora, gather=gather)

    gate_shrunk = shrunk(x, experts.gate.lora, gather=True)
    up_shrunk = shrunk(x, experts.up.lora, gather=True)
    gate, up, hidden = _gate_up(x, rows, experts, tiles, (gate_shrunk, up_shrunk), save=save)
    down_shrunk = shrunk(hidden, experts.down.lora, gather=False)
    out = combine_rows(_down(hidden, rows, experts, tiles, down_shrunk), rows)
    return ForwardResult(out, gate, up, gate_shrunk, up_shrunk, down_shrunk)


def _gate_up(
    x: Tensor, rows: RoutedRows, experts: Experts, tiles: Tiles, shrunk: tuple[Tensor, Tensor], *, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(gate, up, weighted hidden), each [N, I]; the first two without elements unless `save`."""
    from lumina_ft.kernels.moe import kernel_forward as kernels

    width, hidden_size = experts.gate.weight.shape[1:]
    count, variant = rows.weight.numel(), dtype_name(x)
    hidden = x.new_empty(count, width)
    gate, up = (x.new_empty(count if save else 0, width) for _ in range(2))
    tile = tile_for("moe_gate_up", variant, x.device)
    lists = tiles.of(tile.blocks["BLOCK_M"])
    low_rank = [
        tensor
        for projection, left in zip(experts[:2], shrunk, strict=True)
        for tensor in ((None, None) if projection.lora is None else (left, projection.lora.b))
    ]
    args = (
        *(x, experts.gate.weight, experts.up.weight, *low_rank, rows.weight, rows.order, rows.offsets, *lists),
        *((gate, up) if save else (None, None)),
        hidden,
    )
    constants = {
        "ORDERED": rows.order is not None,
        "SLOTS": rows.slots,
        "HIDDEN": hidden_size,
        "WIDTH": width,
        "SAVE": save,
        **rank_constants("GATE_", experts.gate.lora),
        **rank_constants("UP_", experts.up.lora),
    }
    grid = (lists[0].numel() * blocks_of(width, tile, "BLOCK_N"),)
    launch("moe_gate_up", variant, kernels.gate_up, grid, tile, args, constants)
    return gate, up, hidden


def _down(hidden: Tensor, rows: RoutedRows, experts: Experts, tiles: Tiles, shrunk: Tensor) -> Tensor:
    """[N, I] weighted hidden -> [N, H]."""
    from lumina_ft.kernels.moe import kernel_forward as kernels

    matrix, lora = experts.down
    hidden_size, width = matrix.shape[1:]
    variant = dtype_name(hidden)
    out = hidden.new_empty(hidden.shape[0], hidden_size)
    tile = tile_for("moe_down", variant, hidden.device)
    lists = tiles.of(tile.blocks["BLOCK_M"])
    low_rank = (None, None) if lora is None else (shrunk, lora.b)
    constants = {"HIDDEN": hidden_size, "WIDTH": width, **rank_constants("", lora)}
    args = (hidden, matrix, *low_rank, rows.offsets, *lists, out)
    grid = (lists[0].numel() * blocks_of(hidden_size, tile, "BLOCK_N"),)
    launch("moe_down", variant, kernels.down, grid, tile, args, constants)
    return out
