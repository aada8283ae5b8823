"""The adapter of a stage: planned on the meta device, then put on the model that has its weights."""

import torch

from lumina_ft.adapters.lora import Adapter, attach_adapter
from lumina_ft.config.lora_schema import LoraConfig
from lumina_ft.config.schema import RunConfig
from lumina_ft.errors import ConfigError
from lumina_ft.models.groups import group_of
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.parallel.progress import LOAD, Progress
from lumina_ft.stages import ParamInfo, StagePlan
from lumina_ft.train.dropout import draws_dropout
from lumina_ft.train.start import Start


def describe_parameters(model_config: U2Config, lora: LoraConfig | None = None) -> list[ParamInfo]:
    """Every parameter of the model, and of the adapter on it, without allocating one.

    Raises:
        ConfigError: the adapter doesn't fit the model, see `adapters.targets.plan_targets`.
    """
    with torch.device("meta"):
        model = U2ForDiffusion(model_config)
        if lora is not None:
            attach_adapter(model, lora, seed=0)
    return [ParamInfo(name, group_of(name), tuple(p.shape)) for name, p in model.named_parameters()]


def stage_lora(cfg: RunConfig, stage_index: int) -> LoraConfig | None:
    """The adapter that is active in a stage, trained or frozen."""
    return None if cfg.stages[stage_index].lora == "off" else cfg.lora


def attach_stage_adapter(
    model: U2ForDiffusion, cfg: RunConfig, plan: StagePlan, start: Start, *, seed: int, progress: Progress
) -> Adapter | None:
    """Put the stage's adapter on its model: the one that the start holds, or a new one. Collective.

    Args:
        model: with the start's weights.
        seed: of a new adapter's values.
        progress: gets a mark for each layer of a new adapter.

    Raises:
        ConfigError: PiSSA, in a run that also trains adapted layers in full.
        CheckpointError: the start holds another adapter than the one configured.
    """
    lora = stage_lora(cfg, plan.index)
    if lora is None:
        return None
    adapter = attach_adapter(
        model,
        lora,
        seed=seed,
        source=start.adapter,
        dtype=getattr(torch, cfg.model.dtype),
        frozen=cfg.stages[plan.index].lora == "freeze",
        on_layer=lambda: progress.mark(LOAD),
    )
    if cfg.model.gradient_checkpointing and draws_dropout(cfg, plan.index):
        model.gradient_checkpointing_enable({"preserve_rng_state": True})
    return adapter


def check_pissa(cfg: RunConfig, plan: StagePlan, start: Start) -> None:
    """PiSSA takes the adapter's start out of the weights on disk, which must then stay as they are.

    Raises:
        ConfigError: the stage, or an earlier one that the adapter comes from, trains adapted layers in full.
    """
    lora = stage_lora(cfg, plan.index)
    if lora is None or not lora.init.startswith("pissa"):
        return
    layers = {info.name.partition(".lora_A.")[0] for info in plan.params if ".lora_A." in info.name}
    adapted = {group_of(f"{layer}.weight") for layer in layers}
    both = sorted(adapted & (set(plan.lr) | start.changed))
    if both:
        raise ConfigError(
            f"stages.{plan.index}.train — {', '.join(both)} — lora.init: {lora.init} takes the adapter's start out of "
            "those weights, so they must stay as they are — freeze them, merge the adapter before this stage "
            "(lora_at_end), or use lora.init: default"
        )
