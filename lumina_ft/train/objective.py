"""What a step needs of a model's output, and the one place where losses are divided.

A loss leaves the model as a sum and a count. Counts are known from the batches before any forward pass, so a step's
global counts divide every micro-batch's sums at once: no mean of means, and nothing divides by a local zero.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lumina_ft.batch import Batch
from lumina_ft.config.schema import LossConfig

TERMS: tuple[str, ...] = ("text", "image", "balance")
"""Loss terms in the order in which their sums and counts are stacked."""


class Objective(nn.Module):
    """The model, reduced to a flat dict of tensors: DeepSpeed's hooks follow dicts, not dataclasses.

    Attributes:
        places: names of the finite checks, known after the first forward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.places: tuple[str, ...] = ()

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Run the model on one pack with labels.

        Returns:
            `totals` [3] fp32 sums in nats, ordered as TERMS (0 for a term the model doesn't have);
            `finite` [places] bool; `expert_counts` [L, E] int64.
        """
        out = self.model(**inputs)
        zero = torch.zeros((), device=inputs["input_ids"].device)
        totals = torch.stack([out.losses[name].total.float() if name in out.losses else zero for name in TERMS])
        self.places = tuple(out.finite)
        return {
            "totals": totals,
            "finite": torch.stack(list(out.finite.values())),
            "expert_counts": out.expert_counts,
        }


def supervised_counts(batches: Sequence[Batch]) -> Tensor:
    """[3] int64 counts of the terms, ordered as TERMS, summed over batches: positions, positions x C, valid tokens."""
    counts = [batch.supervised_counts() for batch in batches]
    return torch.tensor([sum(c[name] for c in counts) for name in TERMS], dtype=torch.int64)


def is_trainable_step(counts: Mapping[str, int], weights: LossConfig) -> bool:
    """Whether anything is supervised: a step with balance loss alone would move the router for nothing."""
    return any(counts[name] > 0 and getattr(weights, name) > 0 for name in ("text", "image"))


def term_scales(counts: Mapping[str, int], weights: LossConfig, world_size: int) -> Tensor:
    """[3] factor of each term's sum: weight / global count, times the ranks, whose gradients get averaged.

    A term that the step doesn't supervise gets 0, not infinity.
    """
    factors = [getattr(weights, name) * world_size / counts[name] if counts[name] else 0.0 for name in TERMS]
    return torch.tensor(factors)


def mean_losses(totals: Mapping[str, float], counts: Mapping[str, int], weights: LossConfig) -> dict[str, float]:
    """Losses for the log: each supervised term in nats per position, and their weighted sum `loss`."""
    means = {name: totals[name] / counts[name] for name in TERMS if counts[name]}
    loss = sum(getattr(weights, name) * value for name, value in means.items())
    return {"loss": loss} | {f"{name}_loss": value for name, value in means.items()}
