"""Adapters of routed experts: the grouped path against a float64 reference, its cost in products and memory (M5)."""

import pytest
import torch

from lumina_ft.kernels import Experts, Lora, Projection, eager_experts
from lumina_ft.kernels.moe import products
from lumina_ft.kernels.moe.dropout import row_keys
from lumina_ft.kernels.moe.grouped import grouped_experts, grouped_mlp
from lumina_ft.kernels.moe.ref import expert_buckets, expert_loop

SCALE = 0.7


pytestmark = pytest.mark.usefixtures("nan_filled_buffers")


class Case:
    """Routed experts with an adapter on each projection; the last expert has no rows."""

    def __init__(self, ranks, dropout=0.0, tokens=37, hidden=16, width=8, experts=5, top_k=2):
        gen = torch.Generator().manual_seed(5)

        def normal(*shape):
            return torch.randn(*shape, generator=gen, dtype=torch.float64)

        self.scores = torch.rand(tokens, experts - 1, generator=gen, dtype=torch.float64)
        self.topk_weight, self.topk_idx = self.scores.topk(top_k, dim=-1)
        self.x, self.upstream = normal(tokens, hidden), normal(tokens, hidden)
        self.dropout, self.keys = dropout, row_keys(2**61 + 12345, tokens, top_k, torch.device("cpu"))
        self.matrices = []
        for rank, (outputs, inputs) in zip(ranks, ((width, hidden), (width, hidden), (hidden, width)), strict=True):
            pair = (normal(experts, rank, inputs) * inputs**-0.5, normal(experts, outputs, rank)) if rank else ()
            self.matrices.append((normal(experts, outputs, inputs) * inputs**-0.5, *pair))

    def run(self, call, dtype, *, frozen=True):
        """Output and gradients by name."""
        grads = {}

        def leaf(name, value, dtype=dtype, wanted=True):
            grads[name] = value.detach().to(dtype).requires_grad_(wanted)
            return grads[name]

        parts = []
        for stream, (name, (weight, *pair)) in enumerate(zip(("gate", "up", "down"), self.matrices, strict=True)):
            weight = leaf(name, weight, wanted=not frozen)
            matrices = [leaf(f"{name} {part}", value) for part, value in zip("AB", pair, strict=False)]
            parts.append(Projection(weight, Lora(*matrices, SCALE, self.dropout, stream) if pair else None))
        x = leaf("x", self.x)
        weight = leaf("routing weight", self.topk_weight, torch.promote_types(dtype, torch.float32))
        out = call(x, Experts(*parts), self.topk_idx, weight, self.keys)
        out.backward(self.upstream.to(dtype))
        return {"out": out.detach(), **{name: t.grad for name, t in grads.items() if t.requires_grad}}


def assert_relative(got, want, limit):
    assert got.keys() == want.keys()
    for name in want:
        difference = float((got[name].double() - want[name].double()).norm() / want[name].double().norm())
        assert difference <= limit, (name, difference)


RANKS = [
    pytest.param((4, 4, 4), id="aligned"),
    pytest.param((1, 3, 6), id="odd ranks"),
    pytest.param((16, 9, 2), id="wider than the layer"),
    pytest.param((0, 3, 0), id="up alone"),
    pytest.param((0, 0, 5), id="down alone"),
]


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen base", "trained base"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("ranks", RANKS)
def test_grouped_equals_the_float64_reference(ranks, dropout, frozen):
    case = Case(ranks, dropout)
    want = case.run(eager_experts, torch.float64, frozen=frozen)
    got = case.run(grouped_experts, torch.float32, frozen=frozen)
    assert_relative(got, want, 1e-6)
    for name, grad in got.items():
        if name.startswith(("gate", "up", "down")):
            assert (grad[-1] == 0).all(), "the last expert has no rows"


@pytest.mark.parametrize(
    "sizes",
    [
        {"tokens": 1, "experts": 6, "top_k": 3},
        {"tokens": 64, "experts": 5, "top_k": 4},
        {"tokens": 13, "experts": 17, "top_k": 1},
    ],
    ids=["one token", "every expert for every token", "fewer tokens than experts"],
)
def test_grouped_equals_the_reference_on_ragged_groups(sizes):
    case = Case((3, 4, 5), 0.25, **sizes)
    assert_relative(case.run(grouped_experts, torch.float32), case.run(eager_experts, torch.float64), 1e-6)


def test_the_reference_equals_merged_weights():
    case = Case((2, 3, 4))

    def merged(x, experts, topk_idx, topk_weight, keys):
        parts = [Projection(p.weight + p.lora.scale * p.lora.b @ p.lora.a) for p in experts]
        return eager_experts(x, Experts(*parts), topk_idx, topk_weight)

    assert_relative(case.run(eager_experts, torch.float64), case.run(merged, torch.float64), 1e-12)


def test_buckets_equal_the_loop_with_adapters_and_dropout():
    case = Case((2, 3, 4), 0.3)
    calls = [lambda x, e, i, w, k, f=f: f(x, e.unbind(), i, w, k) for f in (expert_loop, expert_buckets)]
    assert_relative(case.run(calls[1], torch.float64), case.run(calls[0], torch.float64), 1e-12)


def test_an_adapter_of_zeros_changes_no_bit():
    case = Case((3, 4, 8))
    plain = Case((0, 0, 0))
    plain.matrices = [(weight,) for weight, *_ in case.matrices]
    case.matrices = [(weight, a, torch.zeros_like(b)) for weight, a, b in case.matrices]
    got, want = (c.run(grouped_experts, torch.float32) for c in (case, plain))
    assert all(torch.equal(got[name], want[name]) for name in ("out", "x", "routing weight"))


def test_bfloat16_is_as_close_as_the_reference():
    """Bounded by bfloat16 itself: compared with float64 on the same rounded inputs."""
    case = Case((8, 3, 16), tokens=48, hidden=32, width=16, experts=6)
    case.matrices = [tuple(t.bfloat16().double() for t in parts) for parts in case.matrices]
    case.x, case.upstream = case.x.bfloat16().double(), case.upstream.bfloat16().double()
    want = case.run(eager_experts, torch.float64)
    got = case.run(grouped_experts, torch.bfloat16)
    assert got["out"].dtype == got["gate A"].dtype == torch.bfloat16
    assert_relative(got, want, 1e-2)
    loop = case.run(eager_experts, torch.bfloat16)
    for name in want:
        error, other = ((r[name].double() - want[name]).norm() for r in (got, loop))
        assert error <= 1.2 * other + 1e-3 * want[name].norm(), name


def test_no_rows_give_zero_gradients():
    case = Case((3, 4, 1), 0.5)
    parts, leaves = [], []
    for stream, values in enumerate(case.matrices):
        weight, a, b = (v.float().requires_grad_() for v in values)
        leaves += [weight, a, b]
        parts.append(Projection(weight, Lora(a, b, SCALE, 0.5, stream)))
    rows, row_weight = torch.empty(0, 16, requires_grad=True), torch.empty(0, 1, requires_grad=True)
    offsets, keys = torch.zeros(5, dtype=torch.int32), torch.empty(0, 1, dtype=torch.int64)
    out = grouped_mlp(rows, Experts(*parts), row_weight, offsets, keys)
    assert out.shape == (0, 16)
    out.sum().backward()
    assert all((leaf.grad == 0).all() for leaf in leaves)
    assert rows.grad.shape == (0, 16) and row_weight.grad.shape == (0, 1)


def test_a_frozen_base_computes_no_weight_gradient(monkeypatch):
    shapes, right = [], products._grouped_mm

    def recorded(*args):
        shapes.append(tuple(right(*args).shape))
        return right(*args)

    monkeypatch.setattr(products, "_grouped_mm", recorded)
    case = Case((4, 4, 4), width=12)
    case.run(grouped_experts, torch.float32)
    whole = {tuple(weight.shape) for weight, *_ in case.matrices}
    assert not whole & set(shapes)
    case.run(grouped_experts, torch.float32, frozen=False)
    assert whole <= set(shapes)


def test_a_frozen_adapter_costs_no_gradient_of_its_own(monkeypatch):
    """The adapter of an earlier stage, whose rows still send gradients to the layers below."""
    case = Case((3, 3, 3))
    shapes, right = [], products._grouped_mm

    def recorded(*args):
        shapes.append(right(*args).dim())
        return right(*args)

    parts = [Projection(w.float(), Lora(a.float(), b.float(), SCALE)) for w, a, b in case.matrices]
    x = case.x.float().requires_grad_()
    monkeypatch.setattr(products, "_grouped_mm", recorded)
    grouped_experts(x, Experts(*parts), case.topk_idx, case.topk_weight.float()).backward(case.upstream.float())
    assert 3 not in shapes
    assert x.grad.norm() > 0


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_backward_keeps_no_copy_of_weights_and_little_else(dropout):
    """Beside what the layer without adapters keeps: A x of each row, and the rows' keys."""

    def kept(case):
        owned, sizes = set(), {}

        def call(x, experts, *rest):
            matrices = [t for p in experts for t in (p.weight, *((p.lora.a, p.lora.b) if p.lora else ()))]
            owned.update(t.untyped_storage().data_ptr() for t in matrices)
            return grouped_experts(x, experts, *rest)

        def pack(tensor):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            case.run(call, torch.float32)
        return sum(size for pointer, size in sizes.items() if pointer not in owned)

    adapted, plain = Case((3, 4, 5), dropout), Case((0, 0, 0))
    rows = plain.topk_idx.numel()
    hidden = (4 + 4 + 8) * 4
    assert kept(adapted) - kept(plain) <= rows * (hidden + (8 if dropout else 0))
