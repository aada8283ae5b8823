"""What an adapter is put on, planned from names and sizes alone: works on the meta device.

Two kinds of weights can be adapted: those of linear layers, named by the layer's module, and stacked routed experts
[E, O, I], named by the parameter (`model.layers.1.mlp.experts.gate_proj`), as PEFT names its `target_parameters`.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.table import Table
from torch import nn

from lumina_ft.config.groups import GROUP_ALIASES_U2, GROUPS_U2, expand_group
from lumina_ft.config.lora_schema import LoraConfig
from lumina_ft.errors import ConfigError, nearest
from lumina_ft.models.groups import group_of
from lumina_ft.models.hf_keys import is_stacked_experts
from lumina_ft.parallel.zero3 import full_shape

_LISTED = 6


@dataclass(frozen=True)
class Target:
    """One adapted linear layer, or one projection of a layer's routed experts.

    Attributes:
        module: full name in the model without adapters: of the linear layer, or of the stacked parameter.
        key: entry of `lora.targets` that chose it.
        in_features, out_features: of the layer, or of each expert.
        rank: r.
        alpha: numerator of the scale.
        scale: factor of B A.
        use_dora: the adapter has a magnitude per output.
        num_experts: E, each of which has a pair of its own; 0 for a linear layer.
    """

    module: str
    key: str
    in_features: int
    out_features: int
    rank: int
    alpha: float
    scale: float
    use_dora: bool
    num_experts: int = 0

    @property
    def weight(self) -> str:
        """Native name of the adapted weight, as in checkpoints."""
        return weight_name(self.module, self.num_experts)

    @property
    def numel(self) -> int:
        """Adapter parameters of the whole target, all experts."""
        pairs = self.rank * (self.in_features + self.out_features)
        return (self.num_experts or 1) * (pairs + (self.out_features if self.use_dora else 0))


class Site(NamedTuple):
    """A weight that can be adapted: [out_features, in_features], and num_experts of them if that isn't 0."""

    in_features: int
    out_features: int
    num_experts: int


def weight_name(module: str, num_experts: int) -> str:
    """Native name of the weight of a target."""
    return module if num_experts else f"{module}.weight"


def adaptable(model: nn.Module) -> dict[str, Site]:
    """Every weight of a model without adapters that can be adapted, by its target's name, in the model's order."""
    sites: dict[str, Site] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            sites[name] = Site(module.in_features, module.out_features, 0)
            continue
        for part, param in module.named_parameters(prefix=name, recurse=False):
            if is_stacked_experts(part):
                num_experts, out_features, in_features = full_shape(param)
                sites[part] = Site(in_features, out_features, num_experts)
    return sites


def plan_targets(model: nn.Module, cfg: LoraConfig) -> tuple[Target, ...]:
    """Find the weights that a configuration names, in the model's order.

    A target is a group of `config.groups` that has such weights, or a name: a full one, or a dotted suffix, as PEFT
    takes them. Where several keys of `rank_pattern` or `alpha_pattern` fit a target the first one counts, as in PEFT.

    Args:
        model: without adapters; its weights may be partitioned, spread over ranks or on the meta device.

    Raises:
        ConfigError: a target or a key of a pattern that matches nothing; a suffix that names linear layers and routed
            experts; a target inside `modules_to_save`; DoRA or PiSSA on routed experts; PiSSA with a rank that the
            layer doesn't have.
    """
    names = {name: type(module).__name__ for name, module in model.named_modules() if name}
    sites = adaptable(model)
    picked: dict[str, str] = {}
    for key in cfg.targets:
        found = _select(key, "lora.targets", names, sites)
        _check_one_kind(key, found, sites)
        for name in found:
            picked.setdefault(name, key)
    chosen = {name: picked[name] for name in sites if name in picked}
    ranks = _by_target(cfg.rank_pattern, "lora.rank_pattern", names, sites, chosen)
    alphas = _by_target(cfg.alpha_pattern, "lora.alpha_pattern", names, sites, chosen)
    _check_saved_modules(model, cfg, chosen, sites)
    targets = []
    for name, key in chosen.items():
        rank, alpha = int(ranks.get(name, cfg.rank)), float(alphas.get(name, cfg.alpha))
        scale = scale_of(rank, alpha, use_rslora=cfg.use_rslora)
        inputs, outputs, num_experts = sites[name]
        targets.append(Target(name, key, inputs, outputs, rank, alpha, scale, cfg.use_dora, num_experts))
        _check_variant(targets[-1], cfg)
    return tuple(targets)


def scale_of(rank: int, alpha: float, *, use_rslora: bool) -> float:
    """Factor of B A: alpha / r, or alpha / sqrt(r)."""
    return alpha / math.sqrt(rank) if use_rslora else alpha / rank


class TargetRow(NamedTuple):
    """Weights that one target names and that have one size and rank; `parameters` are the adapter's.

    `experts`: how many each of them stacks; 0 for linear layers.
    """

    target: str
    modules: int
    in_features: int
    out_features: int
    rank: int
    parameters: int
    experts: int


def summarise_targets(targets: Iterable[Target]) -> list[TargetRow]:
    """Adapted weights, counted by target, size and rank."""
    sizes: dict[tuple[str, int, int, int, int], list[int]] = {}
    for target in targets:
        row = (target.key, target.in_features, target.out_features, target.rank, target.num_experts)
        sizes.setdefault(row, []).append(target.numel)
    return [
        TargetRow(key, len(members), inputs, outputs, rank, sum(members), experts)
        for (key, inputs, outputs, rank, experts), members in sizes.items()
    ]


def targets_table(rows: Sequence[TargetRow]) -> Table:
    """What the adapter adapts, for the start of a stage."""
    table = Table(title="adapter")
    for heading in ("target", "modules", "in x out", "rank", "parameters"):
        table.add_column(heading, justify="left" if heading == "target" else "right")
    for row in rows:
        sizes = f"{row.in_features} x {row.out_features}"
        sizes = f"{row.experts} experts, {sizes}" if row.experts else sizes
        table.add_row(row.target, str(row.modules), sizes, str(row.rank), f"{row.parameters:,}")
    table.add_section()
    table.add_row("adapter", str(sum(r.modules for r in rows)), "", "", f"{sum(r.parameters for r in rows):,}")
    return table


def short_names(chosen: Collection[str], universe: Iterable[str]) -> list[str]:
    """Dotted suffixes that select exactly `chosen` among `universe`; full names where no suffix does.

    PEFT matches an entry against a module (or parameter) of that name, or one whose name ends in a dot and the entry.
    """
    carriers: dict[str, set[str]] = {}
    for name in {*universe, *chosen}:
        for suffix in _suffixes(name):
            carriers.setdefault(suffix, set()).add(name)
    wanted = set(chosen)
    covered: set[str] = set()
    out: list[str] = []
    for name in chosen:
        if name in covered:
            continue
        best = next((suffix for suffix in _suffixes(name) if carriers[suffix] <= wanted), name)
        out.append(best)
        covered |= carriers[best] & wanted
    return out


def matches_pattern(key: str, module: str) -> bool:
    """Whether a key of PEFT's rank_pattern or alpha_pattern, a regular expression, is for a target.

    Args:
        module: as `Target.module`; PEFT matches patterns against the full name of an adapted parameter too.
    """
    return re.match(rf"(.*\.)?({key})$", module) is not None


def _suffixes(name: str) -> list[str]:
    """Dotted suffixes, shortest first, the full name last."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]


def _select(key: str, field: str, names: Mapping[str, str], sites: Mapping[str, Site]) -> list[str]:
    """Weights that a target names."""
    if key in GROUPS_U2:
        found = [name for name, site in sites.items() if group_of(weight_name(name, site.num_experts)) == key]
    else:
        found = [name for name in sites if name == key or name.endswith(f".{key}")]
    if not found:
        raise ConfigError(f"{field} — {key!r} — {_why_nothing(key, names, sites)}")
    return found


def _why_nothing(key: str, names: Mapping[str, str], sites: Mapping[str, Site]) -> str:
    present = {group_of(weight_name(name, site.num_experts)) for name, site in sites.items()}
    groups = [group for group in GROUPS_U2 if group in present]
    use = f"use {', '.join(groups)}, or module names such as attention.dense"
    if key in GROUP_ALIASES_U2:
        members = [group for group in GROUP_ALIASES_U2[key] if group in present]
        return f"an alias isn't taken here, because some of its groups have no linear layer — name {', '.join(members)}"
    if key in GROUPS_U2:
        return f"this model has no {'routed experts' if key == 'experts' else 'linear layer in that group'} — {use}"
    other = next((name for name in names if name == key or name.endswith(f".{key}")), None)
    if other is not None:
        inside = [name.removeprefix(f"{other}.") for name in sites if name.rpartition(".")[0] == other]
        use = f"name {', '.join(f'{key}.{part}' for part in inside)}" if inside else use
        return f"{other} is a {names[other]}; adapters go on linear layers and on routed experts' projections — {use}"
    known = [*groups, *dict.fromkeys(suffix for name in sites for suffix in _suffixes(name))]
    return f"matches no module of the model{nearest(key, known)} — {use}"


def _check_one_kind(key: str, found: Sequence[str], sites: Mapping[str, Site]) -> None:
    """Refuse a suffix such as `gate_proj`: it may have been meant for the shared expert alone, or for all."""
    if key in GROUPS_U2:
        return
    experts = [name for name in found if sites[name].num_experts]
    layers = [name for name in found if not sites[name].num_experts]
    if experts and layers:
        raise ConfigError(
            f"lora.targets — {key!r} — names linear layers ({layers[0]}, …) and routed experts ({experts[0]}, …), "
            f"whose adapters cost very different amounts — write experts.{key} for the experts, and "
            f"{' and '.join(dict.fromkeys(_parent(name) + '.' + key for name in layers))} for the layers"
        )


def _parent(name: str) -> str:
    """Last part of the name of the module that holds this one."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _check_variant(target: Target, cfg: LoraConfig) -> None:
    """What can't be put on this weight."""
    least = min(target.in_features, target.out_features)
    if target.num_experts and cfg.use_dora:
        raise ConfigError(
            f"lora.use_dora — true with {target.key!r} in lora.targets ({target.module}) — PEFT has no magnitudes for "
            "stacked experts, so no tool could load the adapter — set use_dora: false, or leave the experts out"
        )
    if target.num_experts and cfg.init.startswith("pissa"):
        raise ConfigError(
            f"lora.init — {cfg.init} with {target.key!r} in lora.targets ({target.module}) — PiSSA is for linear "
            f"layers: it would decompose {target.num_experts} matrices in each of them — use init: default or gaussian"
        )
    if cfg.init.startswith("pissa") and target.rank > least:
        raise ConfigError(
            f"lora.rank — {target.rank} for {target.module} of {target.in_features} x {target.out_features} — init: "
            f"{cfg.init} takes that many singular vectors of the weight — at most {least}, set lora.rank_pattern"
        )


def _by_target(
    pattern: dict[str, int] | dict[str, float],
    field: str,
    names: Mapping[str, str],
    sites: Mapping[str, Site],
    chosen: Collection[str],
) -> dict[str, int | float]:
    """Value of each target that a pattern names."""
    values: dict[str, int | float] = {}
    for key, value in pattern.items():
        hits = [name for name in _select(key, field, names, sites) if name in chosen]
        if not hits:
            raise ConfigError(
                f"{field} — {key!r} — names none of the adapted layers — add it to lora.targets, or remove it"
            )
        for name in hits:
            values.setdefault(name, value)
    return values


def _check_saved_modules(
    model: nn.Module, cfg: LoraConfig, chosen: Mapping[str, str], sites: Mapping[str, Site]
) -> None:
    present = {group_of(name) for name, _ in model.named_parameters()}
    for entry in cfg.modules_to_save:
        groups = expand_group(entry, "lora.modules_to_save")
        if not present & set(groups):
            raise ConfigError(
                f"lora.modules_to_save — {entry!r} — this model has none of its parameters — remove the entry"
            )
        inside = [name for name in chosen if group_of(weight_name(name, sites[name].num_experts)) in groups]
        if inside:
            rest = f" and {len(inside) - _LISTED} more" if len(inside) > _LISTED else ""
            raise ConfigError(
                f"lora.targets — {chosen[inside[0]]!r} — {', '.join(inside[:_LISTED])}{rest}: in lora.modules_to_save "
                f"({entry!r}) too, which trains them in full — remove one of the two"
            )
