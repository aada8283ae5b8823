"""Rank script: engines of every ZeRO stage against one process on the same packs.

Arguments: the work directory, and which cases: `core` or `rest`. Writes `zero-PART.json` on rank 0: one record per
case, which `test_zero.py` judges.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from deepspeed.utils import safe_get_full_grad
from dist_engines import (
    accumulate,
    choose_near_ties,
    distance,
    fresh_model,
    make_plan,
    nonfinite,
    packs,
    reference_step,
    resume,
    weights_of,
)

from lumina_ft.batch import Batch
from lumina_ft.config.schema import ModelConfig, OptimConfig
from lumina_ft.errors import RunError
from lumina_ft.kernels import LinearLoss
from lumina_ft.models.u2_config import U2Config
from lumina_ft.parallel.dist import init_distributed
from lumina_ft.parallel.ds_config import ZeroSettings, resolve_ds_config
from lumina_ft.parallel.engine import Engine
from lumina_ft.parallel.state import gather_state
from lumina_ft.stages import apply_plan
from lumina_ft.train.objective import Objective
from lumina_ft.train.optim import build_optimizer
from lumina_ft.train.participation import check_participation, watched_forward
from lumina_ft.train.run import build_model

WORK, PART = Path(sys.argv[1]), sys.argv[2]
CLIP = 0.05
OPTIM = OptimConfig(lr=1e-2, max_grad_norm=CLIP, weight_decay=0.1)
CONFIG = U2Config.load(WORK / "tiny.json")
WORLD = init_distributed("zero", 5.0)
FROZEN = {"word_embeddings", "attention", "experts"}


DATA = WORK / "data"
MIXED = packs(DATA, "text", "t2i", "understand", count=4)
# Rank 0 runs the even packs (text only), rank 1 the odd ones (images only).
SPLIT = [
    batch for pair in zip(packs(DATA, "text", count=2), packs(DATA, "t2i", count=2), strict=True) for batch in pair
]


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


def parity(
    name: str, zero: int, batches: list[Batch], *, frozen: set[str], checkpointing: bool = False, layout: str = ""
) -> dict:
    plain = fresh_model(CONFIG)
    _, grads, norm, weights = reference_step(plain, make_plan(plain, frozen), batches, OPTIM)
    engine, model, trained, peaks = build(zero, "float32", frozen=frozen, checkpointing=checkpointing, layout=layout)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad and zero < 3}
    accumulate(engine, batches, WORLD)
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


def continued(zero: int, dtype: str, layout: str = "") -> list[dict]:
    """What has to leave no trace: a change of engines, and gradients that were dropped."""
    key = {"zero": zero, "dtype": dtype, "layout": layout}
    make = partial(build, zero, dtype, frozen=FROZEN, layout=layout)
    directory = WORK / f"weights-{zero}-{dtype}-{layout}"
    return [
        {"case": "resume", **key, **resume(make, MIXED, directory, CONFIG, WORLD)},
        {"case": "nonfinite", **key, **nonfinite(make, MIXED, WORLD)},
    ]


def idle_decay(zero: int, dtype: str) -> dict:
    """decay_unused=false: text only, so the image heads get exactly zero gradients and must not shrink."""
    global OPTIM
    moved = {}
    for decay_unused in (True, False):
        OPTIM = OptimConfig(lr=1e-2, max_grad_norm=CLIP, weight_decay=0.5, decay_unused=decay_unused)
        engine, model, _, peaks = build(zero, dtype, frozen=set())
        before = weights_of(model)
        accumulate(engine, SPLIT[0::2] * 2, WORLD)
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


def participation(zero: int, fault: str) -> dict:
    """Image heads that rank 0 doesn't call, or calls without using what they return."""
    engine, model, trained, _ = build(zero, "float32", frozen=set())
    if WORLD.rank == 0 and fault == "skip":
        model.image_states = lambda hidden, codes: hidden.new_zeros(codes.shape[0], codes.shape[1], 32)
    elif WORLD.rank == 0:
        loss = model._image_loss
        model._image_loss = lambda states, codes: LinearLoss(*(t.detach() for t in loss(states, codes)))
    message = ""
    try:
        with watched_forward(model, WORLD):
            out = engine(**SPLIT[WORLD.rank].model_inputs())
        check_participation(out["totals"].sum(), trained, WORLD)
    except RunError as error:
        message = str(error)
    return {"case": "participation", "zero": zero, "fault": fault, "message": message}


def of_stage(zero: int) -> list[dict]:
    records = [
        parity("mixed", zero, MIXED, frozen=set(), checkpointing=zero in (2, 3)),
        parity("split", zero, SPLIT, frozen=set()),
        parity("frozen", zero, MIXED, frozen=FROZEN, checkpointing=True),
    ]
    return records + [idle_decay(zero, dtype) for dtype in ("float32", "bfloat16")]


def core() -> list[dict]:
    records = of_stage(2) + of_stage(3)
    records.append(parity("whole", 3, MIXED, frozen=set(), checkpointing=True, layout="whole"))
    records += continued(2, "bfloat16") + continued(3, "float32") + continued(3, "float32", "offload")
    near_ties = choose_near_ties(partial(build, 3, "bfloat16", frozen=FROZEN), MIXED[0], WORK / "biased", CONFIG, WORLD)
    records.append({"case": "buffers", **near_ties})
    return records + [participation(zero, fault) for zero in (2, 3) for fault in ("skip", "detach")]


def rest() -> list[dict]:
    records = of_stage(0) + of_stage(1)
    for zero, dtype in ((0, "float32"), (0, "bfloat16"), (1, "float32"), (1, "bfloat16")):
        records += continued(zero, dtype)
    records += continued(2, "float32") + continued(3, "bfloat16")
    return records + continued(3, "float32", "whole") + continued(2, "float32", "offload")


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    records = {"core": core, "rest": rest}[PART]()
    if WORLD.is_main:
        (WORK / f"zero-{PART}.json").write_text(json.dumps(records))


main()
WORLD.close()
