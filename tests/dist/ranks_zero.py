"""Rank script: engines of every ZeRO stage against one process on the same packs. Argument: the work directory.

Writes `zero.json` on rank 0: one record per case, which `test_zero.py` judges.
"""

import json
import sys
from pathlib import Path

import torch
from deepspeed.utils import safe_get_full_grad
from dist_tiny import SPEC
from transformers.initialization import no_init_weights

from lumina_ft.batch import Batch
from lumina_ft.config.schema import DataConfig, LossConfig, ModelConfig, OptimConfig
from lumina_ft.data.dataset import PackedDataset
from lumina_ft.errors import RunError
from lumina_ft.models.groups import group_of
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.parallel.dist import init_distributed
from lumina_ft.parallel.ds_config import ZeroSettings, resolve_ds_config
from lumina_ft.parallel.engine import Engine
from lumina_ft.parallel.state import adam_steps, gather_state, load_state
from lumina_ft.parallel.zero3 import full_shape, gathered
from lumina_ft.stages import ParamInfo, StagePlan, apply_plan
from lumina_ft.train.objective import TERMS, Objective, supervised_counts, term_scales
from lumina_ft.train.optim import build_optimizer
from lumina_ft.train.participation import check_participation, watched_forward
from lumina_ft.train.run import build_model

WORK = Path(sys.argv[1])
WEIGHTS = LossConfig()
CLIP = 0.05
OPTIM = OptimConfig(lr=1e-2, max_grad_norm=CLIP, weight_decay=0.1)
CONFIG = U2Config.load(WORK / "tiny.json")
WORLD = init_distributed("zero", 5.0)
FROZEN = {"word_embeddings", "attention", "experts"}


def packs(*tasks: str, count: int) -> list[Batch]:
    cfg = DataConfig(path=WORK / "data", max_pack_tokens=128, tasks=tasks)
    data = PackedDataset(cfg, spec=SPEC, seed=1)
    return [data.batch(pack) for pack in data.packs(0)[:count]]


MIXED = packs("text", "t2i", "understand", count=4)
# Rank 0 runs the even packs (text only), rank 1 the odd ones (images only).
SPLIT = [batch for pair in zip(packs("text", count=2), packs("t2i", count=2), strict=True) for batch in pair]


def make_plan(model: U2ForDiffusion, frozen: set[str]) -> StagePlan:
    infos = tuple(ParamInfo(n, group_of(n), tuple(full_shape(p))) for n, p in model.named_parameters())
    return StagePlan(0, "s", infos, {i.group: 1e-2 for i in infos if i.group not in frozen})


def build(
    zero: int,
    dtype: str,
    *,
    frozen: set[str],
    checkpointing: bool = False,
    weights: Path | None = None,
    layout: str = "",
):
    """At ZeRO-3 every parameter is partitioned, unless `layout` is `whole`; `offload` puts the optimizer on the CPU."""
    block: dict = {"stage": zero}
    if zero == 3 and layout != "whole":
        block["stage3_param_persistence_threshold"] = 0
    if layout == "offload":
        block["offload_optimizer"] = {"device": "cpu"}
    settings = ZeroSettings(WORLD.size, 2, dtype, CLIP, 5000, overlap=False)
    ds_config = resolve_ds_config({"zero_optimization": block}, settings)
    model_cfg = ModelConfig(config="x", random_init=True, dtype=dtype, gradient_checkpointing=checkpointing)
    model = build_model(model_cfg, CONFIG, ds_config, weights=weights, seed=11, world=WORLD)
    plan = make_plan(model, frozen)
    apply_plan(model, plan)
    params = dict(model.named_parameters())
    optimizer, peaks = build_optimizer(params, plan, OPTIM)
    engine = Engine(Objective(model), optimizer, ds_config, decay_unused=OPTIM.decay_unused)
    trained = {info.name: params[info.name] for info in plan.trained}
    return engine, model, trained, peaks


def accumulate(engine: Engine, batches: list[Batch]) -> None:
    """Forward and backward of this rank's share."""
    counts = dict(zip(TERMS, supervised_counts(batches).tolist(), strict=True))
    scales = term_scales(counts, WEIGHTS, WORLD.size)
    mine = batches[WORLD.rank :: WORLD.size]
    for i, batch in enumerate(mine):
        out = engine(**batch.model_inputs())
        engine.backward((out["totals"] * scales).sum(), last=i == len(mine) - 1)


def reference(batches: list[Batch], frozen: set[str]) -> tuple[dict[str, torch.Tensor], float, dict[str, torch.Tensor]]:
    """Gradients, their norm, and the weights after one clipped step, in one process without DeepSpeed."""
    with no_init_weights():
        model = U2ForDiffusion(CONFIG)
    model.init_weights_(11)
    plan = make_plan(model, frozen)
    apply_plan(model, plan)
    counts = dict(zip(TERMS, supervised_counts(batches).tolist(), strict=True))
    for batch in batches:
        out = model(**batch.model_inputs())
        loss = sum(getattr(WEIGHTS, n) * out.losses[n].total / counts[n] for n in TERMS if counts[n])
        loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    grads = {n: p.grad.clone() for n, p in trained.items()}
    optimizer, _ = build_optimizer(dict(model.named_parameters()), plan, OPTIM)
    norm = float(torch.nn.utils.clip_grad_norm_(list(trained.values()), CLIP))
    optimizer.step()
    return grads, norm, {n: p.detach().clone() for n, p in trained.items()}


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2; absolute where the reference is zero."""
    scale = float(want.norm())
    return float((got - want).detach().norm()) / (scale or 1.0)


def parity(
    name: str, zero: int, batches: list[Batch], *, frozen: set[str], checkpointing: bool = False, layout: str = ""
) -> dict:
    grads, norm, weights = reference(batches, frozen)
    engine, model, trained, peaks = build(zero, "float32", frozen=frozen, checkpointing=checkpointing, layout=layout)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad and zero < 3}
    accumulate(engine, batches)
    errors = {n: distance(safe_get_full_grad(p), grads[n]) for n, p in trained.items()}
    outcome = engine.step(peaks)
    moved = {n: t for n, key, t in gather_state(engine, trained) if key == "master"}
    record = {
        "case": name,
        "zero": zero,
        "same_names": sorted(trained) == sorted(grads),
        "worst_gradient": max(errors.values()),
        "zero_gradients": sum(float(g.norm()) == 0 for g in grads.values()),
        "norm": [outcome.grad_norm, norm],
        "applied": outcome.applied,
        "frozen_moved": [n for n, p in model.named_parameters() if n in before and not torch.equal(p, before[n])],
    }
    if WORLD.is_main:
        record["worst_weight"] = max(distance(moved[n], weights[n]) for n in trained)
    engine.close()
    return record


def weights_of(model: U2ForDiffusion) -> dict[str, torch.Tensor]:
    out = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        with gathered([tensor]):
            out[name] = tensor.detach().clone()
    return out


def same_bits(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[k].view(torch.uint8), right[k].view(torch.uint8)) for k in left
    )


def resume(zero: int, dtype: str, layout: str = "") -> dict:
    """Two steps, state out; a third step; the same third step in a new engine that got the state."""
    engine, model, trained, peaks = build(zero, dtype, frozen=FROZEN, layout=layout)
    for _ in range(2):
        accumulate(engine, MIXED)
        engine.step(peaks)
    saved = {(n, k): t for n, k, t in gather_state(engine, trained)}
    saved = WORLD.from_main(saved)
    middle = weights_of(model)
    steps = adam_steps(engine)
    accumulate(engine, MIXED)
    engine.step(peaks)
    after, masters = weights_of(model), {(n, k): t for n, k, t in gather_state(engine, trained)}
    engine.close()

    directory = WORK / f"weights-{zero}-{dtype}-{layout}"
    if WORLD.is_main:
        write_weights(directory, middle)
    WORLD.barrier()
    engine, model, trained, peaks = build(zero, dtype, frozen=FROZEN, weights=directory, layout=layout)
    load_state(engine, trained, lambda n, k: saved[n, k], adam_steps=steps)
    accumulate(engine, MIXED)
    engine.step(peaks)
    again, masters_again = weights_of(model), {(n, k): t for n, k, t in gather_state(engine, trained)}
    record = {
        "case": "resume",
        "zero": zero,
        "dtype": dtype,
        "layout": layout,
        "steps": steps,
        "weights": same_bits(after, again),
    }
    if WORLD.is_main:
        record["state"] = same_bits(masters, masters_again)
        record["moved"] = not same_bits(middle, after)
    engine.close()
    return record


def write_weights(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    directory.mkdir(exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, directory / "model.safetensors")
    CONFIG.save_pretrained(directory)


def nonfinite(zero: int, dtype: str, layout: str = "") -> dict:
    """A discarded micro-batch leaves no trace; a non-finite gradient changes nothing."""
    engine, model, trained, peaks = build(zero, dtype, frozen=FROZEN, layout=layout)
    out = engine(**MIXED[3].model_inputs())
    engine.backward(out["totals"].sum(), last=False)
    engine(**MIXED[2].model_inputs())
    engine.discard()
    accumulate(engine, MIXED)
    first = engine.step(peaks)
    discarded = weights_of(model)
    out = engine(**MIXED[WORLD.rank].model_inputs())
    bad = float("inf") if WORLD.rank == 1 else 1.0
    engine.backward(out["totals"].sum() * bad, last=True)
    second = engine.step(peaks)
    unchanged = same_bits(discarded, weights_of(model))
    engine.close()
    engine, model, trained, peaks = build(zero, dtype, frozen=FROZEN, layout=layout)
    accumulate(engine, MIXED)
    engine.step(peaks)
    record = {
        "case": "nonfinite",
        "zero": zero,
        "dtype": dtype,
        "layout": layout,
        "discard_leaves_no_trace": same_bits(discarded, weights_of(model)),
        "applied": [first.applied, second.applied],
        "unchanged": unchanged,
    }
    engine.close()
    return record


def idle_decay(zero: int, dtype: str) -> dict:
    """decay_unused=false: text only, so the image heads get exactly zero gradients and must not shrink."""
    global OPTIM
    moved = {}
    for decay_unused in (True, False):
        OPTIM = OptimConfig(lr=1e-2, max_grad_norm=CLIP, weight_decay=0.5, decay_unused=decay_unused)
        engine, model, _, peaks = build(zero, dtype, frozen=set())
        before = weights_of(model)
        accumulate(engine, SPLIT[0::2] * 2)
        engine.step(peaks)
        after = weights_of(model)
        moved[decay_unused] = {n for n in before if not torch.equal(before[n], after[n])}
        if decay_unused:
            reference_weights = after
        else:
            text = [n for n in after if n == "lm_head.weight" or ".attention." in n]
            worst = max(distance(after[n].float(), reference_weights[n].float()) for n in text)
        engine.close()
    OPTIM = OptimConfig(lr=1e-2, max_grad_norm=CLIP, weight_decay=0.1)
    return {
        "case": "idle_decay",
        "zero": zero,
        "dtype": dtype,
        "image_heads_decayed": sorted({n for n in moved[True] if n.startswith("lm_img_head")})[:1],
        "image_heads_kept": not any(n.startswith("lm_img_head") for n in moved[False]),
        "text_agrees": worst,
    }


def buffers() -> dict:
    """zero.Init in bf16: buffers keep dtype and bits; near ties between experts are decided in fp32."""
    directory = WORK / "biased"
    if WORLD.is_main:
        with no_init_weights():
            model = U2ForDiffusion(CONFIG)
        model.init_weights_(11)
        # Without router weights all scores are 0.5: the biases alone decide.
        routers = {n: torch.zeros_like(p) for n, p in model.named_parameters() if n.endswith("mlp.gate.weight")}
        write_weights(directory, {**model.state_dict(), **routers, **biases(model)})
    WORLD.barrier()
    engine, model, _, _ = build(3, "bfloat16", frozen=FROZEN, weights=directory)
    wanted = {**dict(model.named_buffers()), **biases(model)}
    found = dict(model.named_buffers())
    with torch.no_grad():
        out = engine.module.model(**MIXED[0].model_inputs())
    chosen = [topk.sort(-1).values.unique(dim=0).tolist() for topk in out.router_topk]
    rounded = {n: b.bfloat16().float() for n, b in biases(model).items()}
    record = {
        "case": "buffers",
        "parameters": sorted({str(p.dtype) for p in model.parameters()}),
        "dtypes": sorted({f"{n.rsplit('.', 1)[1]}:{b.dtype}" for n, b in found.items()}),
        "equal": all(torch.equal(found[n].view(torch.uint8), b.view(torch.uint8)) for n, b in wanted.items()),
        "chosen": chosen,
        "rounding_would_tie": all(len(set(b.tolist())) == 1 for b in rounded.values()),
    }
    engine.close()
    return record


def biases(model: U2ForDiffusion) -> dict[str, torch.Tensor]:
    """Biases closer to each other than bf16 resolves at their size: experts 6 and 7 win, rounded all would tie."""
    names = [n for n, _ in model.named_buffers() if n.endswith("expert_bias")]
    return {n: 100.0 + torch.arange(8, dtype=torch.float32) * 0.02 for n in names}


def participation(zero: int, fault: str) -> dict:
    """Image heads that rank 0 doesn't call, or calls without using what they return."""
    engine, model, trained, _ = build(zero, "float32", frozen=set())
    if WORLD.rank == 0 and fault == "skip":
        model.image_states = lambda hidden, codes: hidden.new_zeros(codes.shape[0], codes.shape[1], 32)
    elif WORLD.rank == 0:
        head = model._image_head
        model._image_head = lambda states: head(states).detach()
    message = ""
    try:
        with watched_forward(model, WORLD):
            out = engine(**SPLIT[WORLD.rank].model_inputs())
        check_participation(out["totals"].sum(), trained, WORLD)
    except RunError as error:
        message = str(error)
    return {"case": "participation", "zero": zero, "fault": fault, "message": message}


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    records = []
    for zero in (0, 1, 2, 3):
        records.append(parity("mixed", zero, MIXED, frozen=set(), checkpointing=zero in (2, 3)))
        records.append(parity("split", zero, SPLIT, frozen=set()))
        records.append(parity("frozen", zero, MIXED, frozen=FROZEN, checkpointing=True))
        for dtype in ("float32", "bfloat16"):
            records.append(resume(zero, dtype))
            records.append(nonfinite(zero, dtype))
            records.append(idle_decay(zero, dtype))
    records.append(parity("whole", 3, MIXED, frozen=set(), checkpointing=True, layout="whole"))
    for zero, layout in ((3, "whole"), (3, "offload"), (2, "offload")):
        records += [resume(zero, "float32", layout), nonfinite(zero, "float32", layout)]
    records.append(buffers())
    records += [participation(zero, fault) for zero in (2, 3) for fault in ("skip", "detach")]
    if WORLD.is_main:
        (WORK / "zero.json").write_text(json.dumps(records))


main()
