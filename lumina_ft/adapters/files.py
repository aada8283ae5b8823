"""Adapter directories in PEFT's own format, read and written without PEFT.

Keys and shapes: see `layout`, and `expert_layout` for routed experts. A directory written here also says which base it
belongs to, in the metadata of the tensor file.

Shape legend: E experts, O outputs, I inputs, r rank.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lumina_ft.adapters.expert_layout import stack_a, stack_b, unstack_a, unstack_b, wrapper_names
from lumina_ft.adapters.layout import (
    BASE_KEY,
    BASE_TENSORS_KEY,
    CONFIG_FILE,
    FLOATS,
    PREFIX,
    WEIGHTS_FILE,
    Keys,
    PairInfo,
    check_config,
    check_experts,
    pair_info,
    read_base,
    read_config,
    sort_keys,
)
from lumina_ft.adapters.live import live_pair
from lumina_ft.adapters.targets import short_names
from lumina_ft.errors import CheckpointError
from lumina_ft.models.groups import base_name as native_name
from lumina_ft.models.groups import group_of, is_adapter_name
from lumina_ft.models.hf_keys import is_stacked_experts, split_key
from lumina_ft.models.identity import BaseIdentity
from lumina_ft.models.json_files import write_json
from lumina_ft.models.tensor_files import ShardWriter, TensorSpec
from lumina_ft.parallel.zero3 import full_shape, whole

if TYPE_CHECKING:
    from lumina_ft.adapters.lora import Adapter

_ONE_FILE = 1 << 62
_CODEBOOK_HEAD = "multi_codebook_head"


class LoraPair(NamedTuple):
    """Tensors of one adapted layer: a [r, I], b [O, r], scale, and for DoRA magnitude [O].

    Of routed experts: a [E, r, I], b [E, O, r], where single experts needn't be contiguous.
    """

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None


@dataclass(frozen=True)
class LoraFile:
    """A checked adapter directory; tensors are read when asked for, as views of the mapped file.

    Attributes:
        path: the directory.
        targets: what is adapted, by name as in `targets.Target.module`, without the tensors.
        modules: parameters and buffers of `modules_to_save`, native name -> shape.
        modules_to_save: as listed in the configuration.
        use_dora: every layer has a magnitude. use_rslora: scales are alpha / sqrt(r).
        dropout: that it was trained with; 0 if experts are adapted, for which PEFT can't say it.
        base_name: `base_model_name_or_path`, if given.
        base: identity of the base, if the writer recorded it.
    """

    path: Path
    targets: Mapping[str, PairInfo]
    modules: Mapping[str, tuple[int, ...]]
    modules_to_save: tuple[str, ...]
    use_dora: bool
    use_rslora: bool
    dropout: float
    base_name: str | None
    base: BaseIdentity | None
    _file: Any = field(repr=False)
    _keys: Mapping[str, Keys] = field(repr=False)

    def pair(self, module: str) -> LoraPair:
        """Tensors of a target."""
        keys, info = self._keys[module], self.targets[module]
        a, b = self._file.get_tensor(keys.a), self._file.get_tensor(keys.b)
        if info.num_experts:
            a, b = unstack_a(a, info.num_experts), unstack_b(b, info.num_experts)
        magnitude = None if keys.magnitude is None else self._file.get_tensor(keys.magnitude)
        return LoraPair(a, b, info.scale, magnitude)

    def module_tensor(self, name: str) -> Tensor:
        """A whole parameter or buffer of `modules_to_save`, by native name."""
        return self._file.get_tensor(PREFIX + name)


def read_adapter(directory: Path) -> LoraFile:
    """Read and check an adapter directory that PEFT or this package wrote.

    Raises:
        CheckpointError: no adapter; not a LoRA, or a kind of it that isn't read here (biases, embeddings, parameters
            other than routed experts, other variants); keys, shapes or ranks that don't agree.
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
    keys, modules = sort_keys(path, shapes, config)
    targets = {module: pair_info(path, module, found, shapes, config) for module, found in keys.items()}
    if not targets:
        raise CheckpointError(f"{path} — holds no lora_A — must hold an adapter's tensors — export the adapter again")
    check_experts(path, targets)
    return LoraFile(
        path=directory,
        targets=targets,
        modules=modules,
        modules_to_save=tuple(config.get("modules_to_save") or ()),
        use_dora=bool(config.get("use_dora")),
        use_rslora=bool(config.get("use_rslora")),
        dropout=float(config.get("lora_dropout") or 0.0),
        base_name=config.get("base_model_name_or_path"),
        base=read_base(path, metadata),
        _file=file,
        _keys=keys,
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
            with whole([entry.live]) as (value,):
                try:
                    if folder is not None and failure is None:
                        writer = writer or stack.enter_context(_open_file(folder, stored, metadata))
                        writer.write(key, entry.stored(value))
                except OSError as error:
                    failure = error
        if failure is not None:
            raise failure
    if folder is not None:
        write_json(folder / CONFIG_FILE, _config_json(model, adapter, base_name, saved))


class _Stored(NamedTuple):
    """A tensor of the file.

    Attributes:
        live: in the model.
        appended: for PiSSA, what follows it along `dim`.
        stack: for routed experts, how [E, ...] becomes the matrix of the file.
    """

    live: Tensor
    appended: Tensor | None = None
    dim: int = 0
    stack: Callable[[Tensor], Tensor] | None = None

    def spec(self) -> TensorSpec:
        with torch.device("meta"):
            whole_value = torch.empty(full_shape(self.live), dtype=self.live.dtype)
            return TensorSpec(tuple(self.stored(whole_value).shape), self.live.dtype)

    def stored(self, value: Tensor) -> Tensor:
        """The tensor of the file. value: the whole one of `live`."""
        if self.stack is not None:
            return self.stack(value)
        if self.appended is not None:
            return torch.cat((value, self.appended.to(value.device, value.dtype)), dim=self.dim)
        return value


def _open_file(folder: Path, stored: Mapping[str, _Stored], metadata: Mapping[str, str]) -> ShardWriter:
    specs = {key: entry.spec() for key, entry in stored.items()}
    stem = WEIGHTS_FILE.removesuffix(".safetensors")
    return ShardWriter(folder, specs, max_shard_bytes=_ONE_FILE, stem=stem, metadata=metadata)


def _adapter_tensors(model: nn.Module, adapter: "Adapter") -> dict[str, _Stored]:
    """Keys and tensors of what is adapted. PiSSA appends what the residual base lacks: A0 to A, -B0 to B."""
    found: dict[str, _Stored] = {}
    experts = wrapper_names(target.module for target in adapter.targets if target.num_experts)
    for target in adapter.targets:
        live = live_pair(model, target)
        key = f"{PREFIX}{experts.get(target.module, target.module)}"
        if target.num_experts:
            found[f"{key}.lora_A.weight"] = _Stored(live.a, stack=stack_a)
            found[f"{key}.lora_B.weight"] = _Stored(live.b, stack=stack_b)
            continue
        a0, b0 = adapter.start.get(target.module, (None, None))
        found[f"{key}.lora_A.weight"] = _Stored(live.a, a0)
        found[f"{key}.lora_B.weight"] = _Stored(live.b, None if b0 is None else -b0, dim=1)
        if live.magnitude is not None:
            found[f"{key}.lora_magnitude_vector"] = _Stored(live.magnitude)
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
    stacked = [name for name, _ in model.named_parameters() if is_stacked_experts(name)]
    modules += [split_key(name, 0).removesuffix(".weight") for name in stacked]
    experts = [target.module for target in adapter.targets if target.num_experts]
    layers = [name for name in ranks if name not in experts]
    rank, rank_pattern = _with_exceptions(ranks, experts)
    alpha, alpha_pattern = _with_exceptions({n: int(v) if v.is_integer() else v for n, v in alphas.items()}, experts)
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
        # PEFT merges experts' pairs into the weights in every pass and refuses a dropout there, even when loading.
        "lora_dropout": 0.0 if experts else adapter.dropout,
        "target_modules": short_names(layers, modules),
        # Modules count too, so that the entry doesn't read like the name of a linear layer.
        "target_parameters": short_names(experts, [*stacked, *modules]) or None,
        "modules_to_save": saved or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


def _with_exceptions(values: Mapping[str, Any], experts: Collection[str]) -> tuple[Any, dict[str, Any]]:
    """The commonest value, and a pattern for the targets that have another.

    Where there are experts theirs is the common one: PEFT takes patterns for parameters, but warns that it doesn't.
    """
    (common, _), *_ = Counter(values[name] for name in experts or values).most_common(1)
    pattern: dict[str, Any] = {}
    for value in dict.fromkeys(values.values()):
        if value != common:
            names = [name for name in values if values[name] == value]
            pattern |= dict.fromkeys(short_names(names, values), value)
    return common, pattern
