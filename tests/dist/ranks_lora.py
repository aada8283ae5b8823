"""Rank script: adapters in engines of every ZeRO stage, against one process.

Arguments: the work directory, and which cases: `core` or `rest`. Writes `lora-PART.json` on rank 0: one record per
case, which `test_lora.py` judges.
"""

import json
import sys
from pathlib import Path

import torch
from deepspeed.utils import safe_get_full_grad
from dist_tiny import SPEC
from torch import Tensor
from transformers.initialization import no_init_weights

from lumina_ft.adapters.files import read_adapter, write_adapter
from lumina_ft.adapters.lora import Adapter, attach_adapter, merged_tensors
from lumina_ft.batch import Batch
from lumina_ft.config.lora_schema import LoraConfig
from lumina_ft.config.schema import DataConfig, LossConfig, ModelConfig, OptimConfig
from lumina_ft.data.dataset import PackedDataset
from lumina_ft.models.groups import group_of
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.parallel.dist import init_distributed
from lumina_ft.parallel.ds_config import ZeroSettings, resolve_ds_config
from lumina_ft.parallel.engine import Engine
from lumina_ft.parallel.zero3 import full_shape, gathered, write_tensor
from lumina_ft.stages import ParamInfo, StagePlan, apply_plan
from lumina_ft.train.dropout import seed_dropout
from lumina_ft.train.objective import TERMS, Objective, supervised_counts, term_scales
from lumina_ft.train.optim import build_optimizer
from lumina_ft.train.participation import check_participation, watched_forward
from lumina_ft.train.run import build_model

WORK, PART = Path(sys.argv[1]), sys.argv[2]
WEIGHTS = LossConfig()
OPTIM = OptimConfig(lr=1e-2, max_grad_norm=1.0)
CONFIG = U2Config.load(WORK / "tiny.json")
WORLD = init_distributed("lora", 5.0)
BASE = WORK / "base"
EVERYWHERE = ("attention", "dense_mlp", "shared_experts", "codebook_head", "image_projection", "lm_head", "image_heads")
CASES: dict[str, LoraConfig] = {
    "plain": LoraConfig(rank=4, alpha=8, targets=EVERYWHERE),
    "dora": LoraConfig(rank=4, alpha=8, targets=EVERYWHERE, use_dora=True),
    "pissa": LoraConfig(rank=4, alpha=8, init="pissa", rank_pattern={"attention.dense": 2}),
    "dropout": LoraConfig(rank=4, alpha=8, dropout=0.2, targets=("attention", "shared_experts", "codebook_head")),
    "dora_dropout": LoraConfig(rank=4, alpha=8, dropout=0.2, use_dora=True),
    "beside": LoraConfig(rank=4, alpha=8, targets=("attention",), modules_to_save=("heads",)),
}


def packs() -> list[Batch]:
    data = PackedDataset(DataConfig(path=WORK / "data", max_pack_tokens=128), spec=SPEC, seed=1)
    return [data.batch(pack) for pack in data.packs(0)[:4]]


PACKS = packs()


def prepare(model: U2ForDiffusion, name: str, dtype: torch.dtype) -> tuple[Adapter, StagePlan]:
    """Attach the case's adapter, with B matrices that aren't zero, and plan what is trained."""
    cfg = CASES[name]
    adapter = attach_adapter(model, cfg, seed=3, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    for parameter_name, param in model.named_parameters():
        if ".lora_B." in parameter_name and not adapter.start:
            write_tensor(param, torch.randn(full_shape(param), generator=generator) * 0.1)
    if cfg.dropout:
        model.gradient_checkpointing_enable({"preserve_rng_state": True})
    infos = tuple(ParamInfo(n, group_of(n), tuple(full_shape(p))) for n, p in model.named_parameters())
    trained = {"lora"} | ({"lm_head", "image_heads", "codebook_head"} if cfg.modules_to_save else set())
    plan = StagePlan(0, "s", infos, dict.fromkeys(sorted(trained), 1e-2))
    apply_plan(model, plan)
    return adapter, plan


def build(name: str, zero: int, dtype: str):
    block: dict = {"stage": zero} | ({"stage3_param_persistence_threshold": 0} if zero == 3 else {})
    ds_config = resolve_ds_config(
        {"zero_optimization": block}, ZeroSettings(WORLD.size, 2, dtype, OPTIM.max_grad_norm, 5000, overlap=False)
    )
    model_cfg = ModelConfig(config="x", random_init=True, dtype=dtype, gradient_checkpointing=True)
    model = build_model(model_cfg, CONFIG, ds_config, weights=BASE, seed=11, world=WORLD)
    adapter, plan = prepare(model, name, getattr(torch, dtype))
    params = dict(model.named_parameters())
    optimizer, peaks = build_optimizer(params, plan, OPTIM, lr_ratio=2.0)
    engine = Engine(Objective(model), optimizer, ds_config)
    engine.train()
    return engine, model, adapter, {info.name: params[info.name] for info in plan.trained}, peaks


def accumulate(engine: Engine, model: U2ForDiffusion, trained: dict) -> None:
    """Forward and backward of this rank's share, with the loop's own checks and draws."""
    counts = dict(zip(TERMS, supervised_counts(PACKS).tolist(), strict=True))
    scales = term_scales(counts, WEIGHTS, WORLD.size)
    mine = PACKS[WORLD.rank :: WORLD.size]
    for i, batch in enumerate(mine):
        seed_dropout(7, 0, 0, i * WORLD.size + WORLD.rank)
        if i == 0:
            with watched_forward(model, WORLD):
                out = engine(**batch.model_inputs())
            check_participation(out["totals"].sum(), trained, WORLD)
        else:
            out = engine(**batch.model_inputs())
        engine.backward((out["totals"] * scales).sum(), last=i == len(mine) - 1)


def write_base() -> None:
    """Random weights, also where a fresh model has zeros, which would hide the codebook head's blocks."""
    with no_init_weights():
        model = U2ForDiffusion(CONFIG)
    model.init_weights_(11)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "adaLN" in name:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    model.save_pretrained(BASE)


def reference(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients in one process without DeepSpeed, and the weights with the adapter merged."""
    model = U2ForDiffusion.from_pretrained(BASE)
    adapter, _ = prepare(model, name, torch.float32)
    merged = {n: t.clone() for n, t, _ in merged_tensors(model, adapter)}
    counts = dict(zip(TERMS, supervised_counts(PACKS).tolist(), strict=True))
    model.train()
    for number, batch in enumerate(PACKS):
        seed_dropout(7, 0, 0, number)
        out = model(**batch.model_inputs())
        sum(getattr(WEIGHTS, n) * out.losses[n].total / counts[n] for n in TERMS if counts[n]).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}, merged


def distance(got: Tensor, want: Tensor) -> float:
    """Relative L2; absolute where the reference is zero."""
    return float((got - want).detach().norm()) / (float(want.norm()) or 1.0)


def frozen_weights(model: U2ForDiffusion) -> dict[str, Tensor]:
    out = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            with gathered([param]):
                out[name] = param.detach().clone()
    return out


def parity(name: str, zero: int) -> dict:
    grads, merged = reference(name)
    engine, model, adapter, trained, peaks = build(name, zero, "float32")
    worst_merged = max(distance(t, merged[n]) for n, t, _ in merged_tensors(model, adapter) if "channel_mask" not in n)
    before = frozen_weights(model)
    accumulate(engine, model, trained)
    errors = {n: distance(safe_get_full_grad(p), grads[n]) for n, p in trained.items()}
    outcome = engine.step(peaks)
    after = frozen_weights(model)
    record = {
        "case": name,
        "zero": zero,
        "same_names": sorted(trained) == sorted(grads),
        "worst_gradient": max(errors.values()),
        "zero_gradients": [n for n, g in grads.items() if float(g.norm()) == 0],
        "worst_merged": worst_merged,
        "applied": outcome.applied,
        "rates": sorted(peaks.values()),
        "frozen_moved": [n for n in before if not torch.equal(before[n], after[n])],
    }
    engine.close()
    return record


def stored(name: str, zero: int) -> dict:
    """The adapter as written in bf16: the same bits whatever the ZeRO stage."""
    engine, model, adapter, *_ = build(name, zero, "bfloat16")
    folder = WORK / f"{name}-{zero}"
    write_adapter(folder if WORLD.is_main else None, model, adapter, base=None, base_name="base", changed=())
    engine.close()
    WORLD.barrier()
    file = read_adapter(folder)
    pairs = {module: file.pair(module) for module in file.targets}
    other = read_adapter(WORK / f"{name}-2")
    same = all(
        torch.equal(mine, theirs)
        for module in pairs
        for mine, theirs in zip(pairs[module], other.pair(module), strict=True)
        if isinstance(mine, Tensor) and isinstance(theirs, Tensor)
    )
    return {"case": "stored", "name": name, "zero": zero, "same": same, "dtype": str(pairs[next(iter(pairs))].a.dtype)}


PARITY = {
    "core": (
        ("plain", 0),
        ("plain", 3),
        ("dora", 3),
        ("pissa", 2),
        ("dropout", 2),
        ("dora_dropout", 3),
        ("beside", 3),
    ),
    "rest": (("plain", 2), ("dora", 2), ("pissa", 3), ("dropout", 3), ("dora_dropout", 2), ("beside", 2)),
}
STORED = {"core": "dora", "rest": "pissa"}


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if WORLD.is_main:
        write_base()
    WORLD.barrier()
    records = [parity(name, zero) for name, zero in PARITY[PART]]
    records += [stored(STORED[PART], zero) for zero in (2, 3)]
    if WORLD.is_main:
        (WORK / f"lora-{PART}.json").write_text(json.dumps(records))


main()
WORLD.close()
