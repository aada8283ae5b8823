"""Routed experts spread over ranks, and their adapters (M5, T9). Ranks are threads; the layer's own exchange runs."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lumina_ft.errors import ConfigError
from lumina_ft.kernels import row_keys
from lumina_ft.kernels.moe.products import grouped_projection
from lumina_ft.models import experts as experts_module
from lumina_ft.models.experts import PROJECTIONS, PackedExperts
from lumina_ft.models.groups import group_of, is_adapter_b, is_adapter_name
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config, kernels_for
from lumina_ft.parallel import expert_parallel
from lumina_ft.parallel.expert_parallel import ExpertParallel, sharing_of
from lumina_ft.parallel.zero3 import full_shape, local_shape, write_tensor

CONFIG = U2Config(
    hidden_size=16, moe_intermediate_size=8, num_experts=8, num_experts_per_tok=3, n_group=1, topk_group=1
)
RANKS = {"gate_proj": 3, "up_proj": 4, "down_proj": 1}


class Group:
    """Collectives of one exchange group of threads."""

    def __init__(self, size):
        self.size, self.sent, self.mine = size, [None] * size, threading.local()
        self.barrier = threading.Barrier(size, timeout=30)

    def exchange(self, value):
        """What every member has brought, in rank order."""
        self.sent[self.mine.rank] = value
        self.barrier.wait()
        everything = list(self.sent)
        self.barrier.wait()
        return everything

    def all_to_all(self, out, rows, receive=None, send=None, *, group):
        assert group is self
        everything = self.exchange((rows, send or [rows.shape[0] // self.size] * self.size))
        parts = [rows.split(splits)[self.mine.rank] for rows, splits in everything]
        assert receive is None or [part.shape[0] for part in parts] == receive
        out.copy_(torch.cat(parts))


@pytest.fixture(autouse=True)
def threads_instead_of_processes(monkeypatch):
    class Collectives:
        @staticmethod
        def all_to_all_single(*args, group):
            group.all_to_all(*args, group=group)

    monkeypatch.setattr(expert_parallel, "torch_dist", Collectives)


def share(group, rank):
    return ExpertParallel(group.size, rank, f"ep_size_{group.size}", group, None)


def on_ranks(world, size, run):
    """`run(rank, its place)` in `world` threads, of which `size` neighbours each share experts."""
    groups = [Group(size) for _ in range(world // size)]

    def work(rank):
        group = groups[rank // size]
        group.mine.rank = rank % size
        return run(rank, share(group, rank % size))

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(work, range(world)))


def build(place, *, lora=True, dropout=0.0, frozen=False):
    layer = PackedExperts(CONFIG, kernels_for(CONFIG, "torch", spread=place is not None), place)
    if lora:
        for projection, rank in RANKS.items():
            layer.add_lora(projection, rank=rank, scale=0.6, dropout=dropout)
    gen = torch.Generator().manual_seed(0)
    for name, param in layer.named_parameters():
        write_tensor(param, torch.randn(full_shape(param), generator=gen) * param.shape[-1] ** -0.5)
        param.requires_grad_(not frozen or "lora" in name)
    return layer


def pack(number, usable):
    gen = torch.Generator().manual_seed(20 + number)
    tokens = 5 + 4 * number
    weight, index = torch.rand(tokens, usable, generator=gen).topk(3, dim=-1)
    x, upstream = torch.randn(2, tokens, CONFIG.hidden_size, generator=gen)
    return x.requires_grad_(), index, weight.requires_grad_(), upstream


def passes(layer, number, usable):
    """Forward and backward of one pack: what stays on its rank."""
    x, index, weight, upstream = pack(number, usable)
    out = layer(x, index, weight)
    out.backward(upstream)
    return {"out": out.detach(), "x": x.grad, "routing weight": weight.grad}


def assert_close(got, want, name):
    difference = float((got - want).norm() / want.norm().clamp(min=1e-12))
    assert difference <= 1e-6, (name, difference)


def compare(world, size, usable, monkeypatch, **options):
    """Packs on `world` ranks against the same packs in one process; returns the gradients on the ranks."""
    keys = threading.local()
    monkeypatch.setattr(experts_module, "draw_key", lambda: 1000 + keys.pack)
    alone, want = build(None, **options), []
    for number in range(world):
        keys.pack = number
        want.append(passes(alone, number, usable))

    def run(rank, place):
        keys.pack = rank
        layer = build(place, **options)
        got = passes(layer, rank, usable)
        return got, {name: p.grad for name, p in layer.named_parameters() if p.requires_grad}

    results = on_ranks(world, size, run)
    for rank, (got, _) in enumerate(results):
        for name in got:
            assert_close(got[name], want[rank][name], (rank, name))
    grads = [grads for _, grads in results]
    for name, param in alone.named_parameters():
        if not param.requires_grad:
            assert name not in grads[0]
            continue
        groups = [torch.cat([g[name] for g in grads[start : start + size]]) for start in range(0, world, size)]
        assert_close(sum(groups), param.grad, name)
    return grads


@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("options", [{"lora": False}, {"frozen": True}, {"dropout": 0.4}], ids=["base", "lora", "both"])
def test_t9_spread_experts_equal_one_process(world, size, options, monkeypatch):
    """Values and all gradients; those of experts summed over all ranks' tokens. Dropout drops the same inputs."""
    compare(world, size, CONFIG.num_experts, monkeypatch, **options)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.4, "frozen": True}])
def test_t9_a_rank_that_gets_no_rows_takes_part_with_zero_gradients(options, monkeypatch):
    grads = compare(2, 2, CONFIG.num_experts // 2, monkeypatch, **options)
    assert all((grad == 0).all() for grad in grads[1].values())
    assert all(grad.norm() > 0 for grad in grads[0].values())


def test_without_gradients_the_exchange_runs_too():
    want = build(None)(*pack(0, 8)[:3])

    def run(rank, place):
        with torch.no_grad():
            return build(place)(*pack(0, 8)[:3])

    for got in on_ranks(2, 2, run):
        assert_close(got, want.detach(), "out")


def test_every_expert_parameter_is_declared_with_its_own_experts_only():
    places = [share(Group(4), rank) for rank in range(4)]
    layers = [build(place) for place in places]
    for name, whole in build(None).named_parameters():
        parts = [layer.get_parameter(name) for layer in layers]
        assert torch.equal(torch.cat([p.detach() for p in parts]), whole)
        assert all(sharing_of(p) is place for p, place in zip(parts, places, strict=True)), name
        assert {full_shape(p) for p in parts} == {whole.shape} and local_shape(parts[0])[0] == 2


def test_initial_weights_of_the_model_are_those_of_one_process(tiny_config):
    whole = U2ForDiffusion(tiny_config)
    whole.init_weights_(3)
    for rank in range(2):
        part = U2ForDiffusion(tiny_config, expert_parallel=share(Group(2), rank))
        part.init_weights_(3)
        for name, param in part.named_parameters():
            want = whole.get_parameter(name).detach()
            spread = ".experts." in name
            assert (sharing_of(param) is not None) == spread
            assert torch.equal(param, want[4 * rank : 4 * rank + 4] if spread else want), name


def test_experts_that_ranks_cannot_share_evenly_are_refused(tiny_config):
    with pytest.raises(ConfigError, match="parallel.expert_parallel_size — 3 — must divide the 8 experts"):
        U2ForDiffusion(tiny_config, expert_parallel=share(Group(3), 0))


@pytest.mark.parametrize(
    ("choice", "dtype", "message"),
    [
        ("eager", torch.float32, "eager — the reference loop needs every expert on its rank — use auto or torch, or "),
        ("auto", torch.float64, "auto — .* no torch.float64, and the reference .* parallel.expert_parallel_size: 1"),
        ("torch", torch.float64, "torch — .* no torch.float64 — use auto and parallel.expert_parallel_size: 1"),
    ],
)
def test_the_reference_refuses_experts_that_are_elsewhere(choice, dtype, message):
    layer = PackedExperts(CONFIG, kernels_for(CONFIG, choice, spread=True), share(Group(2), 0)).to(dtype)
    x, index, weight, _ = pack(0, 8)
    with pytest.raises(ConfigError, match=f"model.kernels — {message}"):
        layer(x.to(dtype), index, weight)


def test_an_adapter_has_its_names_shapes_and_group():
    layer = build(None)
    names = dict(layer.named_parameters(prefix="model.layers.1.mlp.experts"))
    for projection in PROJECTIONS:
        outputs, inputs = layer.features(projection)
        base = f"model.layers.1.mlp.experts.{projection}"
        assert names[base].shape == (8, outputs, inputs)
        assert names[f"{base}_lora_A"].shape == (8, RANKS[projection], inputs)
        assert names[f"{base}_lora_B"].shape == (8, outputs, RANKS[projection])
        assert not is_adapter_name(base) and group_of(base) == "experts"
        for part in "AB":
            assert is_adapter_name(f"{base}_lora_{part}") and group_of(f"{base}_lora_{part}") == "lora"
            assert is_adapter_b(f"{base}_lora_{part}") == (part == "B")
    assert [name for name, _ in PackedExperts(CONFIG, kernels_for(CONFIG), None).named_parameters()] == list(
        PROJECTIONS
    )


def test_an_adapter_follows_the_weights_dtype_and_device():
    layer = PackedExperts(CONFIG, kernels_for(CONFIG), None).to("meta", torch.bfloat16)
    layer.add_lora("up_proj", rank=2, scale=1.0, dropout=0.0)
    for param in (layer.get_parameter("up_proj_lora_A"), layer.get_parameter("up_proj_lora_B")):
        assert param.is_meta and param.dtype == torch.bfloat16


def test_implementations_agree_on_an_adapter_with_dropout():
    results = []
    for choice in ("torch", "eager"):
        layer = build(None, dropout=0.5)
        layer.kernels = kernels_for(CONFIG, choice)
        torch.manual_seed(0)
        got = passes(layer, 1, 8)
        results.append({**got, **{name: p.grad for name, p in layer.named_parameters()}})
    for name in results[0]:
        assert_close(results[0][name], results[1][name], name)


def test_dropout_draws_in_training_only_and_only_if_there_is_some():
    inputs = pack(0, 8)[:3]
    for layer in (build(None, dropout=0.5).eval(), build(None), build(None, lora=False)):
        before = torch.get_rng_state()
        want = layer(*inputs)
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(layer(*inputs), want)
    dropping = build(None, dropout=0.5)
    before = torch.get_rng_state()
    first = dropping(*inputs)
    assert not torch.equal(dropping(*inputs), first)
    torch.set_rng_state(before)
    assert torch.equal(dropping(*inputs), first)


def test_each_projection_drops_inputs_of_its_own():
    """Gate and up have the same weights and adapters, so they agree until they drop inputs."""
    layer = PackedExperts(CONFIG, kernels_for(CONFIG, "torch"), None)
    for name in ("gate_proj", "up_proj"):
        layer.add_lora(name, rank=4, scale=1.0, dropout=0.5)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(1)))
    weights, x = layer._weights(), torch.randn(6, CONFIG.hidden_size)
    offsets, keys = torch.full((8,), 6, dtype=torch.int32), row_keys(1, 6, 1, x.device)
    for given, alike in ((None, True), (keys, False)):
        gate, up = (grouped_projection(x, part, offsets, given) for part in (weights.gate, weights.up))
        assert torch.isclose(gate, up).all(1).any() == alike


def test_checkpointing_repeats_the_dropout_of_experts(tiny_config, mixed_pack):
    def grads(checkpointed):
        model = U2ForDiffusion(tiny_config)
        model.init_weights_(0)
        for module in model.modules():
            if isinstance(module, PackedExperts):
                module.add_lora("down_proj", rank=2, scale=1.0, dropout=0.5)
                torch.nn.init.normal_(module.down_proj_lora_A, generator=torch.Generator().manual_seed(2))
                torch.nn.init.normal_(module.down_proj_lora_B, generator=torch.Generator().manual_seed(3))
        if checkpointed:
            model.gradient_checkpointing_enable({"preserve_rng_state": True})
        torch.manual_seed(4)
        losses = model.train()(**mixed_pack).losses
        sum(loss.total for loss in losses.values()).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    want, got = grads(False), grads(True)
    assert got["model.layers.1.mlp.experts.down_proj_lora_A"].norm() > 0
    assert all(torch.equal(got[name], want[name]) for name in want)
