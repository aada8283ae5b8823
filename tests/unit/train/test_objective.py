"""One division per step: sums over all micro-batches by global counts (never a mean of means)."""

from dataclasses import replace

import pytest
import torch

from lumina_ft.batch import Batch, LossSum
from lumina_ft.config.schema import LossConfig
from lumina_ft.models.u2 import U2Output
from lumina_ft.train.objective import (
    TERMS,
    Objective,
    is_trainable_step,
    mean_losses,
    supervised_counts,
    term_scales,
)

WEIGHTS = LossConfig(text=1.0, image=0.5, balance=0.01)


def batch(text: int, image: int, size: int = 10, codebooks: int = 4) -> Batch:
    """A pack with `text` supervised text rows and `image` supervised image rows."""
    labels = torch.full((size, codebooks), -100)
    types = torch.ones(size, dtype=torch.uint8)
    types[:text] = 3
    types[text : text + image] = 4
    labels[: text + image] = 1
    zeros = torch.zeros(size, dtype=torch.int64)
    flags = torch.zeros(size, dtype=torch.bool)
    return Batch(
        input_ids=torch.zeros(size, codebooks, dtype=torch.int64),
        labels=labels,
        type_ids=types,
        position_ids=zeros,
        turn_ids=zeros,
        block_ids=zeros,
        is_clean=flags,
        noised=flags,
        cu_seqlens=torch.tensor([0, size], dtype=torch.int32),
        valid=torch.ones(size, dtype=torch.bool),
        sample_ids=torch.tensor([7]),
        task_ids=torch.tensor([0]),
    )


def test_counts_are_summed_over_micro_batches_and_image_positions_count_every_codebook():
    counts = supervised_counts([batch(3, 0), batch(1, 2), batch(0, 0)])
    assert dict(zip(TERMS, counts.tolist(), strict=True)) == {"text": 4, "image": 8, "balance": 30}
    padded = replace(batch(1, 0), valid=torch.tensor([True] * 6 + [False] * 4))
    assert supervised_counts([padded])[2] == 6


def test_scaled_sums_add_up_to_the_global_mean_on_any_split():
    losses = torch.tensor([5.0, 1.0, 1.0, 1.0])
    counts = {"text": 4, "image": 0, "balance": 4}
    scale = term_scales(counts, LossConfig(text=1, image=1, balance=0), world_size=2)[0]
    # Two ranks with 1 and 3 positions; gradients are averaged over ranks, so each contributes half.
    total = (losses[:1].sum() * scale + losses[1:].sum() * scale) / 2
    assert total == losses.mean()
    mean_of_means = (losses[:1].mean() + losses[1:].mean()) / 2
    assert mean_of_means != losses.mean()


def test_an_unsupervised_term_scales_to_zero_not_infinity():
    scales = term_scales({"text": 8, "image": 0, "balance": 100}, WEIGHTS, world_size=4)
    assert scales.tolist() == pytest.approx([0.5, 0.0, 0.0004])


def test_a_step_with_balance_alone_does_not_train():
    assert not is_trainable_step({"text": 0, "image": 0, "balance": 50}, WEIGHTS)
    assert is_trainable_step({"text": 0, "image": 3, "balance": 50}, WEIGHTS)
    assert not is_trainable_step({"text": 9, "image": 0, "balance": 50}, LossConfig(text=0.0))


def test_logged_losses_are_per_position_and_weighted():
    values = mean_losses({"text": 6.0, "image": 0.0, "balance": 20.0}, {"text": 3, "image": 0, "balance": 10}, WEIGHTS)
    assert values == {"loss": pytest.approx(2.02), "text_loss": 2.0, "balance_loss": 2.0}


class Stub(torch.nn.Module):
    """A model without image parts."""

    def forward(self, input_ids: torch.Tensor, **_: torch.Tensor) -> U2Output:
        one = torch.ones((), requires_grad=True)
        return U2Output(
            losses={"text": LossSum(3 * one, torch.tensor(1)), "balance": LossSum(2 * one, torch.tensor(1))},
            finite={"embeddings": torch.tensor(True), "logits.text": torch.tensor(False)},
            expert_counts=torch.zeros(2, 4, dtype=torch.int64),
        )


def test_objective_stacks_terms_in_order_and_keeps_the_names_of_checks():
    objective = Objective(Stub())
    out = objective(input_ids=torch.zeros(3, 1))
    assert out["totals"].tolist() == [3.0, 0.0, 2.0]
    assert out["totals"].requires_grad
    assert dict(zip(objective.places, out["finite"].tolist(), strict=True)) == {
        "embeddings": True,
        "logits.text": False,
    }
