"""Comparing a checkpoint with the tensors that a model has, from the file headers alone, and reading it natively."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

from lumina_ft.errors import CheckpointError
from lumina_ft.models.hf_keys import (
    CHANNEL_MASK,
    Layout,
    detect_layout,
    is_stacked_experts,
    parse_packed,
    parse_split,
    split_key,
)
from lumina_ft.models.tensor_files import CheckpointReader

_MAX_LISTED = 4


class Source(NamedTuple):
    """Where a native tensor comes from: one key, or one key per expert in expert order."""

    keys: tuple[str, ...]
    stacked: bool


class Match(NamedTuple):
    """A checkpoint that fits.

    Attributes:
        layout: of the files.
        sources: native name to its keys, in the order of `expected`.
        tolerated: keys that the model has no place for, allowed because their values change nothing.
    """

    layout: Layout
    sources: dict[str, Source]
    tolerated: tuple[str, ...]


def match_checkpoint(
    reader: CheckpointReader, expected: Mapping[str, tuple[int, ...]], config: PretrainedConfig
) -> Match:
    """Compare a checkpoint with the tensors that a model has.

    `multi_codebook_head.channel_mask` may be absent, and so may `expert_bias` where the config disables it.

    Args:
        reader: an open checkpoint.
        expected: full shape of every persistent tensor of the model, by native name.
        config: the model's config (M4: `moe_router_enable_expert_bias`).

    Raises:
        CheckpointError: missing, extra, misshapen or non-float tensors; mixed layouts; a non-zero bias that the
            config disables; a channel mask that isn't causal; experts of one layer in several dtypes.
    """
    layout = detect_layout(reader.tensors, str(reader.directory))
    found = keys_by_native_name(reader)
    problems: list[str] = []
    sources: dict[str, Source] = {}
    for name, shape in expected.items():
        keys = found.pop(name, {})
        if layout == "split" and is_stacked_experts(name):
            wanted = {split_key(name, expert): tuple(shape[1:]) for expert in range(shape[0])}
            extra = [key for key in keys.values() if key not in wanted]
            problems += [
                f"{reader.tensors[key].file}: {key} is extra, the model has {shape[0]} experts" for key in extra
            ]
        else:
            wanted = {next(iter(keys.values()), name): tuple(shape)}
        if not keys and _may_be_absent(name, config):
            continue
        for key, want in wanted.items():
            if key not in reader.tensors:
                problems.append(f"{reader.directory}: {key} {list(want)} is missing")
            elif reader.tensors[key].shape != want:
                stored = reader.tensors[key]
                problems.append(f"{stored.file}: {key} has shape {list(stored.shape)}, the model needs {list(want)}")
        sources[name] = Source(tuple(wanted), stacked=layout == "split" and is_stacked_experts(name))
    tolerated = tuple(key for name, keys in found.items() for key in keys.values() if _may_be_absent(name, config))
    extra = [key for keys in found.values() for key in keys.values() if key not in tolerated]
    problems += [f"{reader.tensors[key].file}: {key} {list(reader.tensors[key].shape)} is extra" for key in extra]
    problems += [
        f"{stored.file}: {key} has dtype {stored.dtype}, weights are floats"
        for key, stored in reader.tensors.items()
        if not reader.dtype(key).is_floating_point
    ]
    if problems:
        rest = f"; and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
        raise CheckpointError(
            "; ".join(problems[:_MAX_LISTED]) + rest + f" — a checkpoint must hold exactly the tensors of the "
            f"{config.model_type} model that config.json describes — use the matching config.json or checkpoint"
        )
    for source in sources.values():
        _check_expert_dtypes(reader, source)
    _check_values(reader, config)
    return Match(layout, sources, tolerated)


def keys_by_native_name(reader: CheckpointReader) -> dict[str, dict[int, str]]:
    """Keys of every native tensor, by expert index (0 for tensors that aren't split).

    Raises:
        CheckpointError: two keys name the same tensor.
    """
    found: dict[str, dict[int, str]] = {}
    for key in reader.tensors:
        name, expert = parse_split(key) or (parse_packed(key) or key, 0)
        keys = found.setdefault(name, {})
        if expert in keys:
            raise CheckpointError(
                f"{reader.tensors[key].file} — {key!r} — names the same tensor as {keys[expert]!r} — keep one of them"
            )
        keys[expert] = key
    return found


def _may_be_absent(name: str, config: PretrainedConfig) -> bool:
    return name == CHANNEL_MASK or (_is_expert_bias(name) and not config.moe_router_enable_expert_bias)


def _is_expert_bias(name: str) -> bool:
    return name.endswith(".mlp.gate.expert_bias")


def _check_expert_dtypes(reader: CheckpointReader, source: Source) -> None:
    first = reader.dtype(source.keys[0])
    for key in source.keys[1:]:
        if reader.dtype(key) != first:
            raise CheckpointError(
                f"{reader.tensors[key].file} — {key} is {reader.dtype(key)}, expert 0 is {first} — "
                "the experts of a layer share one dtype — convert the checkpoint to one dtype"
            )


def _check_values(reader: CheckpointReader, config: PretrainedConfig) -> None:
    """The two buffers whose values the code relies on (M4, spec §1)."""
    for key, stored in reader.tensors.items():
        if key == CHANNEL_MASK:
            if not is_causal_mask(reader.read(key)):
                raise CheckpointError(
                    f"{stored.file} — {key} — must be 0 on and below the diagonal and -inf above — "
                    "remove the tensor, it is rebuilt"
                )
        elif _is_expert_bias(key) and not config.moe_router_enable_expert_bias and bool(reader.read(key).any()):
            raise CheckpointError(
                f"{stored.file} — {key} is not zero — moe_router_enable_expert_bias is false in config.json — "
                "set it to true, or zero the bias"
            )


def is_causal_mask(mask: Tensor) -> bool:
    """Whether a channel mask is 0 on and below the diagonal and blocks above it, in any dtype."""
    mask = mask.float()
    # Published files hold -inf or finfo.min of their dtype above the diagonal.
    blocked = mask <= torch.finfo(torch.float16).min
    causal = torch.ones(mask.shape, dtype=torch.bool).triu(1) if mask.dim() == 2 else None
    return causal is not None and torch.equal(blocked, causal) and not bool((mask[~causal] != 0).any())


def read_native(reader: CheckpointReader, source: Source) -> Tensor:
    """One native tensor: a view of the file, or the experts stacked on a new first axis."""
    if not source.stacked:
        return reader.read(source.keys[0])
    return torch.stack([reader.read(key) for key in source.keys])


def read_flat(reader: CheckpointReader, source: Source, start: int, stop: int) -> Iterator[Tensor]:
    """Elements start to stop of a flattened native tensor: one view per file tensor that holds some; no other is read.

    Args:
        start, stop: 0 <= start <= stop <= elements of the whole tensor.
    """
    if start == stop:
        return
    length = math.prod(reader.tensors[source.keys[0]].shape)
    for index in range(start // length, -(-stop // length)):
        first = index * length
        yield reader.read_elements(source.keys[index], max(start - first, 0), min(stop - first, length))
