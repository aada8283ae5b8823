"""Cross-entropy in chunks on the device, where the gradient of a bfloat16 weight is summed by a product of its own."""

import pytest
import torch
import torch.nn.functional as F
from gpu_device import DEVICE, DTYPES, LIMITS, on_gpu

from lumina_ft.kernels.cross_entropy.chunked import chunked_cross_entropy
from lumina_ft.kernels.cross_entropy.liger import liger_cross_entropy, liger_unavailable_reason

pytestmark = pytest.mark.gpu

ROWS, HIDDEN, CLASSES = on_gpu((1021, 256, 10_007), (29, 16, 101))
SCALE = 0.37


def chunked(rows):
    return lambda *args: chunked_cross_entropy(*args, chunk_bytes=8 * rows * CLASSES).total


def tensors(dtype):
    gen = torch.Generator(device=DEVICE).manual_seed(0)
    x = torch.randn(ROWS, HIDDEN, generator=gen, device=DEVICE).to(dtype)
    w = (torch.randn(CLASSES, HIDDEN, generator=gen, device=DEVICE) * HIDDEN**-0.5).to(dtype)
    return x, w, torch.randint(CLASSES, (ROWS,), generator=gen, device=DEVICE)


def assert_right(function, dtype, trained=("hidden", "weight")):
    x, w, targets = tensors(dtype)
    exact = [t.double().requires_grad_() for t in (x, w)]
    total = F.cross_entropy(exact[0] @ exact[1].t(), targets, reduction="sum")
    want = dict(zip(("hidden", "weight"), torch.autograd.grad(total * SCALE, exact), strict=True))
    leaves = {"hidden": x, "weight": w}
    for name in trained:
        leaves[name].requires_grad_()
    got = function(x, w, targets)
    (got * SCALE).backward()
    assert abs(float(got.detach()) / float(total.detach()) - 1) <= LIMITS[dtype]
    for name in trained:
        grad = leaves[name].grad
        assert grad is not None, f"no gradient of {name}"
        assert float((grad - want[name]).norm() / want[name].norm()) <= LIMITS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [ROWS, 5 * ROWS // 11])
def test_loss_and_gradients_in_one_chunk_and_in_three(rows, dtype):
    assert_right(chunked(rows), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("trained", [("hidden",), ("weight",), ("hidden", "weight")], ids="+".join)
def test_ligers_loss_and_gradients(trained, dtype):
    reason = liger_unavailable_reason(DEVICE)
    if reason is not None:
        pytest.skip(reason)
    assert_right(lambda *args: liger_cross_entropy(*args).total, dtype, trained)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_inputs_give_the_same_bits(dtype):
    x, w, targets = tensors(dtype)
    w.requires_grad_()
    runs = []
    for _ in range(2):
        w.grad = None
        total = chunked(ROWS // 3)(x, w, targets)
        total.backward()
        runs.append((total.detach(), w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
