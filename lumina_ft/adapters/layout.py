"""What an adapter directory may hold: its keys, shapes and configuration, checked from headers alone.

`adapter_config.json` and `adapter_model.safetensors`, whose keys are `base_model.model.<module>.lora_A.weight` [r, I],
`….lora_B.weight` [O, r] and, for DoRA, `….lora_magnitude_vector` [O]; whole modules beside the adapter
(`modules_to_save`) are stored under their own names. Adapters of routed experts: see `expert_layout`.

Shape legend: E experts, O outputs, I inputs, r rank.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lumina_ft.adapters.expert_layout import expert_targets, is_wrapper
from lumina_ft.adapters.targets import matches_pattern, scale_of, weight_name
from lumina_ft.errors import CheckpointError
from lumina_ft.models.hf_keys import is_stacked_experts, parse_split
from lumina_ft.models.identity import BaseIdentity
from lumina_ft.models.json_files import read_json_object

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
BASE_KEY = "lumina_ft.base"
BASE_TENSORS_KEY = "lumina_ft.base_tensors"
PREFIX = "base_model.model."

_PART = re.compile(r"(?P<module>.+)\.lora_(?P<part>A\.weight|B\.weight|magnitude_vector(\.weight)?)")
FLOATS = ("F64", "F32", "F16", "BF16")
_READ = {
    "peft_type",
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "lora_dropout",
    "modules_to_save",
    "base_model_name_or_path",
    "bias",
    "fan_in_fan_out",
    "init_lora_weights",
    "target_parameters",
}
_WITHOUT_EFFECT = {
    "auto_mapping",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
"""Keys that choose where PEFT puts an adapter, or how it begins; the tensors say both."""
_HARMLESS_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Initialisations that leave the base as it is; after others the adapter belongs to a residual that no file holds."""


class PairInfo(NamedTuple):
    """What is known of an adapted weight from headers alone.

    `weight` is its native name; `num_experts` is 0 for a linear layer. Other fields as in `targets.Target`.
    """

    rank: int
    alpha: float
    scale: float
    in_features: int
    out_features: int
    num_experts: int
    weight: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the adapted weight: [O, I], or [E, O, I]."""
        matrix = (self.out_features, self.in_features)
        return (self.num_experts, *matrix) if self.num_experts else matrix


def read_config(directory: Path) -> dict[str, Any]:
    """Content of adapter_config.json.

    Raises:
        CheckpointError: missing, or not a JSON object.
    """
    return read_json_object(directory / CONFIG_FILE, "an adapter directory")


def check_config(directory: Path, config: dict[str, Any]) -> None:
    """Refuse what would change the meaning of the tensors."""
    path = directory / CONFIG_FILE

    def refuse(key: str, rule: str) -> CheckpointError:
        return CheckpointError(f"{path} — {key}: {config.get(key)!r} — {rule}")

    if config.get("peft_type") != "LORA":
        raise refuse("peft_type", "only LORA is read — convert the adapter with PEFT first")
    parameters = config.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        raise refuse("target_parameters", "must be a list of parameter names — copy the file again")
    if parameters and config.get("use_dora"):
        raise refuse("target_parameters", "PEFT knows no use_dora for them — the file was edited: export it again")
    if parameters and config.get("lora_dropout"):
        raise refuse("target_parameters", "PEFT knows no lora_dropout for them — set lora_dropout to 0")
    if config.get("bias") not in (None, "none"):
        raise refuse("bias", "trained biases aren't read — export the adapter with bias: none")
    if config.get("fan_in_fan_out"):
        raise refuse("fan_in_fan_out", "the models here have no transposed layers — it belongs to another model")
    init = config.get("init_lora_weights", True)
    if not any(init is known or (isinstance(known, str) and init == known) for known in _HARMLESS_INITS):
        raise refuse(
            "init_lora_weights",
            "such an adapter belongs to a changed base — save it with PEFT's path_initial_model_for_weight_conversion",
        )
    if type(config.get("r")) is not int or not _is_number(config.get("lora_alpha")):
        raise refuse("r", "r and lora_alpha must be numbers — copy the file again")
    dropout = config.get("lora_dropout") or 0.0
    if not _is_number(dropout) or not 0.0 <= dropout <= 1.0:
        raise refuse("lora_dropout", "must be a number from 0 to 1 — copy the file again")
    for key in ("rank_pattern", "alpha_pattern"):
        if not _is_pattern(config.get(key) or {}):
            raise refuse(key, "must map regular expressions to numbers — copy the file again")
    saved = config.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(name, str) for name in saved):
        raise refuse("modules_to_save", "must be a list of module names — copy the file again")
    for key, value in config.items():
        if key not in _READ and key not in _WITHOUT_EFFECT and value not in (None, False, [], {}, "", 0):
            raise refuse(key, "a kind of LoRA that isn't read here — merge it with PEFT, or train without it")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_pattern(value: Any) -> bool:
    """Whether this is a dict from valid regular expressions to numbers."""
    if not isinstance(value, dict) or not all(map(_is_number, value.values())):
        return False
    try:
        return all(re.compile(key) for key in value)
    except re.error:
        return False


class Keys(NamedTuple):
    """Keys of the tensors of one adapted weight. stacked: it is a parameter with all experts of a layer."""

    a: str
    b: str
    magnitude: str | None
    stacked: bool


def sort_keys(
    path: Path, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]
) -> tuple[dict[str, Keys], dict[str, tuple[int, ...]]]:
    """Keys of each target by its name, and shapes of tensors of whole modules by native name."""
    saved = tuple(config.get("modules_to_save") or ())
    parts: dict[str, dict[str, str]] = {}
    modules: dict[str, tuple[int, ...]] = {}
    for key, shape in shapes.items():
        name = key.removeprefix(PREFIX)
        part = _PART.fullmatch(name)
        if name == key or _is_nested(name, part["module"] if part is not None else ""):
            raise CheckpointError(
                f"{path} — {key} — keys start with {PREFIX!r} and name linear layers or routed experts — export the "
                "adapter with PEFT"
            )
        if part is not None:
            _refuse_single_expert(path, part["module"])
            slot = {"A": "a", "B": "b", "m": "magnitude"}[part["part"][0]]
            parts.setdefault(part["module"], {})[slot] = key
        elif ".lora_" not in name and any(_inside(entry, name) for entry in saved):
            modules[name] = shape
        else:
            raise CheckpointError(
                f"{path} — {key} — is neither lora_A, lora_B nor lora_magnitude_vector of an adapted weight, nor in "
                f"modules_to_save ({', '.join(saved) or 'none'}) — an unknown layout, which isn't read"
            )
    for entry in saved:
        if not any(_inside(entry, name) for name in modules):
            raise CheckpointError(f"{path} — modules_to_save: {entry!r} — has no tensor in the file — export it again")
    wrappers = [module for module in parts if is_wrapper(module)]
    experts = expert_targets(path, wrappers, config.get("target_parameters") or ())
    use_dora = bool(config.get("use_dora"))
    targets = {experts.get(n, n): _keys(path, n, found, use_dora, n in experts) for n, found in parts.items()}
    return targets, modules


def _is_nested(name: str, module: str) -> bool:
    """Whether a tensor is inside a layer that another adapter wraps, or named as PEFT never names one."""
    return (".base_layer." in name and not is_wrapper(module)) or is_stacked_experts(module)


def _refuse_single_expert(path: Path, module: str) -> None:
    """PEFT on a model of the split layout, whose experts are linear layers, names each of them."""
    if (found := parse_split(f"{module}.weight")) is not None:
        raise CheckpointError(
            f"{path} — {module} — is one expert of a model in the split layout; adapters of routed experts are read as "
            f"target_parameters of the packed layout ({found[0]}) — merge it into its split base with PEFT, or train "
            "it on the packed layout"
        )


def _inside(entry: str, name: str) -> bool:
    """Whether a tensor belongs to a module that `modules_to_save` names, by a full name or a dotted suffix."""
    return f".{entry}." in f".{name}"


def _keys(path: Path, module: str, parts: Mapping[str, str], use_dora: bool, stacked: bool) -> Keys:
    wanted = {"a", "b"} | ({"magnitude"} if use_dora else set())
    if set(parts) != wanted:
        names = {"a": "lora_A", "b": "lora_B", "magnitude": "lora_magnitude_vector"}
        raise CheckpointError(
            f"{path} — {module}: holds {', '.join(names[k] for k in sorted(parts))} — with use_dora={use_dora} a layer "
            f"has {', '.join(names[k] for k in sorted(wanted))} — export the adapter again"
        )
    return Keys(parts["a"], parts["b"], parts.get("magnitude"), stacked)


def pair_info(
    path: Path, module: str, keys: Keys, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]
) -> PairInfo:
    """Check one target's tensors against each other and the configuration."""
    rank = _pattern_value(config, "rank_pattern", module, config["r"])
    alpha = float(_pattern_value(config, "alpha_pattern", module, config["lora_alpha"]))
    a, b = shapes[keys.a], shapes[keys.b]
    matrices = len(a) == 2 and len(b) == 2 and 0 not in (*a, *b) and type(rank) is int and rank > 0
    if keys.stacked:
        fits = matrices and a[0] % rank == 0 and b[1] == a[0]
        wanted = f"[experts * {rank}, inputs] and [outputs, {rank} * experts]"
    else:
        fits = matrices and a[0] == rank and b[1] == rank
        wanted = f"[{rank}, inputs] and [outputs, {rank}]"
    if not fits:
        raise CheckpointError(
            f"{path} — {module}: lora_A {list(a)}, lora_B {list(b)} — must be {wanted} "
            f"for the configured rank {rank} — tensors and {CONFIG_FILE} are of different exports: copy them again"
        )
    if keys.magnitude is not None and shapes[keys.magnitude] != (b[0],):
        raise CheckpointError(
            f"{path} — {module}: lora_magnitude_vector {list(shapes[keys.magnitude])} — must be [{b[0]}] — "
            "export the adapter again"
        )
    experts = a[0] // rank if keys.stacked else 0
    scale = scale_of(rank, alpha, use_rslora=bool(config.get("use_rslora")))
    return PairInfo(rank, alpha, scale, a[1], b[0], experts, weight_name(module, experts))


def check_experts(path: Path, targets: Mapping[str, PairInfo]) -> None:
    """Routed experts have one count, one hidden size and one width in all layers; wrong ranks and names show here."""
    first: tuple[str, tuple[int, int, int]] | None = None
    for module, info in targets.items():
        if not info.num_experts:
            continue
        outer, inner = info.in_features, info.out_features
        sizes = (info.num_experts, *((inner, outer) if module.endswith(".down_proj") else (outer, inner)))
        first = first or (module, sizes)
        if sizes != first[1]:
            raise CheckpointError(
                f"{path} — {module}: {sizes[0]} experts of {sizes[1]} x {sizes[2]} by its rank {info.rank}, "
                f"{first[1][0]} of {first[1][1]} x {first[1][2]} in {first[0]} — all layers have the same — tensors "
                f"and {CONFIG_FILE} are of different exports: copy them again"
            )


def _pattern_value(config: Mapping[str, Any], pattern: str, module: str, default: Any) -> Any:
    entries: dict[str, Any] = config.get(pattern) or {}
    return next((value for key, value in entries.items() if matches_pattern(key, module)), default)


def read_base(path: Path, metadata: Mapping[str, str]) -> BaseIdentity | None:
    if BASE_KEY not in metadata:
        return None
    try:
        return BaseIdentity(metadata[BASE_KEY], dict(json.loads(metadata.get(BASE_TENSORS_KEY, "{}"))))
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} — metadata {BASE_TENSORS_KEY}: {error} — must be a JSON object — copy the file again"
        ) from error
