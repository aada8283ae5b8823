"""Held-out loss: the same samples, noise and condition in every evaluation, so that values compare."""

import math

import torch

from lumina_ft.config.schema import LossConfig
from lumina_ft.data.dataset import PackedDataset
from lumina_ft.errors import RunError
from lumina_ft.parallel.dist import World
from lumina_ft.parallel.engine import Engine
from lumina_ft.train.batches import step_batches
from lumina_ft.train.objective import TERMS, mean_losses, supervised_counts


@torch.no_grad()
def evaluate(
    engine: Engine, data: PackedDataset, world: World, *, weights: LossConfig, packs_per_step: int
) -> dict[str, float]:
    """Losses over the whole held-out split. Collective.

    Args:
        packs_per_step: packs in flight over all ranks; the ranks must divide it. Has no influence on the result.

    Returns:
        `eval_loss` and `eval_text_loss`, `eval_image_loss`, `eval_balance_loss` where supervised.

    Raises:
        RunError: a loss isn't finite; on every rank, before a checkpoint of these weights is written.
    """
    engine.train(False)
    sums = torch.zeros(2, len(TERMS), dtype=torch.float64)
    number = 0
    for step in range(data.steps_per_epoch(packs_per_step)):
        for batch in step_batches(data, step, packs_per_step, world):
            number += 1
            world.progress.mark("evaluate", micro_batch=number, batch=batch)
            out = engine.module(**batch.to(world.device).model_inputs())
            sums[0] += out["totals"].double().cpu()
            sums[1] += supervised_counts([batch])
    engine.train()
    totals, counts = world.sum(sums.to(world.device)).tolist()
    losses = mean_losses(
        dict(zip(TERMS, totals, strict=True)), {name: int(n) for name, n in zip(TERMS, counts, strict=True)}, weights
    )
    broken = [name for name, value in losses.items() if not math.isfinite(value)]
    if broken:
        raise RunError(
            f"held-out {', '.join(broken)} — {losses[broken[0]]} — must be finite — lower the learning rate and resume "
            "from the last checkpoint"
        )
    return {f"eval_{name}": value for name, value in losses.items()}
