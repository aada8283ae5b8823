"""Adapter directories in PEFT's own format, read and written without PEFT.

`adapter_config.json` and `adapter_model.safetensors`, whose keys are `base_model.model.<module>.lora_A.weight` [r, I],
`….lora_B.weight` [O, r] and, for DoRA, `….lora_magnitude_vector` [O]; whole modules beside the adapter
(`modules_to_save`) are stored under their own names. A directory written here also says which base it belongs to, in
the metadata of the tensor file.

Shape legend: O outputs, I inputs, r rank.
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lumina_ft.adapters.layout import (
    BASE_KEY,
    BASE_TENSORS_KEY,
    CONFIG_FILE,
    FLOATS,
    PREFIX,
    WEIGHTS_FILE,
    PairInfo,
    check_config,
    pair_info,
    read_base,
    read_config,
    sort_keys,
)
from lumina_ft.adapters.targets import short_names
from lumina_ft.errors import CheckpointError
from lumina_ft.models.groups import base_name as native_name
from lumina_ft.models.groups import group_of, is_adapter_name
from lumina_ft.models.hf_keys import is_stacked_experts, split_key
from lumina_ft.models.identity import BaseIdentity
from lumina_ft.models.json_files import write_json
from lumina_ft.models.tensor_files import ShardWriter, TensorSpec
from lumina_ft.parallel.zero3 import full_shape, gathered

if TYPE_CHECKING:
    from lumina_ft.adapters.lora import Adapter

ADAPTER_NAME = "default"
"""PEFT's name of the one adapter of a model; not part of keys in files."""
_ONE_FILE = 1 << 62
_CODEBOOK_HEAD = "multi_codebook_head"


class LoraPair(NamedTuple):
    """Tensors of one adapted layer: a [r, I], b [O, r], scale, and for DoRA magnitude [O]."""

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None


@dataclass(frozen=True)
class LoraFile:
    """A checked adapter directory; tensors are read when asked for, as views of the mapped file.

    Attributes:
        path: the directory.
        targets: adapted layers by full module name, without the tensors.
        modules: parameters and buffers of `modules_to_save`, native name -> shape.
        modules_to_save: as listed in the configuration.
        use_dora: every layer has a magnitude.
        dropout: that it was trained with.
        base_name: `base_model_name_or_path`, if given.
        base: identity of the base, if the writer recorded it.
    """

    path: Path
    targets: Mapping[str, PairInfo]
    modules: Mapping[str, tuple[int, ...]]
    modules_to_save: tuple[str, ...]
    use_dora: bool
    dropout: float
    base_name: str | None
    base: BaseIdentity | None
    _file: Any = field(repr=False)
    _magnitudes: Mapping[str, str] = field(repr=False)

    def pair(self, module: str) -> LoraPair:
        """Tensors of an adapted layer."""
        a = self._file.get_tensor(f"{PREFIX}{module}.lora_A.weight")
        b = self._file.get_tensor(f"{PREFIX}{module}.lora_B.weight")
        magnitude = self._file.get_tensor(self._magnitudes[module]) if self.use_dora else None
        return LoraPair(a, b, self.targets[module].scale, magnitude)

    def module_tensor(self, name: str) -> Tensor:
        """A whole parameter or buffer of `modules_to_save`, by native name."""
        return self._file.get_tensor(PREFIX + name)


def read_adapter(directory: Path) -> LoraFile:
    """Read and check an adapter directory that PEFT or this package wrote.

    Raises:
        CheckpointError: no adapter; not a LoRA, or a kind of it that isn't read here (adapters on parameters, biases,
            embeddings, other variants); keys, shapes or ranks that don't agree.
    """
    directory = Path(directory)
    config = read_config(directory)
    check_config(directory, config)
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        raise CheckpointError(f"{path} — not found — an adapter directory holds its tensors there — check the path")
    try:
        file = safe_open(path, framework="pt")
        entries = {key: file.get_slice(key) for key in file.keys()}
        metadata = dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} — {error} — must be a complete safetensors file — copy it again") from error
    shapes = {key: tuple(entry.get_shape()) for key, entry in entries.items()}
    for key, entry in entries.items():
        if entry.get_dtype() not in FLOATS:
            raise CheckpointError(f"{path} — {key}: {entry.get_dtype()} — adapter tensors are floats — export it again")
    saved = tuple(config.get("modules_to_save") or ())
    parts, modules = sort_keys(path, shapes, saved)
    use_dora = bool(config.get("use_dora"))
    targets = {module: pair_info(path, module, keys, shapes, config) for module, keys in parts.items()}
    if not targets:
        raise CheckpointError(f"{path} — holds no lora_A — must hold an adapter's tensors — export the adapter again")
    return LoraFile(
        path=directory,
        targets=targets,
        modules=modules,
        modules_to_save=saved,
        use_dora=use_dora,
        dropout=float(config.get("lora_dropout") or 0.0),
        base_name=config.get("base_model_name_or_path"),
        base=read_base(path, metadata),
        _file=file,
        _magnitudes={module: keys["magnitude"] for module, keys in parts.items() if "magnitude" in keys},
    )


def write_adapter(
    folder: Path | None,
    model: nn.Module,
    adapter: "Adapter",
    *,
    base: BaseIdentity | None,
    base_name: str,
    changed: Collection[str],
) -> None:
    """Write the adapter of a model as a PEFT directory. Collective.

    A PiSSA adapter is written relative to the original base: B A - B0 A0 is one pair of rank 2r. Tensors have the dtype
    of the forward pass.

    Args:
        folder: created; None on ranks that only take part in gathering.
        base: identity of the base that the adapter belongs to.
        base_name: where that base is, for `base_model_name_or_path`.
        changed: groups of base weights that differ from the base and must be stored beside the adapter; see
            `Adapter.can_store`.

    Raises:
        OSError: the disk fails; after the last tensor has been gathered, so that no other rank waits for this one.
    """
    assert adapter.can_store(changed), f"{sorted(changed)} can't be stored in an adapter"
    saved = _saved_modules(model, changed)
    stored = {**_adapter_tensors(model, adapter), **_module_tensors(model, saved)}
    metadata = {} if base is None else {BASE_KEY: base.digest, BASE_TENSORS_KEY: json.dumps(base.tensors)}
    failure: OSError | None = None
    with ExitStack() as stack:
        writer = None
        for key, entry in stored.items():
            with gathered([entry.live]):
                try:
                    if folder is not None and failure is None:
                        writer = writer or stack.enter_context(_open_file(folder, stored, metadata))
                        writer.write(key, entry.value())
                except OSError as error:
                    failure = error
        if failure is not None:
            raise failure
    if folder is not None:
        write_json(folder / CONFIG_FILE, _config_json(model, adapter, base_name, saved))


class _Stored(NamedTuple):
    """A tensor of the file: `live` in the model and, for PiSSA, what is appended to it along `dim`."""

    live: Tensor
    appended: Tensor | None = None
    dim: int = 0

    def spec(self) -> TensorSpec:
        shape = list(full_shape(self.live))
        shape[self.dim] *= 1 if self.appended is None else 2
        return TensorSpec(tuple(shape), self.live.dtype)

    def value(self) -> Tensor:
        """The whole tensor; `live` must be gathered."""
        value = self.live.detach()
        if self.appended is None:
            return value
        return torch.cat((value, self.appended.to(value.device, value.dtype)), dim=self.dim)


def _open_file(folder: Path, stored: Mapping[str, _Stored], metadata: Mapping[str, str]) -> ShardWriter:
    specs = {key: entry.spec() for key, entry in stored.items()}
    stem = WEIGHTS_FILE.removesuffix(".safetensors")
    return ShardWriter(folder, specs, max_shard_bytes=_ONE_FILE, stem=stem, metadata=metadata)


def _adapter_tensors(model: nn.Module, adapter: "Adapter") -> dict[str, _Stored]:
    """Keys and tensors of the adapted layers. PiSSA appends what the residual base lacks: A0 to A, -B0 to B."""
    found: dict[str, _Stored] = {}
    for target in adapter.targets:
        layer: Any = model.get_submodule(target.module)
        a0, b0 = adapter.start.get(target.module, (None, None))
        key = f"{PREFIX}{target.module}"
        found[f"{key}.lora_A.weight"] = _Stored(layer.lora_A[ADAPTER_NAME].weight, a0)
        found[f"{key}.lora_B.weight"] = _Stored(layer.lora_B[ADAPTER_NAME].weight, None if b0 is None else -b0, dim=1)
        if target.use_dora:
            found[f"{key}.lora_magnitude_vector"] = _Stored(layer.lora_magnitude_vector[ADAPTER_NAME].weight)
    return found


def _module_tensors(model: nn.Module, saved: Collection[str]) -> dict[str, _Stored]:
    """Keys and tensors of whole modules. PEFT asks for buffers too, constant ones included."""
    return {
        f"{PREFIX}{name}": _Stored(tensor)
        for name, tensor in model.state_dict(keep_vars=True).items()
        if any(name.startswith(f"{module}.") for module in saved)
    }


def _saved_modules(model: nn.Module, changed: Collection[str]) -> list[str]:
    """Modules that hold the parameters of some groups; PEFT refuses module lists, so their items are named singly."""
    modules: dict[str, None] = {}
    for name, _ in model.named_parameters():
        if not is_adapter_name(name) and group_of(name) in changed:
            modules[_CODEBOOK_HEAD if name.startswith(f"{_CODEBOOK_HEAD}.") else name.rpartition(".")[0]] = None
    return list(modules)


def _config_json(model: nn.Module, adapter: "Adapter", base_name: str, saved: list[str]) -> dict[str, Any]:
    """Content of adapter_config.json; keys left out have PEFT's defaults."""
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for target in adapter.targets:
        doubled = target.module in adapter.start
        ranks[target.module] = target.rank * (2 if doubled else 1)
        # alpha / r is the scale that the pair was trained with, whatever the rule behind it.
        alphas[target.module] = target.scale * 2 * target.rank if doubled else target.alpha
    modules = [native_name(f"{name}.").rstrip(".") for name, _ in model.named_modules()]
    # In the split layout of the same model every expert has layers, which a short name must not select there.
    split = [split_key(name, 0) for name, _ in model.named_parameters() if is_stacked_experts(name)]
    modules += [name.removesuffix(".weight") for name in split]
    rank, rank_pattern = _with_exceptions(ranks)
    alpha, alpha_pattern = _with_exceptions({name: int(v) if v.is_integer() else v for name, v in alphas.items()})
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "use_rslora": adapter.use_rslora and not adapter.start,
        "use_dora": any(target.use_dora for target in adapter.targets),
        "lora_dropout": adapter.dropout,
        "target_modules": short_names(ranks, modules),
        "modules_to_save": saved or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


def _with_exceptions(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The commonest value, and a pattern for the layers that have another."""
    (common, _), *_ = Counter(values.values()).most_common(1)
    pattern: dict[str, Any] = {}
    for value in dict.fromkeys(values.values()):
        if value != common:
            names = [name for name in values if values[name] == value]
            pattern |= dict.fromkeys(short_names(names, values), value)
    return common, pattern
