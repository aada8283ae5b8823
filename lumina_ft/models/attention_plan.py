"""Chooses and builds the attention plan of a forward pass (T7).

Shape legend: B rows, S tokens of a row, T = B * S.
"""

from functools import partial

import torch
from torch import Tensor

from lumina_ft.errors import DataError
from lumina_ft.kernels import AttentionPlan, DensePlan, Kernels, allowed_mask, log_choice, plan_segments, plan_tiles
from lumina_ft.models.inputs import ModelInputs, as_bool


def plan_attention(
    inputs: ModelInputs, *, kernels: Kernels, allowed: Tensor | None, bounded: bool, dtype: torch.dtype
) -> AttentionPlan:
    """The plan that all layers share.

    Args:
        kernels: of the model; a strict choice refuses what only the dense path could serve.
        allowed: bool [S, S] or [B, S, S], replaces the packing rule.
        bounded: whether the caller gave cu_seqlens.
        dtype: of the activations.

    Raises:
        DataError: the inputs don't fit the implementation, or contradict each other.
    """
    if allowed is not None:
        if kernels.strict:
            raise DataError(
                f"allowed — an explicit mask — model.kernels={kernels.choice} serves the packing rule only — "
                "drop the mask, or use model.kernels: auto"
            )
        if bounded:
            raise DataError("allowed — given with cu_seqlens — the mask replaces the packing rule — pass only one")
        if kernels.choice == "auto":
            log_choice("eager for attention under an explicit mask")
        return DensePlan(_explicit_mask(allowed, inputs))
    if kernels.strict and not bounded:
        raise DataError(
            f"cu_seqlens — missing — model.kernels={kernels.choice} needs sample bounds — "
            f"pass [0, {inputs.tokens}] for a single sample"
        )
    kind = kernels.on(inputs.type_ids.device, dtype).attention
    if kind == "dense":
        return DensePlan(_packing_mask(inputs))
    plan = plan_segments
    if kind == "tiled":
        plan = partial(plan_tiles, head_dim=kernels.head_dim, heads_per_key=kernels.heads_per_key)
    return plan(
        inputs.starts,
        inputs.lengths,
        type_ids=inputs.type_ids,
        turn_ids=inputs.turn_ids,
        block_ids=inputs.block_ids,
        is_clean=inputs.is_clean,
        valid=inputs.valid,
        has_metadata=inputs.has_metadata,
        dtype=dtype,
    )


def _explicit_mask(allowed: Tensor, inputs: ModelInputs) -> Tensor:
    mask = as_bool(allowed, "allowed")
    rows, tokens = inputs.rows, inputs.tokens
    if tuple(mask.shape) not in ((tokens, tokens), (rows, tokens, tokens)):
        raise DataError(
            f"allowed — shape {list(mask.shape)} — must be [{tokens}, {tokens}] or [{rows}, {tokens}, {tokens}] like "
            "input_ids — reshape"
        )
    valid = inputs.valid.view(rows, tokens)
    return mask.expand(rows, tokens, tokens) & valid.unsqueeze(1) & valid.unsqueeze(2)


def _packing_mask(inputs: ModelInputs) -> Tensor:
    """The reference rule of every row: [B, S, S]."""
    tokens = inputs.tokens
    samples = len(inputs.starts) // inputs.rows
    bounds = [0, *(s + n for s, n in zip(inputs.starts[:samples], inputs.lengths[:samples], strict=True))]
    cu_seqlens = torch.tensor(bounds, device=inputs.type_ids.device)
    masks = []
    for row in range(inputs.rows):
        at = slice(row * tokens, (row + 1) * tokens)
        masks.append(
            allowed_mask(
                inputs.type_ids[at],
                cu_seqlens=cu_seqlens,
                valid=inputs.valid[at],
                turn_ids=inputs.turn_ids[at] if inputs.has_metadata else None,
                is_clean=inputs.is_clean[at] if inputs.has_metadata else None,
                block_ids=inputs.block_ids[at],
            )
        )
    return torch.stack(masks)
