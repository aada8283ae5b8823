"""The real Liger-Kernel behind our wrapper, interpreted: what its version computes, and what it leaves out."""

import pytest
import torch
import torch.nn.functional as F
from parity import FLOAT32_LIMIT, relative_error

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")

from lumina_ft.kernels.cross_entropy import liger
from lumina_ft.kernels.cross_entropy.liger import liger_cross_entropy


@pytest.mark.parametrize("size", [(1, 16, 5), (31, 24, 101), (64, 8, 300)], ids=str)
@pytest.mark.parametrize("trained", [("hidden",), ("weight",), ("hidden", "weight")], ids="+".join)
def test_loss_and_gradients_in_one_chunk_and_in_many(size, trained, monkeypatch):
    m, hidden_size, classes = size
    gen = torch.Generator().manual_seed(m)
    inputs = {
        "hidden": torch.randn(m, hidden_size, generator=gen),
        "weight": torch.randn(classes, hidden_size, generator=gen),
    }
    targets = torch.randint(classes, (m,), generator=gen)
    exact = {name: t.double().requires_grad_() for name, t in inputs.items()}
    want = F.cross_entropy(exact["hidden"] @ exact["weight"].t(), targets, reduction="sum")
    want_gradients = torch.autograd.grad(want, list(exact.values()), torch.tensor(0.37).double())
    for rows in (m, 2):
        budget = rows * classes * 4
        monkeypatch.setattr(liger.chunk_factor, "__defaults__", (budget,))
        leaves = {name: t.clone().requires_grad_(name in trained) for name, t in inputs.items()}
        got = liger_cross_entropy(leaves["hidden"], leaves["weight"], targets)
        assert bool(got.finite) and got.total.dtype == torch.float32
        assert relative_error(got.total.detach(), want.detach()) <= FLOAT32_LIMIT
        got.total.backward(torch.tensor(0.37))
        for (name, leaf), reference in zip(leaves.items(), want_gradients, strict=True):
            if name in trained:
                assert leaf.grad is not None, f"no gradient of {name}"
                assert relative_error(leaf.grad, reference) <= FLOAT32_LIMIT
            else:
                assert leaf.grad is None
