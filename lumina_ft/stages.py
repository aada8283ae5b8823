"""What a stage trains and how fast: planned as data first, applied to a model second."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table

from lumina_ft.config.groups import ADAPTER_GROUP, GROUPS_U2, expand_group
from lumina_ft.config.schema import RunConfig, selected_groups
from lumina_ft.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


class ParamInfo(NamedTuple):
    """A parameter as planning sees it: its name, freezing group, and full (unpartitioned) shape."""

    name: str
    group: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class StagePlan:
    """One stage's trainable set.

    Attributes:
        index: position of the stage in the run, from 0.
        name: of the stage.
        params: every parameter of the model, in the model's order.
        lr: peak learning rate of each trained group that the model has; canonical order.
    """

    index: int
    name: str
    params: tuple[ParamInfo, ...]
    lr: Mapping[str, float]

    @property
    def trained(self) -> tuple[ParamInfo, ...]:
        """Parameters that get gradients, in the model's order."""
        return tuple(p for p in self.params if p.group in self.lr)

    def table(self) -> Table:
        """Groups with their sizes and learning rates, for the start of a stage."""
        table = Table(title=f"stage {self.index + 1}: {self.name}")
        for heading in ("group", "tensors", "parameters", "lr"):
            table.add_column(heading, justify="left" if heading == "group" else "right")
        for group in (*GROUPS_U2, ADAPTER_GROUP):
            members = [p for p in self.params if p.group == group]
            if members:
                lr = f"{self.lr[group]:.3g}" if group in self.lr else "frozen"
                table.add_row(group, str(len(members)), f"{sum(p.numel for p in members):,}", lr)
        total, trained = (sum(p.numel for p in chosen) for chosen in (self.params, self.trained))
        table.add_section()
        table.add_row("trained", str(len(self.trained)), f"{trained:,}", f"{100 * trained / total:.1f} %")
        return table


def plan_stage(cfg: RunConfig, index: int, params: Iterable[ParamInfo]) -> StagePlan:
    """Choose the trainable parameters and learning rates of stage `index`.

    A group named outright in `group_lr` beats an alias that contains it; a smaller alias beats a larger one.

    Raises:
        ConfigError: the model has no parameter in any group that the stage trains (text-only model, `vision`).
    """
    stage = cfg.stages[index]
    known = tuple(params)
    present = {p.group for p in known}
    assert present <= {*GROUPS_U2, ADAPTER_GROUP}, f"unknown groups {sorted(present - set(GROUPS_U2))}"
    base = stage.lr if stage.lr is not None else cfg.optim.lr
    lr = {group: base for group in cfg.trained_groups(index) if group in present}
    if stage.lora == "train":
        lr[ADAPTER_GROUP] = stage.group_lr.get(ADAPTER_GROUP, base)
    if stage.train and not present & set(selected_groups(stage)) or not lr:
        raise ConfigError(
            f"stages.{index}.train — {list(stage.train)} minus {list(stage.freeze)} — names nothing in this model — "
            f"choose among {', '.join(g for g in GROUPS_U2 if g in present)}"
        )
    named = [name for name in stage.group_lr if name != ADAPTER_GROUP]
    specific_last = sorted(named, key=lambda name: -len(expand_group(name, "group_lr")))
    for name in specific_last:
        for group in expand_group(name, f"stages.{index}.group_lr"):
            if group in lr:
                lr[group] = stage.group_lr[name]
    return StagePlan(index, stage.name, known, lr)


def apply_plan(model: "nn.Module", plan: StagePlan) -> None:
    """Set `requires_grad` of every parameter as planned."""
    trained = {p.name for p in plan.trained}
    known = {p.name for p in plan.params}
    for name, param in model.named_parameters():
        assert name in known, f"{name} was not planned"
        param.requires_grad_(name in trained)
