"""T1: which parameters take part is read off the autograd graph, and a difference is named."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lumina_ft.errors import RunError
from lumina_ft.train.participation import check_participation, reached_parameters, watched_forward


class FakeWorld:
    """Rank 0 of two; the peer answers with the given values, then with ours."""

    rank, size = 0, 2

    def __init__(self, *peer_values):
        self.peer_values = list(peer_values)

    def gather_objects(self, value):
        return [value, self.peer_values.pop(0) if self.peer_values else value]

    gather_ints = gather_objects


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(3, 3)
        self.text = nn.Linear(3, 2)
        self.image = nn.Linear(3, 2)

    def forward(self, x, with_image, stand_in=False):
        h = checkpoint(self.trunk, x, use_reentrant=False)
        loss = self.text(h).sum()
        if with_image:
            loss = loss + self.image(h).sum()
        elif stand_in:
            loss = loss + 0.0 * self.image(h[:1]).sum()
        return loss


def named(model):
    return dict(model.named_parameters())


def test_T1_graph_walk_sees_through_checkpointing_and_misses_unused_parameters():
    model = Model()
    reached = reached_parameters(model(torch.ones(2, 3), with_image=False), named(model))
    assert reached == ["trunk.weight", "trunk.bias", "text.weight", "text.bias"]


def test_T1_a_zero_valued_stand_in_counts_as_taking_part():
    model = Model()
    loss = model(torch.ones(2, 3), with_image=False, stand_in=True)
    assert reached_parameters(loss, named(model)) == list(named(model))
    check_participation(loss, named(model), FakeWorld())


def test_T1_difference_names_rank_and_parameters():
    model = Model()
    loss = model(torch.ones(2, 3), with_image=False)
    world = FakeWorld("another digest", list(named(model)))
    with pytest.raises(RunError, match=r"rank 0 lacks image\.bias, image\.weight — every trainable parameter"):
        check_participation(loss, named(model), world)


def test_T1_a_parameter_that_takes_part_nowhere_is_an_error_too():
    model = Model()
    loss = model(torch.ones(2, 3), with_image=False)
    with pytest.raises(RunError, match=r"rank 0 lacks image\.bias.*rank 1 lacks image\.bias"):
        check_participation(loss, named(model), FakeWorld())


def test_T1_ranks_that_call_different_modules_are_named_before_the_call():
    model = Model()
    called = []
    model.text.register_forward_pre_hook(lambda *_: called.append("text"))
    with pytest.raises(
        RunError,
        match=r"rank 0 calls text \(weight, bias\); rank 1 calls image \(weight, bias\) — every rank must",
    ):
        with watched_forward(model, FakeWorld(0, 2)):
            model(torch.ones(2, 3), with_image=True)
    assert called == []
    assert not model.trunk._forward_pre_hooks


def test_T1_a_rank_that_ends_early_is_named():
    model = Model()
    with pytest.raises(RunError, match=r"rank 0 calls nothing more; rank 1 calls image \(weight"):
        with watched_forward(model, FakeWorld(0, 1, 2)):
            model(torch.ones(2, 3), with_image=False)


def test_agreeing_ranks_pass_and_leave_no_hooks():
    model = Model()
    with watched_forward(model, FakeWorld()):
        model(torch.ones(2, 3), with_image=True)
    assert not any(module._forward_pre_hooks for module in model.modules())
