"""Merging adapters into a model directory, tensor by tensor: base files in, model files out, nothing in between.

Memory stays at a few blocks of rows whatever the size of the model: base and adapters are mapped files, every block of
rows is computed in float64, rounded once and put at its place in the output.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lumina_ft.adapters.combine import Update, WeightedAdapter, combine, open_adapters
from lumina_ft.adapters.delta import converted
from lumina_ft.adapters.files import LoraFile
from lumina_ft.adapters.logits import BOUNDS, MAX_PARAMETERS, LogitsCheck, compare_logits
from lumina_ft.adapters.output import add_companions, check_output, flushed_meanwhile, written_aside
from lumina_ft.adapters.verify import MergeCheck, verify_merge
from lumina_ft.errors import CheckpointError
from lumina_ft.models.hf_keys import CHANNEL_MASK, Layout
from lumina_ft.models.identity import TensorHasher
from lumina_ft.models.matching import match_checkpoint
from lumina_ft.models.native import ModelTensors, NativeReader, channel_mask, for_each_tensor, model_tensors
from lumina_ft.models.tensor_files import DEFAULT_SHARD_BYTES, TensorSpec
from lumina_ft.models.u2_config import U2Config
from lumina_ft.models.weights import ModelWriter, read_config_json

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) of the whole work."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MergeSummary:
    """What a merge did.

    Attributes:
        output: directory written.
        source_layout, layout: of the base and of the output.
        tensors: in the output's files. adapted, replaced: native tensors that adapters changed.
        bytes: of tensor data. shards: safetensors files.
        base_checked: every tensor of the base is the one that the adapters were trained on.
        warnings: for the user.
        check: what verification found; None without it. logits: of small models with one adapter, else None.
        seconds: until everything was proved and on the disk.
    """

    output: Path
    source_layout: Layout
    layout: Layout
    tensors: int
    adapted: int
    replaced: int
    bytes: int
    shards: int
    base_checked: bool
    warnings: tuple[str, ...]
    check: MergeCheck | None
    logits: LogitsCheck | None
    seconds: float


def merge_adapters(
    base: Path,
    adapters: Sequence[WeightedAdapter],
    output: Path,
    *,
    layout: Layout | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    verify: bool = True,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> MergeSummary:
    """Write the base with the adapters merged into it.

    The output appears under its name only when it is complete and, unless `verify` is off, proved right.

    Args:
        base: model directory of either layout.
        adapters: added with their weights, in this order.
        output: directory to create. overwrite: replace a model directory that is there.
        layout: default: as the base.
        dtype: of all weights; buffers (expert bias, channel mask) keep theirs. Default: every tensor as in the base.
        max_shard_bytes: largest shard.

    Raises:
        CheckpointError: a damaged base or adapter, adapters of another base or that exclude each other, an output that
            exists, or an update that the output's dtype can't hold.
        ConfigError: see `open_adapters`, `check_output`; or config.json describes an unsupported model.
        RunError: the disk is full, or verification found a wrong tensor.
    """
    base, output = Path(base), Path(output)
    check_output(output, [base, *(adapter.directory for adapter in adapters)], overwrite=overwrite)
    with NativeReader(base) as reader:
        plan = _plan(reader, adapters, dtype)
        target_layout: Layout = layout or reader.layout
        meter = _Meter(progress, plan.num_bytes * (2 if verify else 1))
        start = time.monotonic()
        with written_aside(output, plan.num_bytes, overwrite=overwrite) as aside:
            out = ModelWriter(
                aside,
                plan.specs,
                layout=target_layout,
                config_json=plan.config_json,
                max_shard_bytes=max_shard_bytes,
                source_dir=base,
                sync=False,
            )
            with out:
                _write_tensors(out, reader, plan, meter)
            warnings = [*plan.warnings, *add_companions(aside, [adapter.directory for adapter in adapters])]
            with flushed_meanwhile(aside):
                check = verify_merge(base, adapters, aside, dtype=dtype, advance=meter.advance) if verify else None
                logits = _compare_small(base, adapters, aside, plan) if verify else None
            shards = len(list(aside.glob("*.safetensors")))
    warnings += check.warnings if check else ()
    for warning in warnings:
        _log.warning("warning: %s", warning)
    replaced = sum(update.replacement is not None for update in plan.updates.values())
    return MergeSummary(
        output=output,
        source_layout=reader.layout,
        layout=target_layout,
        tensors=out.num_tensors,
        adapted=len(plan.updates) - replaced,
        replaced=replaced,
        bytes=plan.num_bytes,
        shards=shards,
        base_checked=all(_remembers_base(file) for file in plan.files),
        warnings=tuple(warnings),
        check=check,
        logits=logits,
        seconds=round(time.monotonic() - start, 2),
    )


@dataclass(frozen=True)
class _Plan:
    """All that is decided before the first byte is written.

    Attributes:
        files: the adapters. updates: by native name.
        specs: of the output. buffers: names of those whose dtype is fixed.
        config_json: of the output.
        warnings: about adapters that don't say which base is theirs.
    """

    files: tuple[LoraFile, ...]
    updates: Mapping[str, Update]
    specs: Mapping[str, TensorSpec]
    buffers: frozenset[str]
    config_json: Mapping[str, Any]
    warnings: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the output's tensors."""
        return sum(spec.num_bytes for spec in self.specs.values())


def _plan(reader: NativeReader, adapters: Sequence[WeightedAdapter], dtype: torch.dtype | None) -> _Plan:
    base = reader.reader.directory
    config_json, config = read_config_json(base), U2Config.load(base)
    files = open_adapters(adapters)
    known = model_tensors(config)
    match_checkpoint(reader.reader, known.shapes, config)
    stored = {name: reader.tensors[name].spec for name in known.shapes if name in reader.tensors}
    return _Plan(
        files=tuple(file for file, _ in files),
        updates=combine(files, stored, base),
        specs=_output_specs(stored, known, config, dtype),
        buffers=known.buffers,
        config_json=_config_json(config_json, dtype),
        warnings=tuple(_check_bases([file for file, _ in files], reader)),
    )


def _compare_small(base: Path, adapters: Sequence[WeightedAdapter], merged: Path, plan: _Plan) -> LogitsCheck | None:
    """Compare logits, where the model is small enough to be built and the adapter can be attached as it is."""
    size = sum(math.prod(spec.shape) for spec in plan.specs.values())
    if size > MAX_PARAMETERS or len(adapters) > 1 or adapters[0].weight != 1.0:
        return None
    dtypes = {spec.dtype for name, spec in plan.specs.items() if name not in plan.buffers}
    return compare_logits(base, adapters[0].directory, merged, max(dtypes, key=lambda dtype: BOUNDS[dtype]))


def _write_tensors(out: ModelWriter, reader: NativeReader, plan: _Plan, meter: "_Meter") -> None:
    """Stream every tensor of the base into the output, several at a time; the first wrong one ends it."""
    specs = plan.specs
    remembering = [file for file in plan.files if _remembers_base(file)]

    def work(name: str) -> None:
        hasher = TensorHasher(name, reader.tensors[name].spec)
        dtype, update = specs[name].dtype, plan.updates.get(name)
        for rows, piece in reader.pieces(name):
            if remembering:
                hasher.update(piece)
            values = converted(piece, dtype) if update is None else update.new_rows(piece, rows, dtype)
            out.write_rows(name, rows.start, values)
            meter.advance(values.numel() * dtype.itemsize)
        if remembering:
            _compare_hash(name, hasher.result(), remembering, reader)

    for_each_tensor(work, [name for name in specs if name in reader.tensors])
    if CHANNEL_MASK in specs and CHANNEL_MASK not in reader.tensors:
        # The published code leaves this buffer uninitialised when a checkpoint doesn't hold it.
        out.write(CHANNEL_MASK, channel_mask(specs[CHANNEL_MASK].shape[0]))


def _compare_hash(name: str, found: str | None, files: Sequence[LoraFile], reader: NativeReader) -> None:
    """Raises: CheckpointError: an adapter was trained on another base."""
    for file in files:
        assert file.base is not None
        wanted = file.base.tensors.get(name)
        if wanted != found:
            trained_on = f" ({file.base_name})" if file.base_name else ""
            raise CheckpointError(
                f"{reader.reader.directory} — {name} has hash {found}, the base of {file.path}{trained_on} had "
                f"{wanted} — an adapter belongs to the very weights it was trained on — give that base, in its dtype"
            )


def _check_bases(files: Sequence[LoraFile], reader: NativeReader) -> list[str]:
    """Warnings about adapters that don't say which base is theirs.

    Raises:
        CheckpointError: an adapter's base had tensors that this one lacks.
    """
    base, warnings = reader.reader.directory, list[str]()
    for file in files:
        if file.base is None or not _remembers_base(file):
            warnings.append(
                f"{file.path} doesn't record the hashes of its base (plain PEFT): whether {base} is that base can't be "
                "checked"
            )
            continue
        missing = [name for name in file.base.tensors if name not in reader.tensors]
        if missing:
            raise CheckpointError(
                f"{base} — {missing[0]} is missing, the base of {file.path} had it — an adapter belongs to the very "
                "weights it was trained on — give that base"
            )
    return warnings


def _remembers_base(file: LoraFile) -> bool:
    return file.base is not None and bool(file.base.tensors)


def _output_specs(
    stored: Mapping[str, TensorSpec], known: ModelTensors, config: U2Config, dtype: torch.dtype | None
) -> dict[str, TensorSpec]:
    specs = {
        name: spec if dtype is None or name in known.buffers else TensorSpec(spec.shape, dtype)
        for name, spec in stored.items()
    }
    if config.has_image and CHANNEL_MASK not in specs:
        mask = channel_mask(config.id_columns)
        specs[CHANNEL_MASK] = TensorSpec(tuple(mask.shape), mask.dtype)
    return specs


def _config_json(source: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    content = dict(source)
    if dtype is not None:
        content.pop("dtype", None)
        content["torch_dtype"] = str(dtype).removeprefix("torch.")
    return content


class _Meter:
    """Counts bytes over threads."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._lock = threading.Lock()

    def advance(self, num_bytes: int) -> None:
        """Report more bytes as done."""
        if self._progress is None:
            return
        with self._lock:
            self._done += num_bytes
            self._progress(self._done, self._total)
