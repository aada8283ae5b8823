"""Loading and saving of weights in every published layout, one tensor at a time.

A checkpoint is compared with the model from the file headers alone; only when every name, shape and dtype fits is the
first weight written. Weights then go from the mapped files straight to where they stay, and each rank reads only what
it keeps: its own experts, and under ZeRO-3 its own partition of every parameter.
"""

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from lumina_ft.data.codecs import CODEC_DIR
from lumina_ft.errors import CheckpointError, ConfigError
from lumina_ft.models.groups import is_adapter_name
from lumina_ft.models.hf_keys import MODEL_TYPES, Layout, is_stacked_experts, split_key
from lumina_ft.models.json_files import read_json_object, write_json
from lumina_ft.models.matching import match_checkpoint, read_flat
from lumina_ft.models.tensor_files import DEFAULT_SHARD_BYTES, CheckpointReader, ShardWriter, TensorSpec
from lumina_ft.models.u2_config import U2Config
from lumina_ft.parallel.zero3 import FlatReader, default_dtype, fill_tensor, full_shape

Fill = Callable[[Tensor, FlatReader], None]
"""`fill(target, read)`: fill one parameter or buffer of the model with the whole value that `read` gives pieces of."""

Model = TypeVar("Model", bound=PreTrainedModel)

CONFIG_FILE = "config.json"
_CARRIED = ("*.py", "*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*")
_CONFIG_DEFAULTS = {"architectures": ["LLaDA2MoeModelLM"], "rope_scaling": None, "use_cache": False}
"""Keys of the published config.json that the model's config doesn't keep."""
_NOT_CARRIED = ("config.json", "*.index.json", "adapter_config.json")


def load_weights(model: PreTrainedModel, directory: Path, *, fill: Fill = fill_tensor) -> Layout:
    """Fill a model from a checkpoint directory, streaming.

    Args:
        model: parameters and buffers keep their dtypes; buffers such as the fp32 `expert_bias` get the stored bits.
        directory: split or packed, single file or shards; every rank reads in it.
        fill: fills one target. Targets come in the same order on all ranks.

    Returns:
        The layout found.

    Raises:
        CheckpointError: see `match_checkpoint`; nothing has been written to the model then.
    """
    targets = model.state_dict(keep_vars=True)
    with CheckpointReader(Path(directory)) as reader:
        match = match_checkpoint(reader, {name: tuple(full_shape(t)) for name, t in targets.items()}, model.config)
        for name, source in match.sources.items():
            fill(targets[name], partial(read_flat, reader, source))
    return match.layout


def read_config_json(directory: Path) -> dict[str, Any]:
    """Content of a checkpoint's config.json.

    Raises:
        CheckpointError: missing, or not a JSON object.
    """
    return read_json_object(Path(directory) / CONFIG_FILE, "a checkpoint directory")


def load_pretrained(
    cls: type[Model],
    directory: Path,
    *,
    config: PretrainedConfig | None = None,
    dtype: torch.dtype | None = None,
) -> Model:
    """Build a model from a checkpoint directory and fill it. Ends in eval mode, as `from_pretrained` does.

    Args:
        cls: the model class.
        directory: checkpoint of either layout.
        config: used instead of the directory's own `U2Config`.
        dtype: of the parameters; default: the one that config.json names, else float32.

    Raises:
        CheckpointError: the directory doesn't hold exactly this model.
        ConfigError: config.json describes a model that isn't supported.
    """
    directory = Path(directory)
    if config is None:
        read_config_json(directory)
        config = U2Config.load(directory)
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else None
    with default_dtype(dtype or stored or torch.float32), no_init_weights():
        model = cls(config)
    load_weights(model, directory)
    return model.eval()


class ModelWriter:
    """Writes a model directory: weights in the wanted layout as they arrive, config.json and carried files at the end.

    Args:
        directory: created if needed.
        specs: shape and dtype of every persistent tensor, by native name.
        layout: `packed` or `split`.
        config_json: content of config.json; `model_type` is set to name the layout (spec §1, trap 15).
        max_shard_bytes, sync: see `ShardWriter`.
        source_dir: code files (`auto_map`), tokenizer and licence files are copied from here (T12).

    Raises:
        ConfigError: unknown layout.
    """

    def __init__(
        self,
        directory: Path,
        specs: Mapping[str, TensorSpec],
        *,
        layout: Layout,
        config_json: Mapping[str, Any],
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
        source_dir: Path | None = None,
        sync: bool = True,
    ) -> None:
        if layout not in MODEL_TYPES:
            raise ConfigError(f"layout — {layout!r} — must be one of {', '.join(MODEL_TYPES)} — choose one")
        self.directory = Path(directory)
        self.layout = layout
        self._config = {**config_json, "model_type": MODEL_TYPES[layout]}
        self._source_dir = source_dir
        stored: dict[str, TensorSpec] = {}
        for name, spec in specs.items():
            for key in self._keys(name, spec.shape):
                stored[key] = spec if key == name else TensorSpec(spec.shape[1:], spec.dtype)
        self.num_tensors = len(stored)
        self._shards = ShardWriter(self.directory, stored, max_shard_bytes=max_shard_bytes, sync=sync)

    def _keys(self, name: str, shape: tuple[int, ...]) -> list[str]:
        if self.layout == "split" and is_stacked_experts(name):
            return [split_key(name, expert) for expert in range(shape[0])]
        return [name]

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one full tensor under its native name; order doesn't matter."""
        keys = self._keys(name, tuple(tensor.shape))
        if keys == [name]:
            self._shards.write(name, tensor)
            return
        for expert, key in enumerate(keys):
            self._shards.write(key, tensor[expert])

    def write_rows(self, name: str, first_row: int, rows: Tensor) -> None:
        """Write rows (of stacked experts: some experts) of one tensor; see `ShardWriter.write_rows`."""
        if self.layout == "split" and is_stacked_experts(name):
            for i in range(rows.shape[0]):
                self._shards.write(split_key(name, first_row + i), rows[i])
        else:
            self._shards.write_rows(name, first_row, rows)

    def __enter__(self) -> "ModelWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None):
        self._shards.__exit__(kind, value, trace)
        if kind is None:
            write_json(self.directory / CONFIG_FILE, self._config)
            if self._source_dir is not None:
                carry_files(self._source_dir, self.directory)


def carry_files(source: Path, target: Path) -> list[str]:
    """Copy what makes a checkpoint usable besides weights and config: code, tokenizer, codec, licences (T12).

    Returns:
        Names copied.
    """
    if source.resolve() == target.resolve():
        return []
    names = []
    for path in sorted(source.iterdir()):
        wanted = any(path.match(pattern) for pattern in _CARRIED)
        if path.is_file() and wanted and not any(path.match(pattern) for pattern in _NOT_CARRIED):
            shutil.copyfile(path, target / path.name)
            names.append(path.name)
    if (source / CODEC_DIR).is_dir():
        shutil.copytree(source / CODEC_DIR, target / CODEC_DIR, dirs_exist_ok=True)
        names.append(CODEC_DIR)
    return names


def export_config(config: PretrainedConfig, dtype: torch.dtype, source_dir: Path | None = None) -> dict[str, Any]:
    """Content of an exported config.json: the source's keys (`auto_map`, unknown ones), overruled by the model's own.

    Args:
        config: of the model.
        dtype: of the weights, written as `torch_dtype`, which every transformers version reads.
        source_dir: the checkpoint that the model came from.
    """
    source = dict(_CONFIG_DEFAULTS) if source_dir is None else read_config_json(source_dir)
    own = config.to_diff_dict()
    own.pop("dtype", None)
    # The published code reads such keys with a default of its own, which a null would defeat.
    own = {key: value for key, value in own.items() if value is not None or getattr(type(config), key, 0) is not None}
    kept = {key: source[key] for key in ("architectures", "auto_map") if key in source}
    return {**source, **own, **kept, "torch_dtype": str(dtype).removeprefix("torch.")}


def save_model(
    model: PreTrainedModel,
    directory: Path,
    *,
    layout: Layout = "packed",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    source_dir: Path | None = None,
) -> None:
    """Write a whole (unpartitioned) model as a checkpoint directory, streaming.

    Args:
        model: its tensors are written in their own dtypes.
        directory: may hold an earlier export, which is replaced.
        layout: `packed` (native, for training and dFactory) or `split` (for the official inference code).
        max_shard_bytes: largest shard.
        source_dir: see `ModelWriter`.

    Raises:
        CheckpointError: an adapter is attached to the model.
    """
    tensors = model.state_dict()
    if adapted := next((name for name in tensors if is_adapter_name(name)), None):
        raise CheckpointError(
            f"{directory} — {adapted} — a model directory holds no adapter — save that with "
            "adapters.files.write_adapter, or merge it first (lumina-ft merge-lora)"
        )
    specs = {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    config_json = export_config(model.config, model.dtype, source_dir)
    with ModelWriter(
        directory,
        specs,
        layout=layout,
        config_json=config_json,
        max_shard_bytes=max_shard_bytes,
        source_dir=source_dir,
    ) as out:
        for name, tensor in tensors.items():
            out.write(name, tensor)
