"""AdamW's parameter groups, and learning rates as a function of the step."""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch.nn import Parameter

from lumina_ft.config.schema import OptimConfig
from lumina_ft.models.groups import is_adapter_b
from lumina_ft.parallel.expert_parallel import ExpertParallel, optimizer_keys, sharing_of
from lumina_ft.stages import ParamInfo, StagePlan

Schedule = Literal["cosine", "linear", "constant"]


def build_optimizer(
    params: Mapping[str, Parameter], plan: StagePlan, cfg: OptimConfig, *, lr_ratio: float = 1.0
) -> tuple[torch.optim.AdamW, dict[str, float]]:
    """AdamW over the trained parameters.

    Parameters that share a learning rate and decay share a group, because ZeRO flattens group by group; experts that
    ranks share among them have groups of their own. Norms, biases and other parameters with at most one dimension don't
    decay.

    Args:
        params: every parameter of the model by name.
        lr_ratio: LoRA+ (arXiv:2402.12354): learning rate of an adapter's B matrices as a multiple of the others'.

    Returns:
        The optimizer and the peak learning rate of each group, by the group's `label`.
    """
    members: dict[tuple[float, float, ExpertParallel | None], list[Parameter]] = {}
    for info in plan.trained:
        param = params[info.name]
        lr, decay = rate_and_decay(info, plan, cfg, lr_ratio)
        members.setdefault((lr, decay, sharing_of(param)), []).append(param)
    groups = []
    peaks: dict[str, float] = {}
    for (lr, decay, experts), group in members.items():
        label = f"lr={lr!r},decay={decay!r}" + (",experts" if experts else "")
        groups.append({"params": group, "lr": lr, "weight_decay": decay, "label": label, **optimizer_keys(experts)})
        peaks[label] = lr
    optimizer = torch.optim.AdamW(groups, lr=max(peaks.values()), betas=cfg.betas, eps=cfg.eps, fused=True)
    return optimizer, peaks


def rate_and_decay(info: ParamInfo, plan: StagePlan, cfg: OptimConfig, lr_ratio: float) -> tuple[float, float]:
    """Peak learning rate and weight decay of a trained parameter; args as `build_optimizer`."""
    ratio = lr_ratio if is_adapter_b(info.name) else 1.0
    return plan.lr[info.group] * ratio, cfg.weight_decay if len(info.shape) > 1 else 0.0


def lr_factor(step: int, total_steps: int, *, schedule: Schedule, warmup_ratio: float, min_lr_ratio: float) -> float:
    """Learning rate of a step as a share of the peak.

    Rises linearly over the first `warmup_ratio` of the steps, never 0, reaching 1 in the last of them; then follows the
    schedule, which reaches `min_lr_ratio` one step after the end, so that no step is spent at a rate of 0.

    Args:
        step: 0-based step of the stage.
    """
    warmup = math.ceil(warmup_ratio * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    progress = (step - warmup) / max(1, total_steps - warmup)
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress
    return min_lr_ratio + (1.0 - min_lr_ratio) * shape
