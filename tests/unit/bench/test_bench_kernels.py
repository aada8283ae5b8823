"""`lumina-ft bench kernels`: sides are checked before they are timed, and what is wrong is said, never timed."""

import json
import time
from dataclasses import replace

import pytest
import torch

from lumina_ft.bench.kernels import attention, contest, cross_entropy, moe, packs, router
from lumina_ft.bench.kernels import run as whole
from lumina_ft.bench.kernels.contest import Side, settle
from lumina_ft.bench.kernels.measure import Meter, one_thread, peak_bytes, relative_difference
from lumina_ft.bench.kernels.targets import check_targets
from lumina_ft.kernels import allowed_mask
from lumina_ft.kernels.moe.ref import expert_loop

CPU = torch.device("cpu")
OPERATIONS = {"moe": moe, "attention": attention, "router": router, "cross-entropy": cross_entropy}


@pytest.fixture(scope="module")
def meter():
    with one_thread():
        return Meter(CPU, torch.float32)


def tiny(operation):
    module = OPERATIONS[operation]
    return next(iter(module.contests(module.SIZES["tiny"], CPU, torch.float32)))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_side_of_this_machine_agrees_and_gets_figures(operation, meter):
    module = OPERATIONS[operation]
    for made in module.contests(module.SIZES["tiny"], CPU, torch.float32):
        result = settle(whole.without(made, ["flex"]), meter, 0.0)
        timed = {name: side for name, side in result["sides"].items() if "unavailable" not in side}
        assert {"torch"} <= timed.keys()
        assert {"triton", "liger"} & result["sides"].keys() and not {"triton", "liger"} & timed.keys()
        for side in timed.values():
            assert "wrong" not in side and side["rounds"] == 3 and side["peak_bytes"] > 0
            assert side["forward_ms"] > 0 and side["backward_ms"] > 0
            assert set(side["differences"]) == {*made.outputs, *(f"grad {name}" for name in made.inputs)}


@pytest.mark.parametrize("planted", ["wrong output", "wrong gradient", "NaN", "failure"])
def test_what_is_wrong_is_named_and_not_timed(planted, meter):
    made = tiny("moe")
    right = made.sides["torch"].run

    def broken():
        (out,) = right()
        if planted == "failure":
            raise RuntimeError("out of registers\nsecond line")
        if planted == "wrong output":
            return (1.001 * out,)
        if planted == "NaN":
            return (out.masked_fill(torch.arange(out.numel()).view_as(out) == 5, float("nan")),)
        return (out + 0.01 * (made.inputs["x"] - made.inputs["x"].detach()),)

    sides = settle(replace(made, sides={**made.sides, "planted": Side(broken)}), meter, 0.0)["sides"]
    expected = {
        "wrong output": "output differs by 1.0e-03",
        "wrong gradient": "grad x differs by",
        "NaN": "output differs by nan",
        "failure": "RuntimeError: out of registers",
    }
    assert sides["planted"]["wrong"].startswith(expected[planted]) and "forward_ms" not in sides["planted"]
    assert "forward_ms" in sides["torch"]


def test_rates_are_work_over_time_and_shares_are_of_the_ceilings(meter):
    made = tiny("router")
    side = settle(made, meter, 0.0)["sides"]["torch"]
    for part, work in (("forward", made.forward), ("backward", made.backward)):
        seconds = side[f"{part}_ms"] / 1e3
        assert side[f"{part}_tflop_s"] == pytest.approx(work.flops / seconds / 1e12)
        assert side[f"{part}_gb_s"] == pytest.approx(work.moved_bytes / seconds / 1e9)
        assert side[f"{part}_tflop_share"] == pytest.approx(side[f"{part}_tflop_s"] / meter.ceilings.tflop_s)
        assert side[f"{part}_gb_share"] == pytest.approx(side[f"{part}_gb_s"] / meter.ceilings.gb_s)


def test_the_work_is_that_of_the_published_layer():
    """T=8192, H=2048, I=512, K=8, by hand: 0.412 TFLOP a pass; 2.48, 2.62 and 2.62 + 2.08 GB."""
    frozen, full = (moe._work(moe.SIZES["real"], case, 2) for case in ("frozen", "full"))
    assert [round(work.flops / 1e12, 3) for work in (*frozen, full[1])] == [0.412, 0.412, 0.825]
    assert [round(work.moved_bytes / 1e9, 2) for work in (*frozen, full[1])] == [2.48, 2.62, 4.7]


@pytest.mark.parametrize("top_k", [1, 3])
def test_padded_products_serve_experts_without_tokens(top_k):
    problem = moe.Problem("full", moe.MoESizes(5, 16, 8, 9, top_k, 0), CPU, torch.float32)
    sources = list(problem.inputs.values())
    results = []
    for run_experts in (moe.padded_experts, lambda x, experts, *rest: expert_loop(x, experts.unbind(), *rest)):
        out = run_experts(problem.x, problem.experts(), problem.topk_idx, problem.topk_weight)
        results.append([out.detach(), *torch.autograd.grad(out, sources, problem.upstream)])
    for got, want in zip(*results, strict=True):
        assert relative_difference(got, want) < 1e-6


@pytest.mark.parametrize("layout", packs.LAYOUTS)
def test_a_pack_follows_the_rule_of_packed_rows(layout):
    pack = packs.build_pack(layout, sample_tokens=96, samples=3)
    whole = allowed_mask(
        pack.type_ids,
        cu_seqlens=pack.cu_seqlens,
        turn_ids=pack.turn_ids,
        is_clean=pack.is_clean,
        block_ids=pack.block_ids,
    )
    assert torch.equal(pack.dense_mask(), whole) and pack.allowed_pairs == int(whole.sum())
    assert packs.shares(pack)["exact"] == pytest.approx(float(whole.float().mean()))
    joined = packs.join([pack, packs.build_pack("image", sample_tokens=64, samples=1)])
    assert joined.lengths == [*pack.lengths, 64] and joined.starts[-1] == pack.tokens
    assert joined.allowed_pairs > pack.allowed_pairs


def test_tiles_that_run_are_few_more_than_the_rule_needs():
    shares = whole.live_shares(CPU)
    assert shares.pop("tiles_of") == "sm_90"
    assert [round(100 * share["exact"], 1) for share in shares.values()] == [4.0, 3.2, 3.8, 11.1]
    for layout, share in shares.items():
        assert share["exact"] <= share["tiles_dkv"] and share["exact"] <= share["tiles"] <= share["segmented"]
        assert share["tiles_over_exact"] == share["tiles"] / share["exact"]
        assert share["tiles_over_exact"] <= 1.2, layout


def test_targets_are_judged_from_the_results():
    def of(case, **figures):
        return {"operation": "moe", "case": case, "sides": figures}

    results = [
        of("frozen", triton={"forward_ms": 1.0, "backward_ms": 1.4}, torch={"forward_ms": 1.4, "backward_ms": 3.0}),
        of("full", triton={"wrong": "out of memory"}),
    ]
    assert [(target["value"], target["met"]) for target in check_targets(results)] == [
        (1.0, True),
        (1.4, False),
        (1.4, False),
    ]


def test_peak_memory_is_what_is_held_at_once():
    def call():
        first = torch.ones(1000, 1000)
        second = first @ first
        del first
        return torch.cat([second, second])

    assert peak_bytes(CPU, call) == pytest.approx(12e6, rel=0.01)


def test_clocks_count_processor_time(meter):
    _, idle = meter.time(lambda: time.sleep(0.05))
    _, busy = meter.time(lambda: torch.randn(600, 600) @ torch.randn(600, 600))
    assert idle.device < 25 and busy.device > 0 and idle.device == idle.host


def test_on_a_gpu_launches_wait_behind_a_product_and_events_count(meter, monkeypatch):
    said = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            said.append("record")

        def elapsed_time(self, end):
            return 7.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: said.append("synchronize"))
    monkeypatch.setattr(torch, "mm", lambda a, b: said.append("product"))
    monkeypatch.setattr(meter, "_on_gpu", True)
    monkeypatch.setattr(meter, "_product_ms", 2.0)
    result, timed = meter.time(lambda: said.append("call") or "result", expected_host_ms=2.0)
    assert result == "result" and timed.device == 7.0 and 0 <= timed.host < 1000
    assert said == ["synchronize", *["product"] * 3, "record", "call", "record", "synchronize"]


def test_a_run_says_what_it_measured_and_on_what(monkeypatch):
    monkeypatch.setattr(whole, "live_shares", lambda device: {})
    result = whole.bench_kernels(operations=["router", "attention"], skip=["flex"], size="tiny", seconds=0.0)
    assert [made["operation"] for made in result["contests"]] == ["router", *["attention"] * 4]
    assert result["contests"][1]["sides"]["flex"] == {"unavailable": "left out"}
    assert result["wrong"] == [] and result["clock"] == "processor time of one thread" and result["size"] == "tiny"
    assert "targets" not in result and json.dumps(result)


def test_a_wrong_side_fails_the_command_after_the_figures(run, monkeypatch):
    # Nothing is that exact.
    monkeypatch.setattr(contest, "TOLERANCES", dict.fromkeys(contest.TOLERANCES, -1.0))
    code, out, err = run("bench", "kernels", "--operation", "router", "--size", "tiny", "--json")
    assert code == 1 and "bench kernels: router, with groups: torch: topk_weight differs by" in err
    assert json.loads(out.splitlines()[-1])["contests"][0]["sides"]["torch"]["wrong"]


def test_results_are_shown_as_tables(run):
    code, out, err = run("bench", "kernels", "--operation", "router", "--size", "tiny", "--seconds", 0)
    assert code == 0 and out == ""
    assert "router, with groups: tokens=24" in err and "triton: Triton kernels need a CUDA device" in err
