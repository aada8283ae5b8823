"""Held-out loss: sums over packs and ranks, divided once; never a silent NaN."""

from types import SimpleNamespace

import pytest
import torch

from lumina_ft.config.schema import LossConfig
from lumina_ft.errors import RunError
from lumina_ft.train import evaluate as module


class OneRank:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.progress = SimpleNamespace(mark=self._mark)
        self.marks: list[tuple[str, int]] = []

    def _mark(self, phase: str, *, micro_batch: int, batch: "Pack") -> None:
        self.marks.append((phase, micro_batch))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values


class Pack(SimpleNamespace):
    def to(self, device: torch.device) -> "Pack":
        return self

    def model_inputs(self) -> dict[str, torch.Tensor]:
        return {"totals": torch.tensor(self.totals)}

    def supervised_counts(self) -> dict[str, int]:
        return self.counts


def run(monkeypatch: pytest.MonkeyPatch, packs: list[Pack]) -> dict[str, float]:
    monkeypatch.setattr(module, "step_batches", lambda data, step, packs_per_step, world: [packs[step]])
    engine = SimpleNamespace(module=lambda totals: {"totals": totals}, train=lambda mode=True: None)
    data = SimpleNamespace(steps_per_epoch=lambda packs_per_step: len(packs))
    weights = LossConfig(text=1.0, image=0.5, balance=0.0)
    world = OneRank()
    losses = module.evaluate(engine, data, world, weights=weights, packs_per_step=1)
    # Each pack is a sign of life: a long evaluation must not look like a hang (T14).
    assert world.marks == [("evaluate", number + 1) for number in range(len(packs))]
    return losses


def test_packs_count_by_their_positions(monkeypatch):
    packs = [
        Pack(totals=[6.0, 0.0, 0.0], counts={"text": 2, "image": 0, "balance": 9}),
        Pack(totals=[2.0, 8.0, 0.0], counts={"text": 6, "image": 4, "balance": 1}),
    ]
    assert run(monkeypatch, packs) == {
        "eval_loss": 2.0,
        "eval_text_loss": 1.0,
        "eval_image_loss": 2.0,
        "eval_balance_loss": 0.0,
    }


def test_t4_a_loss_that_is_not_finite_is_an_error(monkeypatch):
    packs = [Pack(totals=[float("nan"), 1.0, 0.0], counts={"text": 2, "image": 1, "balance": 3})]
    with pytest.raises(RunError, match="held-out loss, text_loss — nan"):
        run(monkeypatch, packs)
