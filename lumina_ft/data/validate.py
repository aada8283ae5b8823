"""Checks on a Batch before it reaches a model (T2, T3, T7, T8). Each message names the sample and the position."""

from dataclasses import fields

import torch
from torch import Tensor

from lumina_ft.batch import Batch
from lumina_ft.data.collate import DTYPES
from lumina_ft.errors import DataError
from lumina_ft.tokens import IGNORE, TYPE_ANSWER_MEDIA, TYPE_ANSWER_TEXT, TYPE_MEDIA, TokenSpec

_PER_SAMPLE = ("cu_seqlens", "sample_ids", "task_ids")


def validate_batch(batch: Batch, spec: TokenSpec, *, vocab_rows: int | None = None) -> None:
    """Check everything that a model relies on but could not report well.

    Args:
        batch: on the CPU.
        spec: ids and codebooks of the model.
        vocab_rows: rows of its text table; text ids and labels at or above it are errors. None: not checked.

    Raises:
        DataError: a tensor of another dtype or length than its contract; bounds that don't start at 0, don't increase
            or pass the end; a valid row outside every sample; an unknown type; an id or label out of range; a row with
            labels in some codebooks only; a label where none can be.
    """
    _check_dtypes_and_lengths(batch, spec)
    _check_bounds(batch)
    _check_rows(batch, spec, vocab_rows)
    _check_labels(batch, spec, vocab_rows)


def _check_dtypes_and_lengths(batch: Batch, spec: TokenSpec) -> None:
    rows, columns = batch.input_ids.shape[0], max(spec.num_codebooks, 1)
    for field in fields(Batch):
        tensor: Tensor = getattr(batch, field.name)
        if tensor.dtype != DTYPES[field.name]:
            why = (
                "half types round ids above 256" if tensor.dtype in (torch.bfloat16, torch.float16) else "ids are exact"
            )
            raise DataError(
                f"batch.{field.name} — dtype {tensor.dtype} — must be {DTYPES[field.name]}, {why} — "
                "keep it an integer tensor all the way"
            )
        if field.name in _PER_SAMPLE:
            want: tuple[int, ...] = (batch.sample_ids.shape[0] + (field.name == "cu_seqlens"),)
        else:
            want = (rows, columns) if field.name in ("input_ids", "labels") else (rows,)
        if tuple(tensor.shape) != want:
            raise DataError(
                f"batch.{field.name} — shape {list(tensor.shape)} — must be {list(want)} for input_ids of {rows} rows, "
                f"{columns} codebooks and {batch.sample_ids.shape[0]} samples — pass tensors of one pack"
            )


def _check_bounds(batch: Batch) -> None:
    bounds, rows = batch.cu_seqlens.tolist(), batch.num_tokens
    rule = f"must start at 0, increase strictly and end at or before {rows}, with at least one sample"
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] > rows:
        raise DataError(f"batch.cu_seqlens — {_shortened(bounds)} — {rule} — pass the bounds of this pack")
    for number, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if high <= low:
            raise DataError(
                f"batch.cu_seqlens — entries {number} and {number + 1} are {low} and {high} — {rule} — "
                "drop empty samples before packing"
            )
    tail = torch.nonzero(batch.valid[bounds[-1] :])
    if len(tail):
        raise DataError(
            f"batch.valid — row {bounds[-1] + int(tail[0])} is valid but lies behind the last sample, which ends at "
            f"{bounds[-1]} — the tail is padding — mark it invalid or add its sample to cu_seqlens"
        )


def _check_rows(batch: Batch, spec: TokenSpec, vocab_rows: int | None) -> None:
    types, ids = batch.type_ids, batch.input_ids
    _refuse(batch, batch.valid & ((types < 1) | (types > 4)), "type_ids", types, "a valid row has type 1, 2, 3 or 4")
    _refuse(batch, ~batch.valid & (types != 0), "type_ids", types, "a padding row has type 0")
    _refuse(batch, batch.position_ids < 0, "position_ids", batch.position_ids, "positions start at 0")
    _refuse(batch, batch.turn_ids < 0, "turn_ids", batch.turn_ids, "turns start at 0")
    _refuse(batch, batch.block_ids < -1, "block_ids", batch.block_ids, "blocks start at 0, -1 means none")
    media = (types == TYPE_MEDIA) | (types == TYPE_ANSWER_MEDIA)
    table = spec.media
    controls = torch.tensor(
        [table.mask, table.newline, table.line_3d, table.layer_3d, table.line_video, table.frame_video]
    )
    media_ids = ids[media]
    bad = torch.zeros_like(batch.valid)
    bad[media] = ((media_ids < 0) | ((media_ids >= table.codebook_size) & ~torch.isin(media_ids, controls))).any(-1)
    _refuse(batch, bad, "input_ids", ids, f"media rows hold codes below {table.codebook_size} or media control ids")
    text = ids[:, 0]
    if vocab_rows is not None:
        _refuse(batch, ~media & (text >= vocab_rows), "input_ids", text, f"text ids are below {vocab_rows}")
    _refuse(batch, ~media & (text < 0), "input_ids", text, "text ids are not negative")
    _refuse(batch, ~media & (ids != ids[:, :1]).any(-1), "input_ids", ids, "text rows repeat one id in all columns")


def _check_labels(batch: Batch, spec: TokenSpec, vocab_rows: int | None) -> None:
    labels, types = batch.labels, batch.type_ids
    set_ = labels != IGNORE
    image, text = types == TYPE_ANSWER_MEDIA, types == TYPE_ANSWER_TEXT
    any_set = set_.any(-1)
    _refuse(batch, set_ & (labels < 0), "labels", labels, f"a label is an id >= 0, or {IGNORE}")
    _refuse(
        batch,
        image & any_set & ~set_.all(-1),
        "labels",
        labels,
        f"all {labels.shape[1]} codebooks of an image row are labelled or none is",
    )
    _refuse(batch, any_set & ~(image | text), "labels", labels, "only answer rows (types 3 and 4) carry labels")
    _refuse(
        batch,
        (image[:, None] & set_) & (labels >= spec.media.codebook_size),
        "labels",
        labels,
        f"image labels are below the codebook size {spec.media.codebook_size}",
    )
    if vocab_rows is not None:
        _refuse(
            batch, (text & any_set) & (labels[:, 0] >= vocab_rows), "labels", labels, f"labels are below {vocab_rows}"
        )
    _refuse(batch, any_set & batch.is_clean, "labels", labels, "clean rows are given to the model, not predicted")


def _refuse(batch: Batch, bad: Tensor, name: str, values: Tensor, rule: str) -> None:
    """Raise at the first True of `bad`, [S] or [S, C]."""
    if not bad.any():
        return
    at = torch.nonzero(bad)[0].tolist()
    row, column = at[0], at[1] if len(at) > 1 else None
    bounds = batch.cu_seqlens
    number = int(torch.searchsorted(bounds[1:].contiguous(), row, right=True))
    if number < len(batch.sample_ids):
        place = f"sample {int(batch.sample_ids[number])}, position {row - int(bounds[number])} (pack row {row})"
    else:
        place = f"padding tail, pack row {row}"
    value = values[row] if column is None else values[row, column]
    codebook = "" if column is None else f", codebook {column}"
    raise DataError(f"batch.{name} — {value.tolist()} at {place}{codebook} — {rule} — rebuild or fix that sample")


def _shortened(bounds: list[int]) -> str:
    return str(bounds) if len(bounds) <= 8 else f"[{bounds[0]}, {bounds[1]}, … {bounds[-1]}] ({len(bounds)} entries)"
