"""Backward pass of routed experts as a few Triton launches (M5). Shape legend: see `fused_forward`.

Only the gradients that are needed are computed. The weighted hidden layer isn't saved: where a gradient needs it, it is
computed again from the saved gate and up.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lumina_ft.kernels.launch import launch, tile_for
from lumina_ft.kernels.moe.fused_forward import (
    ForwardResult,
    RoutedRows,
    Tiles,
    blocks_of,
    combine_rows,
    dropout_constants,
    dtype_name,
    rank_constants,
    shrink,
)
from lumina_ft.kernels.moe.weights import Experts, Lora, Projection

MATRIX_UNIT_ROWS = 64
"""Of the left operand, on Hopper; `RANK_BLOCK` is no more."""


class Needs(NamedTuple):
    """Which gradients are needed: of the input, the routing weights, and each matrix."""

    x: bool
    weight: bool
    gate: bool
    up: bool
    down: bool
    gate_a: bool
    gate_b: bool
    up_a: bool
    up_b: bool
    down_a: bool
    down_b: bool


class Gradients(NamedTuple):
    """In the shapes of what they are gradients of; without elements where not needed."""

    x: Tensor
    weight: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    gate_a: Tensor
    gate_b: Tensor
    up_a: Tensor
    up_b: Tensor
    down_a: Tensor
    down_b: Tensor


class _Hidden(NamedTuple):
    """What comes from the gradient of the hidden layer; None where not needed.

    Attributes:
        gate, up: [N, I] gradients of the projections.
        hidden: [N, I] weighted hidden layer.
        weight: [N] float32 gradients of the routing weights, of sorted rows.
    """

    gate: Tensor | None = None
    up: Tensor | None = None
    hidden: Tensor | None = None
    weight: Tensor | None = None


class _Operand(NamedTuple):
    """[T, features] of tokens if `gather`, else [N, features] of sorted rows."""

    values: Tensor | None
    gather: bool


def backward_pass(
    grad: Tensor, x: Tensor, rows: RoutedRows, experts: Experts, forward: ForwardResult, needs: Needs
) -> Gradients:
    """Gradients of `forward_pass`.

    Args:
        grad: [T, H], or [N, H] for rows that are sorted already; contiguous.
        x, rows, experts: as given to `forward_pass`.
        forward: what it returned when told to save; its `out` is not read.
    """
    tiles = Tiles(rows)
    inner = any((needs.x, needs.gate, needs.up, needs.gate_a, needs.gate_b, needs.up_a, needs.up_b))
    recompute = needs.down or needs.down_a
    down_shrunk = None
    if experts.down.lora is not None and (inner or needs.weight or needs.down_a):
        down_shrunk = shrink(grad, rows, tiles, experts.down.lora, gather=True, backward=True)
    hidden = _Hidden()
    if inner or recompute or needs.weight:
        wanted = (inner, recompute, needs.weight)
        hidden = _hidden_grad(grad, rows, experts, tiles, forward, down_shrunk, wanted)
    gate_shrunk = _inner_shrunk(hidden.gate, experts.gate, rows, tiles, needs.x or needs.gate_a)
    up_shrunk = _inner_shrunk(hidden.up, experts.up, rows, tiles, needs.x or needs.up_a)
    inputs, outputs, middle = _Operand(x, True), _Operand(grad, True), _Operand(hidden.hidden, False)
    gate, gate_a, gate_b = _projection_grads(
        experts.gate, rows, _Operand(hidden.gate, False), inputs, forward.gate_shrunk, gate_shrunk,
        (needs.gate, needs.gate_a, needs.gate_b),
    )  # fmt: skip
    up, up_a, up_b = _projection_grads(
        experts.up, rows, _Operand(hidden.up, False), inputs, forward.up_shrunk, up_shrunk,
        (needs.up, needs.up_a, needs.up_b),
    )  # fmt: skip
    down, down_a, down_b = _projection_grads(
        experts.down, rows, outputs, middle, forward.down_shrunk, down_shrunk, (needs.down, needs.down_a, needs.down_b)
    )
    none = x.new_empty(0)
    grad_x = _input_grad(rows, experts, tiles, hidden, gate_shrunk, up_shrunk) if needs.x else none
    weight = rows.weight.new_empty(0)
    if hidden.weight is not None:
        weight = hidden.weight if rows.inverse is None else hidden.weight[rows.inverse.view(-1)]
    return Gradients(grad_x, weight, gate, up, down, gate_a, gate_b, up_a, up_b, down_a, down_b)


def _hidden_grad(
    grad: Tensor,
    rows: RoutedRows,
    experts: Experts,
    tiles: Tiles,
    forward: ForwardResult,
    shrunk: Tensor | None,
    wanted: tuple[bool, bool, bool],
) -> _Hidden:
    """Args:
    shrunk: [N, C] scaled grad B of the down projection, if it has an adapter.
    wanted: gradients of gate and up; hidden layer; gradients of the routing weights.
    """
    from lumina_ft.kernels.moe import kernel_backward as kernels

    matrix, lora = experts.down
    hidden_size, width = matrix.shape[1:]
    count, variant = rows.weight.numel(), dtype_name(grad)
    tile = tile_for("moe_hidden_grad", variant, grad.device)
    lists, blocks = tiles.of(tile.blocks["BLOCK_M"]), blocks_of(width, tile, "BLOCK_N")
    inner, recompute, weight = wanted
    gate_grad, up_grad = (grad.new_empty(count, width) if inner else None for _ in range(2))
    hidden = grad.new_empty(count, width) if recompute else None
    parts = rows.weight.new_empty(blocks, count) if weight else None
    args = (
        *(grad, matrix, shrunk, None if lora is None or shrunk is None else lora.a, forward.gate, forward.up),
        *(rows.weight, rows.keys, rows.order, rows.offsets, *lists, gate_grad, up_grad, hidden, parts, count),
    )
    constants = {
        "ORDERED": rows.order is not None,
        "SLOTS": rows.slots,
        "HIDDEN": hidden_size,
        "WIDTH": width,
        **rank_constants("", None if shrunk is None else lora),
        **dropout_constants("", lora, rows.keys),
        "NEED_INPUTS": inner,
        "NEED_HIDDEN": recompute,
        "NEED_WEIGHT": weight,
    }
    grid = (lists[0].numel() * blocks,)
    launch("moe_hidden_grad", variant, kernels.hidden_grad, grid, tile, args, constants)
    return _Hidden(gate_grad, up_grad, hidden, None if parts is None else parts.sum(0))


def _inner_shrunk(
    grad: Tensor | None, projection: Projection, rows: RoutedRows, tiles: Tiles, needed: bool
) -> Tensor | None:
    """[N, C] scaled grad B of the gate or up projection, or None. grad: [N, I]."""
    if grad is None or projection.lora is None or not needed:
        return None
    return shrink(grad, rows, tiles, projection.lora, gather=False, backward=True)


def _input_grad(
    rows: RoutedRows,
    experts: Experts,
    tiles: Tiles,
    hidden: _Hidden,
    gate_shrunk: Tensor | None,
    up_shrunk: Tensor | None,
) -> Tensor:
    """[T, H], or [N, H] for rows that are sorted already."""
    from lumina_ft.kernels.moe import kernel_backward as kernels

    assert hidden.gate is not None
    width, hidden_size = experts.gate.weight.shape[1:]
    variant = dtype_name(hidden.gate)
    out = hidden.gate.new_empty(hidden.gate.shape[0], hidden_size)
    tile = tile_for("moe_input_grad", variant, out.device)
    lists = tiles.of(tile.blocks["BLOCK_M"])
    gate_lora, up_lora = experts.gate.lora, experts.up.lora
    args = (
        *(hidden.gate, hidden.up, experts.gate.weight, experts.up.weight),
        *(gate_shrunk, None if gate_lora is None else gate_lora.a, up_shrunk, None if up_lora is None else up_lora.a),
        *(rows.keys, rows.order, rows.offsets, *lists, out),
    )
    constants = {
        "ORDERED": rows.order is not None,
        "HIDDEN": hidden_size,
        "WIDTH": width,
        **rank_constants("GATE_", gate_lora),
        **dropout_constants("GATE_", gate_lora, rows.keys),
        **rank_constants("UP_", up_lora),
        **dropout_constants("UP_", up_lora, rows.keys),
    }
    grid = (lists[0].numel() * blocks_of(hidden_size, tile, "BLOCK_N"),)
    launch("moe_input_grad", variant, kernels.input_grad, grid, tile, args, constants)
    return combine_rows(out, rows)


def _projection_grads(
    projection: Projection,
    rows: RoutedRows,
    out_grad: _Operand,
    inputs: _Operand,
    shrunk: Tensor,
    grad_shrunk: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the matrix, A and B; without elements where not needed.

    Args:
        out_grad: of the projection's output. inputs: of the projection.
        shrunk: [N, C] scaled A drop(inputs). grad_shrunk: [N, C] scaled out_grad B.
        needs: matrix, A, B.
    """
    weight, lora = projection
    matrix, a, b = (weight.new_empty(0) for _ in range(3))
    if needs[0]:
        matrix = _weight_grad(out_grad, inputs, rows, weight)
    if lora is not None and needs[1]:
        assert grad_shrunk is not None
        a = _rank_grad(inputs, grad_shrunk, rows, lora, of_a=True)
    if lora is not None and needs[2]:
        b = _rank_grad(out_grad, shrunk, rows, lora, of_a=False)
    return matrix, a, b


def _weight_grad(left: _Operand, right: _Operand, rows: RoutedRows, weight: Tensor) -> Tensor:
    """[E, O, I] products over each expert's rows. left: [.., O]. right: [.., I]. weight: what it is the gradient of."""
    from lumina_ft.kernels.moe import kernel_backward as kernels

    experts, outputs, inputs = weight.shape
    variant, ordered = dtype_name(weight), rows.order is not None
    out = torch.empty_like(weight, memory_format=torch.contiguous_format)
    tile = tile_for("moe_weight_grad", variant, weight.device)
    constants = {
        "LEFT_GATHER": left.gather and ordered,
        "RIGHT_GATHER": right.gather and ordered,
        "SLOTS": rows.slots,
        "OUTPUTS": outputs,
        "INPUTS": inputs,
    }
    grid = (blocks_of(outputs, tile, "BLOCK_M") * blocks_of(inputs, tile, "BLOCK_N"), experts)
    args = (left.values, right.values, rows.order, rows.offsets, out)
    launch("moe_weight_grad", variant, kernels.weight_grad, grid, tile, args, constants)
    return out


def _rank_grad(wide: _Operand, shrunk: Tensor, rows: RoutedRows, lora: Lora, *, of_a: bool) -> Tensor:
    """Gradient of A or B. wide: inputs of A, or the gradient of B's outputs. shrunk: [N, C], the other operand."""
    from lumina_ft.kernels.moe import kernel_backward as kernels

    assert wide.values is not None
    matrix = lora.a if of_a else lora.b
    variant, ordered = dtype_name(matrix), rows.order is not None
    features = wide.values.shape[1]
    out = torch.empty_like(matrix, memory_format=torch.contiguous_format)
    tile = tile_for("moe_rank_grad", variant, matrix.device)
    constants = {
        "ORDERED": ordered,
        "GATHER": wide.gather and ordered,
        "SLOTS": rows.slots,
        "FEATURES": features,
        "TRANSPOSED": not of_a,
        **rank_constants("", lora),
        **dropout_constants("", lora if of_a else None, rows.keys),
    }
    # float32 doesn't use the matrix units, so it needs no more rows than the rank has.
    constants["RANK_ROWS"] = constants["RANK_BLOCK"] if variant == "float32" else MATRIX_UNIT_ROWS
    parts = constants["RANK_COLUMNS"] // constants["RANK_BLOCK"]
    grid = (blocks_of(features, tile, "BLOCK_N") * parts, rows.offsets.numel())
    args = (wide.values, shrunk, rows.keys, rows.order, rows.offsets, out)
    launch("moe_rank_grad", variant, kernels.rank_grad, grid, tile, args, constants)
    return out
