"""Which linear layers an adapter is put on, planned from names and sizes alone: works on the meta device."""

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.table import Table
from torch import nn

from lumina_ft.config.groups import GROUP_ALIASES_U2, GROUPS_U2, expand_group
from lumina_ft.config.lora_schema import LoraConfig
from lumina_ft.errors import ConfigError, nearest
from lumina_ft.models.groups import group_of

_LISTED = 6


@dataclass(frozen=True)
class Target:
    """One adapted linear layer.

    Attributes:
        module: full name in the model without adapters.
        key: entry of `lora.targets` that chose it.
        in_features, out_features: of the layer.
        rank: r.
        alpha: numerator of the scale.
        scale: factor of B A.
        use_dora: the adapter has a magnitude per output.
    """

    module: str
    key: str
    in_features: int
    out_features: int
    rank: int
    alpha: float
    scale: float
    use_dora: bool

    @property
    def numel(self) -> int:
        """Adapter parameters of this layer."""
        pairs = self.rank * (self.in_features + self.out_features)
        return pairs + (self.out_features if self.use_dora else 0)


def plan_targets(model: nn.Module, cfg: LoraConfig) -> tuple[Target, ...]:
    """Find the linear layers that a configuration names, in the model's order.

    A target is a group of `config.groups` that has linear layers, or a module name: a full one, or a dotted suffix, as
    PEFT takes them. Where several keys of `rank_pattern` or `alpha_pattern` fit a layer the first one counts, as in
    PEFT.

    Args:
        model: without adapters; its weights may be partitioned or on the meta device.

    Raises:
        ConfigError: a target or a key of a pattern that matches nothing; a target inside `modules_to_save`; PiSSA with
            a rank that the layer doesn't have.
    """
    names = {name: type(module).__name__ for name, module in model.named_modules() if name}
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    chosen: dict[str, str] = {}
    for key in cfg.targets:
        for name in _select(key, "lora.targets", names, linears):
            chosen.setdefault(name, key)
    chosen = {name: chosen[name] for name in linears if name in chosen}
    ranks = _by_layer(cfg.rank_pattern, "lora.rank_pattern", names, chosen)
    alphas = _by_layer(cfg.alpha_pattern, "lora.alpha_pattern", names, chosen)
    _check_saved_modules(model, cfg, chosen)
    targets = []
    for name, key in chosen.items():
        rank, alpha = int(ranks.get(name, cfg.rank)), float(alphas.get(name, cfg.alpha))
        scale = scale_of(rank, alpha, use_rslora=cfg.use_rslora)
        layer = linears[name]
        target = Target(name, key, layer.in_features, layer.out_features, rank, alpha, scale, cfg.use_dora)
        if cfg.init.startswith("pissa") and rank > min(layer.in_features, layer.out_features):
            raise ConfigError(
                f"lora.rank — {rank} for {name} of {layer.in_features} x {layer.out_features} — init: {cfg.init} takes "
                f"that many singular vectors of the weight — at most {min(layer.in_features, layer.out_features)}, "
                f"set lora.rank_pattern"
            )
        targets.append(target)
    return tuple(targets)


def scale_of(rank: int, alpha: float, *, use_rslora: bool) -> float:
    """Factor of B A: alpha / r, or alpha / sqrt(r)."""
    return alpha / math.sqrt(rank) if use_rslora else alpha / rank


class TargetRow(NamedTuple):
    """Layers that one target names and that have one size and rank; `parameters` are the adapter's."""

    target: str
    modules: int
    in_features: int
    out_features: int
    rank: int
    parameters: int


def summarise_targets(targets: Iterable[Target]) -> list[TargetRow]:
    """Adapted layers, counted by target, size and rank."""
    sizes: dict[tuple[str, int, int, int], list[int]] = {}
    for target in targets:
        row = (target.key, target.in_features, target.out_features, target.rank)
        sizes.setdefault(row, []).append(target.numel)
    return [
        TargetRow(key, len(members), inputs, outputs, rank, sum(members))
        for (key, inputs, outputs, rank), members in sizes.items()
    ]


def targets_table(rows: Sequence[TargetRow]) -> Table:
    """What the adapter adapts, for the start of a stage."""
    table = Table(title="adapter")
    for heading in ("target", "modules", "in x out", "rank", "parameters"):
        table.add_column(heading, justify="left" if heading == "target" else "right")
    for row in rows:
        sizes = f"{row.in_features} x {row.out_features}"
        table.add_row(row.target, str(row.modules), sizes, str(row.rank), f"{row.parameters:,}")
    table.add_section()
    table.add_row("adapter", str(sum(r.modules for r in rows)), "", "", f"{sum(r.parameters for r in rows):,}")
    return table


def short_names(chosen: Collection[str], universe: Iterable[str]) -> list[str]:
    """Dotted suffixes that select exactly `chosen` among `universe`; full names where no suffix does.

    PEFT matches an entry against a module of that name, or one whose name ends in a dot and the entry.
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
    """Whether a key of PEFT's rank_pattern or alpha_pattern, a regular expression, is for a module."""
    return re.match(rf"(.*\.)?({key})$", module) is not None


def _suffixes(name: str) -> list[str]:
    """Dotted suffixes, shortest first, the full name last."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]


def _select(key: str, field: str, names: dict[str, str], linears: Collection[str]) -> list[str]:
    """Linear layers that a target names."""
    if key in GROUPS_U2:
        found = [name for name in linears if group_of(f"{name}.weight") == key]
    else:
        found = [name for name in linears if name == key or name.endswith(f".{key}")]
    if not found:
        raise ConfigError(f"{field} — {key!r} — {_why_nothing(key, names, linears)}")
    return found


def _why_nothing(key: str, names: dict[str, str], linears: Collection[str]) -> str:
    present = {group_of(f"{name}.weight") for name in linears}
    groups = [group for group in GROUPS_U2 if group in present]
    use = f"use {', '.join(groups)}, or module names such as attention.dense"
    if key in GROUP_ALIASES_U2:
        members = [group for group in GROUP_ALIASES_U2[key] if group in present]
        return f"an alias isn't taken here, because some of its groups have no linear layer — name {', '.join(members)}"
    if key in GROUPS_U2:
        return f"this model has no linear layer in that group — {use}"
    other = next((name for name in names if name == key or name.endswith(f".{key}")), None)
    if other is not None:
        return f"{other} is a {names[other]}; adapters go on linear layers — {use}"
    known = [*groups, *dict.fromkeys(suffix for name in linears for suffix in _suffixes(name))]
    return f"matches no module of the model{nearest(key, known)} — {use}"


def _by_layer(
    pattern: dict[str, int] | dict[str, float], field: str, names: dict[str, str], chosen: Collection[str]
) -> dict[str, int | float]:
    """Value of each target that a pattern names."""
    values: dict[str, int | float] = {}
    for key, value in pattern.items():
        hits = [name for name in _select(key, field, names, _linears_of(names)) if name in chosen]
        if not hits:
            raise ConfigError(
                f"{field} — {key!r} — names none of the adapted layers — add it to lora.targets, or remove it"
            )
        for name in hits:
            values.setdefault(name, value)
    return values


def _linears_of(names: dict[str, str]) -> list[str]:
    return [name for name, kind in names.items() if kind == nn.Linear.__name__]


def _check_saved_modules(model: nn.Module, cfg: LoraConfig, chosen: dict[str, str]) -> None:
    present = {group_of(name) for name, _ in model.named_parameters()}
    for entry in cfg.modules_to_save:
        groups = expand_group(entry, "lora.modules_to_save")
        if not present & set(groups):
            raise ConfigError(
                f"lora.modules_to_save — {entry!r} — this model has none of its parameters — remove the entry"
            )
        inside = [name for name in chosen if group_of(f"{name}.weight") in groups]
        if inside:
            rest = f" and {len(inside) - _LISTED} more" if len(inside) > _LISTED else ""
            raise ConfigError(
                f"lora.targets — {chosen[inside[0]]!r} — {', '.join(inside[:_LISTED])}{rest}: in lora.modules_to_save "
                f"({entry!r}) too, which trains them in full — remove one of the two"
            )
