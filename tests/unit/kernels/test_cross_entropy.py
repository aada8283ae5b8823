"""Cross-entropy of an output layer in chunks: against float64, one chunk and many, and in bounded memory."""

import importlib.metadata
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from lumina_ft.kernels.cross_entropy import choice
from lumina_ft.kernels.cross_entropy.choice import cross_entropy_impl, linear_cross_entropy
from lumina_ft.kernels.cross_entropy.chunked import _chunked_cross_entropy, chunk_rows, chunked_cross_entropy
from lumina_ft.kernels.cross_entropy.liger import chunk_factor, liger_cross_entropy, liger_unavailable_reason
from lumina_ft.kernels.cross_entropy.ref import linear_cross_entropy_ref

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SIZES = [(1, 16, 5), (7, 8, 33), (13, 32, 1), (31, 24, 101)]
"""m, H, V."""


def tensors(m, hidden, classes, *, dtype=torch.float32, rank=0):
    """hidden, weight, targets and, with a rank, z and b."""
    gen = torch.Generator().manual_seed(m + hidden + classes)
    x = torch.randn(m, hidden, generator=gen).to(dtype)
    w = (torch.randn(classes, hidden, generator=gen) * 0.3).to(dtype)
    targets = torch.randint(classes, (m,), generator=gen)
    if not rank:
        return x, w, targets, None
    z, b = torch.randn(m, rank, generator=gen), torch.randn(classes, rank, generator=gen) * 0.3
    return x, w, targets, (z.to(dtype), b.to(dtype))


def bytes_of(rows, classes):
    """A budget for chunks of so many rows."""
    return 8 * rows * classes


def loss_and_gradients(function, x, w, targets, low_rank, upstream=0.37):
    leaves = [t.clone().requires_grad_() for t in (x, w, *(low_rank or ()))]
    total = function(leaves[0], leaves[1], targets, None if low_rank is None else tuple(leaves[2:]))
    return [total.detach(), *torch.autograd.grad(total, leaves, torch.tensor(upstream, dtype=total.dtype))]


def exact(x, w, targets, low_rank=None):
    logits = x @ w.t() + (0 if low_rank is None else low_rank[0] @ low_rank[1].t())
    return F.cross_entropy(logits, targets, reduction="sum")


def in_chunks_of(rows, classes):
    return lambda *args: chunked_cross_entropy(*args, chunk_bytes=bytes_of(rows, classes)).total


def error(got, want):
    difference = float((got.double() - want).norm())
    return difference if difference == 0 else difference / float(want.norm())


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("rows", [1, 3, 1000])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_loss_and_every_gradient(nan_filled_buffers, dtype, size, rows, rank):
    x, w, targets, low_rank = tensors(*size, dtype=dtype, rank=rank)
    got = loss_and_gradients(in_chunks_of(rows, size[2]), x, w, targets, low_rank)
    doubles = None if low_rank is None else tuple(t.double() for t in low_rank)
    want = loss_and_gradients(exact, x.double(), w.double(), targets, doubles)
    own = loss_and_gradients(lambda *args: linear_cross_entropy_ref(*args).total, x, w, targets, low_rank)
    assert got[0].dtype == torch.float32
    for mine, reference, torchs in zip(got, want, own, strict=True):
        if dtype == torch.float32:
            assert error(mine, reference) <= 1e-6
        else:
            # One rounding is allowed where torch happens to be nearer.
            assert error(mine, reference) <= min(6e-3, max(1.2 * error(torchs, reference), 2**-9))


def test_one_chunk_has_the_bits_of_the_reference():
    for dtype in (torch.float32, torch.bfloat16):
        x, w, targets, _ = tensors(31, 24, 101, dtype=dtype)
        assert torch.equal(chunked_cross_entropy(x, w, targets).total, linear_cross_entropy_ref(x, w, targets).total)


@pytest.mark.parametrize("rows", [4, 1000])
def test_the_same_inputs_give_the_same_bits(rows):
    x, w, targets, low_rank = tensors(31, 24, 101, rank=2)
    first, second = (loss_and_gradients(in_chunks_of(rows, 101), x, w, targets, low_rank) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("rows", [4, 1000])
@pytest.mark.parametrize("trained", ["hidden", "weight", "z", "b"])
def test_gradients_nobody_needs_are_not_computed(rows, trained):
    x, w, targets, low_rank = tensors(9, 8, 21, rank=2)
    names = dict(zip(("hidden", "weight", "z", "b"), (x, w, *low_rank), strict=True))
    everything = loss_and_gradients(in_chunks_of(rows, 21), x, w, targets, low_rank)[1:]
    names[trained].requires_grad_()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        chunked_cross_entropy(x, w, targets, low_rank, chunk_bytes=bytes_of(rows, 21)).total.backward(
            torch.tensor(0.37)
        )
    assert torch.equal(names[trained].grad, everything[list(names).index(trained)])
    assert all(t.grad is None for name, t in names.items() if name != trained)
    chunks = -(-9 // rows)
    # Two products per chunk for the logits, once more in backward with several chunks, and one for the gradient.
    products = sum(event.name in ("aten::mm", "aten::addmm_") for event in seen.events())
    assert products == chunks * (3 if chunks == 1 else 5)


def test_without_gradients_nothing_is_kept():
    x, w, targets, _ = tensors(9, 8, 21)
    w.requires_grad_()
    with torch.no_grad():
        assert not chunked_cross_entropy(x, w, targets).total.requires_grad
    assert _chunked_cross_entropy(x, w.detach(), targets, None, None, 100, False)[2].shape == (0, 21)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("place", "row"), [("hidden", 0), ("hidden", -1), ("weight", -1)])
@pytest.mark.parametrize("rows", [4, 1000])
def test_a_value_that_is_not_finite_is_told_from_a_sane_pass(rows, place, row, bad):
    x, w, targets, _ = tensors(9, 8, 21)
    budget = bytes_of(rows, 21)
    assert bool(chunked_cross_entropy(x, w, targets, chunk_bytes=budget).finite)
    (x if place == "hidden" else w)[row, 3] = bad
    assert not bool(chunked_cross_entropy(x, w, targets, chunk_bytes=budget).finite)
    assert not bool(linear_cross_entropy_ref(x, w, targets).finite)


def most_memory(run):
    """Largest sum of the CPU allocations that `run` makes, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    held = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@pytest.mark.parametrize("trained", [True, False])
def test_memory_is_one_chunk_of_logits_whatever_the_rows(trained):
    classes, rows = 4096, 16
    chunk = bytes_of(rows, classes)

    def run(m):
        x, w, targets, _ = tensors(m, 16, classes)
        x.requires_grad_()
        w.requires_grad_(trained)
        return lambda: chunked_cross_entropy(x, w, targets, chunk_bytes=chunk).total.backward()

    few, many = most_memory(run(2 * rows)), most_memory(run(40 * rows))
    weight = 4096 * 16 * 4
    assert few >= chunk / 2, "the profiler saw no logits"
    assert many - few <= 40 * rows * 16 * 4 * 2, "beyond gradients of the rows nothing may grow with them"
    assert many <= chunk + 3 * weight * trained + 40 * rows * 16 * 4 * 2


@pytest.mark.parametrize(
    ("classes", "budget", "rows"),
    [
        (157_184, 1 << 30, 768),
        (4096, 1 << 30, 32_768),
        (157_184, 1, 1),
        (100, 8 * 100 * 127, 127),
        (100, 8 * 100 * 300, 256),
    ],
)
def test_rows_of_a_chunk(classes, budget, rows):
    assert chunk_rows(classes, budget) == rows


def test_registered_as_pytorch_asks():
    x, w, targets, low_rank = tensors(9, 8, 21, rank=2)
    leaves = [t.requires_grad_() for t in (x, w, *low_rank)]
    torch.library.opcheck(_chunked_cross_entropy, (x, w, targets, *leaves[2:], 4, False))
    torch.library.opcheck(_chunked_cross_entropy, (x, w, targets, None, None, 100, True))


@pytest.mark.parametrize("through", ["compile", "checkpoint"])
def test_compiled_and_checkpointed_give_the_same_bits(through):
    x, w, targets, _ = tensors(9, 8, 21)

    def run(x, w):
        return chunked_cross_entropy(x, w, targets, chunk_bytes=bytes_of(4, 21)).total

    want = loss_and_gradients(lambda x, w, *_: run(x, w), x, w, targets, None)
    wrapped = (
        torch.compile(run, backend="aot_eager", fullgraph=True)
        if through == "compile"
        else lambda x, w: checkpoint(run, x, w, use_reentrant=False)
    )
    got = loss_and_gradients(lambda x, w, *_: wrapped(x, w), x, w, targets, None)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("rows", [4, 1000])
def test_backward_reads_the_weight_as_it_is_then(rows):
    """ZeRO-3 swaps a weight's storage between forward and backward; a saved view would keep the first one alive."""
    x, w, targets, _ = tensors(9, 8, 21)
    x.requires_grad_()
    weight = torch.nn.Parameter(w)
    total = chunked_cross_entropy(x, weight, targets, chunk_bytes=bytes_of(rows, 21)).total
    weight.data = torch.zeros(21, 8)
    total.backward()
    assert not x.grad.any()
    assert weight.grad.any()


@pytest.fixture
def installed(monkeypatch):
    """Pretend a version of liger-kernel, or none, is installed."""

    def pretend(version):
        def find(name):
            assert name == "liger-kernel"
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(importlib.metadata, "version", find)
        cross_entropy_impl.cache_clear()

    yield pretend
    cross_entropy_impl.cache_clear()


@pytest.mark.parametrize(
    ("version", "device", "reason"),
    [
        (None, CUDA, "liger-kernel is not installed"),
        ("0.6.2", CUDA, "liger-kernel 0.6.2 is older than 0.8.5"),
        ("0.8.5", CPU, "liger-kernel needs a CUDA device, this is cpu"),
        ("0.8.5", CUDA, None),
        ("0.10.0.post1", CUDA, None),
    ],
)
def test_when_liger_can_run(installed, version, device, reason):
    installed(version)
    assert liger_unavailable_reason(device) == reason
    assert cross_entropy_impl("auto", device) == ("chunked" if reason else "liger")
    assert cross_entropy_impl("triton", device) == ("chunked" if reason else "liger")
    assert cross_entropy_impl("torch", device) == "chunked"
    assert cross_entropy_impl("eager", device) == "reference"


def test_the_choice_is_logged_once_with_its_reason(installed, caplog):
    installed(None)
    caplog.set_level(logging.INFO, logger=choice.__name__)
    x, w, targets, _ = tensors(3, 8, 21)
    for _ in range(2):
        linear_cross_entropy(x, w, targets, impl="auto")
    assert caplog.messages == ["kernels=auto chose chunked cross-entropy: liger-kernel is not installed"]


@pytest.fixture
def liger_calls(monkeypatch):
    """A module in the place of Liger's with its signature, and its habit of skipping the weight's gradient."""
    calls = []

    def fused(input, weight, target, *, reduction, accum_dtype, chunk_mem_const):
        calls.append(SimpleNamespace(rows=input, reduction=reduction, accum=accum_dtype, factor=chunk_mem_const))
        weight = weight if input.requires_grad else weight.detach()
        return F.cross_entropy(input @ weight.t(), target, reduction=reduction)

    package, inner = ModuleType("liger_kernel.transformers"), SimpleNamespace(liger_fused_linear_cross_entropy=fused)
    package.functional = inner
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    return calls


def test_a_low_rank_term_is_never_dropped_for_liger(monkeypatch, liger_calls):
    x, w, targets, low_rank = tensors(9, 8, 21, rank=2)
    want = linear_cross_entropy(x, w, targets, low_rank, impl="torch").total
    assert not torch.equal(want, linear_cross_entropy(x, w, targets, impl="torch").total)
    monkeypatch.setattr(choice, "cross_entropy_impl", lambda *_: "liger")
    assert torch.equal(linear_cross_entropy(x, w, targets, low_rank, impl="auto").total, want)
    assert not liger_calls


def test_liger_trains_a_head_over_frozen_rows(liger_calls):
    x, w, targets, _ = tensors(9, 8, 21)
    w.requires_grad_()
    liger_cross_entropy(x, w, targets).total.backward()
    want = w.detach().clone().requires_grad_()
    exact(x, want, targets).backward()
    torch.testing.assert_close(w.grad, want.grad)
    assert x.grad is None and not x.requires_grad
    assert (liger_calls[0].reduction, liger_calls[0].accum) == ("sum", torch.float32)


def test_liger_computes_no_gradient_in_evaluation(liger_calls):
    x, w, targets, _ = tensors(9, 8, 21)
    w.requires_grad_()
    with torch.no_grad():
        liger_cross_entropy(x, w, targets)
    assert not liger_calls[0].rows.requires_grad


@pytest.mark.parametrize(("place", "bad"), [("hidden", torch.nan), ("weight", -torch.inf), ("weight", torch.inf)])
def test_liger_tells_values_that_are_not_finite(liger_calls, place, bad):
    x, w, targets, _ = tensors(9, 8, 21)
    assert bool(liger_cross_entropy(x, w, targets).finite)
    (x if place == "hidden" else w)[-1, 3] = bad
    assert not bool(liger_cross_entropy(x, w, targets).finite)


@pytest.mark.parametrize("m", [1, 100, 4096, 8191, 16384])
@pytest.mark.parametrize(("hidden", "classes"), [(2048, 157_184), (4096, 4096), (64, 100)])
def test_ligers_chunks_fill_the_budget_and_stay_inside(m, hidden, classes):
    def rows(factor):
        """Liger's own arithmetic."""
        parts = -(-classes // (factor * hidden))
        length = -(-m // parts)
        return min(m, 1 << (length - 1).bit_length())

    budget, itemsize = 1 << 28, 2
    factor = chunk_factor(m, hidden, classes, itemsize, budget)
    assert rows(factor) * classes * itemsize <= budget
    assert rows(factor + 1) == m or rows(factor + 1) * classes * itemsize > budget or rows(factor + 1) == rows(factor)
