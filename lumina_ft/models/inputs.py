"""Checks and flattens what a caller gives a model: one token axis, int64 ids, host-side sample bounds (T2, T7, T8).

Shape legend: B rows, S tokens of a row, T = B * S, C id columns, n samples.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lumina_ft.errors import DataError
from lumina_ft.models.u2_config import U2Config
from lumina_ft.tokens import TYPE_ANSWER_MEDIA, TYPE_MEDIA

_EXACT_FLOATS = {torch.float32: 2**24, torch.float64: 2**53}


@dataclass(frozen=True)
class ModelInputs:
    """Inputs on one token axis.

    Attributes:
        input_ids: [T, C] int64; [T, 1] if the caller gave one column.
        type_ids, position_ids, turn_ids, block_ids: [T] int64.
        is_clean, valid, is_media: [T] bool.
        has_metadata: whether turn_ids or is_clean were given; without them a sample attends to all of itself.
        rows, tokens: B, S.
        starts, lengths: samples on the token axis, on the host.
    """

    input_ids: Tensor
    type_ids: Tensor
    position_ids: Tensor
    turn_ids: Tensor
    block_ids: Tensor
    is_clean: Tensor
    valid: Tensor
    is_media: Tensor
    has_metadata: bool
    rows: int
    tokens: int
    starts: list[int]
    lengths: list[int]

    def where(self, token: int) -> str:
        """Human name of a token, e.g. `sample 2, position 17`."""
        for i, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            if start <= token < start + length:
                return f"sample {i}, position {token - start}"
        return f"token {token} (padding)"


def as_int64(x: Tensor, name: str) -> Tensor:
    """Integers as int64; float32 and float64 are accepted only if every value is an exactly stored integer (T2).

    Raises:
        DataError: not a tensor, half precision, or fractional or too large values.
    """
    if not isinstance(x, Tensor):
        raise DataError(f"{name} — {type(x).__name__} — must be a tensor — use torch.as_tensor")
    if not x.is_floating_point():
        return x.long()
    limit = _EXACT_FLOATS.get(x.dtype)
    if limit is None:
        raise DataError(f"{name} — {x.dtype} — cannot hold ids: integers above 256 are rounded — use an integer dtype")
    if bool(((x != x.trunc()) | (x.abs() >= limit)).any()):
        raise DataError(f"{name} — {x.dtype} — holds values that are not exact integers — use an integer dtype")
    return x.long()


def as_bool(x: Tensor, name: str) -> Tensor:
    """A 0/1 mask as bool. Raises: DataError: as `as_int64`, or a value other than 0 and 1."""
    if isinstance(x, Tensor) and x.dtype == torch.bool:
        return x
    values = as_int64(x, name)
    if bool(((values != 0) & (values != 1)).any()):
        raise DataError(f"{name} — values other than 0 and 1 — must be a mask — use a bool tensor")
    return values.bool()


def normalise_inputs(
    config: U2Config,
    *,
    input_ids: Tensor,
    type_ids: Tensor,
    position_ids: Tensor | None,
    turn_ids: Tensor | None,
    block_ids: Tensor | None,
    is_clean: Tensor | None,
    cu_seqlens: Tensor | None,
    valid: Tensor | None,
) -> ModelInputs:
    """Check and flatten; see `U2ForDiffusion.forward` for the arguments.

    Raises:
        DataError: a shape, dtype, id, type or bound is wrong.
    """
    ids, rows, tokens = _flat_ids(as_int64(input_ids, "input_ids"), type_ids, config.id_columns)
    total = rows * tokens

    def flat(x: Tensor | None, name: str, default: int) -> Tensor:
        if x is None:
            return torch.full((total,), default, dtype=torch.int64, device=ids.device)
        return _flat_row(as_int64(x, name), name, rows, tokens)

    types = flat(type_ids, "type_ids", 0)
    mask = torch.ones(total, dtype=torch.bool, device=ids.device)
    mask = mask if valid is None else _flat_row(as_bool(valid, "valid"), "valid", rows, tokens)
    clean = torch.zeros_like(mask)
    clean = clean if is_clean is None else _flat_row(as_bool(is_clean, "is_clean"), "is_clean", rows, tokens)
    given = [n for n, x in (("turn_ids", turn_ids), ("is_clean", is_clean), ("block_ids", block_ids)) if x is not None]
    if cu_seqlens is None and given:
        raise DataError(
            f"cu_seqlens — missing — {', '.join(given)} mean nothing without sample bounds — pass cu_seqlens, "
            f"[0, {tokens}] for a single sample"
        )
    bounds = [0, tokens] if cu_seqlens is None else _bounds(cu_seqlens, tokens)
    starts = [row * tokens + start for row in range(rows) for start in bounds[:-1]]
    lengths = [end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True)] * rows
    is_media = (types == TYPE_MEDIA) | (types == TYPE_ANSWER_MEDIA)
    inputs = ModelInputs(
        input_ids=ids,
        type_ids=types,
        position_ids=_default_positions(starts, rows, tokens, ids.device)
        if position_ids is None
        else flat(position_ids, "position_ids", 0),
        turn_ids=flat(turn_ids, "turn_ids", 0),
        block_ids=flat(block_ids, "block_ids", -1),
        is_clean=clean,
        valid=mask,
        is_media=is_media,
        has_metadata=turn_ids is not None or is_clean is not None,
        rows=rows,
        tokens=tokens,
        starts=starts,
        lengths=lengths,
    )
    _check_values(config, inputs, end=bounds[-1])
    return inputs


def _flat_ids(ids: Tensor, type_ids: Tensor, columns: int) -> tuple[Tensor, int, int]:
    """Tell [S, C] from [B, S] by the shape of `type_ids`. Returns (ids [T, C or 1], B, S)."""
    if not isinstance(type_ids, Tensor):
        raise DataError(f"type_ids — {type(type_ids).__name__} — must be a tensor — use torch.as_tensor")
    shape = tuple(ids.shape)
    positions = type_ids.numel()
    if positions:
        if ids.ndim == 3 and shape[2] == columns:
            return ids.reshape(-1, columns), shape[0], shape[1]
        if ids.ndim == 1 or (ids.ndim == 2 and (shape == tuple(type_ids.shape) or shape == (1, positions))):
            return ids.reshape(-1, 1), 1 if ids.ndim == 1 else shape[0], shape[-1]
        if ids.ndim == 2 and shape == (positions, columns):
            return ids, 1, positions
    raise DataError(
        f"input_ids — shape {list(shape)} with type_ids {list(type_ids.shape)} — must be [B, S, {columns}], "
        f"[S, {columns}], [B, S] or [S] with type_ids [B, S] or [S] — reshape one of them"
    )


def _flat_row(x: Tensor, name: str, rows: int, tokens: int) -> Tensor:
    if tuple(x.shape) == (rows, tokens) or (rows == 1 and tuple(x.shape) == (tokens,)):
        return x.reshape(-1)
    raise DataError(
        f"{name} — shape {list(x.shape)} — must be [{rows}, {tokens}]{f' or [{tokens}]' if rows == 1 else ''}, one "
        f"value per token of input_ids — got {x.numel()} values for {rows * tokens} tokens"
    )


def _bounds(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """Sample bounds on the host, strictly checked (T7)."""
    bounds = as_int64(cu_seqlens, "cu_seqlens").tolist()
    if cu_seqlens.ndim != 1 or len(bounds) < 2:
        raise DataError(
            f"cu_seqlens — shape {list(cu_seqlens.shape)} — must be [n + 1] with at least one sample — "
            f"pass [0, {tokens}] for a single sample"
        )
    if bounds[0] != 0:
        raise DataError(f"cu_seqlens — starts at {bounds[0]} — must start at 0 — prepend 0")
    for i, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        if end <= start:
            raise DataError(f"cu_seqlens — {start} then {end} at entry {i} — must increase strictly — drop it")
    if bounds[-1] > tokens:
        raise DataError(f"cu_seqlens — ends at {bounds[-1]} — the row has {tokens} tokens — shorten the last sample")
    return bounds


def _default_positions(starts: list[int], rows: int, tokens: int, device: torch.device) -> Tensor:
    """0, 1, 2, … inside every sample; the tail goes on from the last one."""
    index = torch.arange(rows * tokens, device=device)
    begin = torch.zeros_like(index)
    begin[torch.tensor(starts, device=device)] = torch.tensor(starts, device=device)
    return index - begin.cummax(0).values


def _check_values(config: U2Config, inputs: ModelInputs, end: int) -> None:
    """One host read for all value checks, before any layer runs."""
    limit = torch.where(inputs.is_media, config.image_embedding_rows if config.has_image else 0, config.text_rows or 0)
    columns = inputs.input_ids
    # Text rows read column 0 only.
    wrong_id = (columns[:, 0] < 0) | (columns[:, 0] >= limit)
    if columns.shape[1] > 1:
        wrong_id = wrong_id | (inputs.is_media & ((columns < 0) | (columns >= limit.unsqueeze(1))).any(1))
    elif config.id_columns > 1:
        wrong_id = wrong_id | inputs.is_media
    wrong_type = (inputs.type_ids < 0) | (inputs.type_ids > TYPE_ANSWER_MEDIA)
    tail = inputs.valid.view(inputs.rows, inputs.tokens)[:, end:]
    flags = torch.stack((wrong_type.any(), wrong_id.any(), tail.any())).tolist()
    if flags[0]:
        token = int(wrong_type.nonzero()[0])
        raise DataError(
            f"type_ids — {int(inputs.type_ids[token])} at {inputs.where(token)} — must be 0 to 4 — correct it"
        )
    if flags[1]:
        token = int(wrong_id.nonzero()[0])
        kind = "media" if bool(inputs.is_media[token]) else "text"
        if kind == "media" and columns.shape[1] < config.id_columns:
            raise DataError(
                f"input_ids — one column at {inputs.where(token)} — media rows need {config.id_columns} codes — "
                f"pass [S, {config.id_columns}]"
            )
        raise DataError(
            f"input_ids — {columns[token].tolist()} at {inputs.where(token)} — {kind} ids must be 0 to "
            f"{int(limit[token]) - 1} — check type_ids and the tokenizer"
        )
    if flags[2]:
        raise DataError(
            f"valid — a token at or after {end} is marked valid — cu_seqlens ends at {end}, later tokens belong to no "
            "sample — mark them invalid or extend cu_seqlens"
        )
