"""Conversion of a checkpoint directory between the split and the packed layout, without building the model.

Tensors go from the mapped input files to the output shards one at a time, bit for bit.
"""

import shutil
from pathlib import Path
from typing import NamedTuple

import torch

from lumina_ft.errors import CheckpointError, ConfigError
from lumina_ft.models.hf_keys import CHANNEL_MASK, Layout
from lumina_ft.models.matching import Match, match_checkpoint, read_native
from lumina_ft.models.native import channel_mask, model_tensors
from lumina_ft.models.tensor_files import DEFAULT_SHARD_BYTES, CheckpointReader, TensorSpec
from lumina_ft.models.u2_config import U2Config
from lumina_ft.models.weights import ModelWriter, read_config_json


class ConvertSummary(NamedTuple):
    """What a conversion did.

    Attributes:
        source_layout: layout found.
        layout: layout written.
        tensors: tensors in the output.
        bytes: of tensor data.
        shards: safetensors files.
        output: directory written.
    """

    source_layout: Layout
    layout: Layout
    tensors: int
    bytes: int
    shards: int
    output: Path


def convert(
    source: Path, output: Path, layout: Layout, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> ConvertSummary:
    """Write `source` in another layout (or the same one in other shards).

    The source must hold exactly the tensors that its config.json describes. config.json is copied with the
    `model_type` of the new layout; code, tokenizer and licence files are carried along. The output is written aside
    and renamed when it is complete.

    Args:
        source: checkpoint directory of either layout.
        output: directory to create.
        layout: `packed` or `split`.
        max_shard_bytes: largest shard.

    Raises:
        CheckpointError: see `match_checkpoint`; or the output exists.
        ConfigError: config.json describes a model that isn't supported, an unknown layout, or the output can't be
            created.
    """
    source, output = Path(source), Path(output)
    config_json = read_config_json(source)
    config = U2Config.load(source)
    if output.exists():
        raise CheckpointError(f"{output} — exists — a conversion writes a new directory — remove it or choose another")
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with CheckpointReader(source) as reader:
            match = match_checkpoint(reader, model_tensors(config).shapes, config)
            specs = _specs(reader, match)
            if config.has_image and CHANNEL_MASK not in specs:
                # The published code leaves this buffer uninitialised when a checkpoint doesn't hold it.
                specs[CHANNEL_MASK] = TensorSpec((config.id_columns, config.id_columns), torch.bfloat16)
            try:
                partial.mkdir(parents=True)
            except OSError as exc:
                raise ConfigError(
                    f"output — {output} — {exc.strerror} — must be writable — choose another directory"
                ) from exc
            with ModelWriter(
                partial,
                specs,
                layout=layout,
                config_json=config_json,
                max_shard_bytes=max_shard_bytes,
                source_dir=source,
            ) as out:
                for name in specs:
                    found = match.sources.get(name)
                    out.write(name, channel_mask(config.id_columns) if found is None else read_native(reader, found))
        shards = len(list(partial.glob("*.safetensors")))
        partial.rename(output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    data_bytes = sum(spec.num_bytes for spec in specs.values())
    return ConvertSummary(match.layout, layout, out.num_tensors, data_bytes, shards, output)


def _specs(reader: CheckpointReader, match: Match) -> dict[str, TensorSpec]:
    """Shape and dtype of every native tensor of the source."""
    specs = {}
    for name, source in match.sources.items():
        key = source.keys[0]
        shape = reader.tensors[key].shape
        specs[name] = TensorSpec((len(source.keys), *shape) if source.stacked else shape, reader.dtype(key))
    return specs
