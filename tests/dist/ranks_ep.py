"""Rank script: experts shared among ranks, in engines of every ZeRO stage, against one process on the same packs.

Arguments: the work directory, and which cases: `core` or `rest` (two ranks), `four` (four ranks). Writes `ep-PART.json`
on rank 0: one record per case, which `test_expert_parallel.py` judges.
"""

import json
import sys
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import safe_get_full_grad
from dist_engines import (
    Built,
    Reference,
    accumulate,
    biases,
    choose_near_ties,
    distance,
    fresh_model,
    make_plan,
    nonfinite,
    packs,
    reference_step,
    resume,
)
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Parameter

from lumina_ft.adapters.lora import attach_adapter
from lumina_ft.config.groups import GROUPS_U2
from lumina_ft.config.lora_schema import LoraConfig
from lumina_ft.config.schema import ModelConfig, OptimConfig
from lumina_ft.models import experts as experts_module
from lumina_ft.models.groups import is_adapter_b, is_adapter_name
from lumina_ft.models.moe import Router
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.parallel.dist import init_distributed
from lumina_ft.parallel.ds_config import ZeroSettings, resolve_ds_config
from lumina_ft.parallel.engine import Engine
from lumina_ft.parallel.expert_parallel import gather_experts, join_experts, sharing_of
from lumina_ft.parallel.state import gather_state
from lumina_ft.parallel.zero3 import full_shape, gathered, write_tensor
from lumina_ft.stages import apply_plan
from lumina_ft.train.objective import Objective
from lumina_ft.train.optim import build_optimizer
from lumina_ft.train.run import build_model

WORK, PART = Path(sys.argv[1]), sys.argv[2]
GOLDEN = Path(__file__).parents[1] / "golden"
CLIP = 0.05
OPTIM = OptimConfig(lr=1e-2, max_grad_norm=CLIP, weight_decay=0.1, decay_unused=False)
CONFIG = U2Config.load(WORK / "tiny.json")
WORLD = init_distributed("ep", 5.0)
# Two micro-batches of each rank.
PACKS = packs(WORK / "data", "text", "t2i", "understand", count=2 * WORLD.size)
ALL_BUT_EXPERTS = frozenset(GROUPS_U2) - {"experts"}
LORA = LoraConfig(rank=4, alpha=8, dropout=0.2, targets=("attention", "experts"))
OFFLOAD: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}


def build(
    zero: int,
    ep: int,
    dtype: str = "float32",
    *,
    frozen: frozenset[str] = frozenset(),
    checkpointing: bool = False,
    weights: Path | None = None,
    config: U2Config = CONFIG,
    bias: Tensor | None = None,
    adapted: bool = False,
    marked: bool = True,
    **block: object,
) -> Built:
    """Every parameter is partitioned at ZeRO-3.

    Args:
        adapted: train an adapter alone. marked: False plants a fault: adapters of experts pass for whole ones.
        block: more keys of `zero_optimization`.
    """
    raw = {"zero_optimization": {"stage": zero, **block}}
    if zero == 3:
        raw["zero_optimization"].setdefault("stage3_param_persistence_threshold", 0)
    settings = ZeroSettings(WORLD.size, 2, dtype, CLIP, 5000, overlap=False, expert_parallel_size=ep)
    ds_config = resolve_ds_config(raw, settings)
    model_cfg = ModelConfig(config="x", random_init=True, dtype=dtype, gradient_checkpointing=checkpointing)
    experts = join_experts(ep)
    model = build_model(model_cfg, config, ds_config, weights=weights, seed=11, world=WORLD, experts=experts)
    if bias is not None:
        model.load_state_dict(biases(model, bias), strict=False)
    if adapted:
        adapt(model)
    if not marked:
        shared = [p for n, p in model.named_parameters() if is_adapter_name(n) and sharing_of(p)]
        for param in shared:
            for mark in list(vars(param)):
                delattr(param, mark)
    plan = make_plan(model, frozenset(GROUPS_U2) if adapted else frozen)
    apply_plan(model, plan)
    params = dict(model.named_parameters())
    optimizer, peaks = build_optimizer(params, plan, OPTIM)
    engine = Engine(Objective(model), optimizer, ds_config, decay_unused=OPTIM.decay_unused)
    if not marked:
        for param in shared:
            param.expert_parallel = experts
    return engine, model, {info.name: params[info.name] for info in plan.trained}, peaks


def adapt(model: U2ForDiffusion) -> None:
    """Adapters on attention and routed experts, with dropout, and with B matrices that aren't zero."""
    attach_adapter(model, LORA, seed=3, dtype=next(model.parameters()).dtype)
    generator = torch.Generator().manual_seed(5)
    for name, param in model.named_parameters():
        if is_adapter_b(name):
            write_tensor(param, torch.randn(full_shape(param), generator=generator) * 0.1)
    model.gradient_checkpointing_enable({"preserve_rng_state": True})


def whole_gradient(param: Parameter) -> Tensor:
    local, experts = safe_get_full_grad(param), sharing_of(param)
    return local if experts is None else gather_experts(local, experts)


@lru_cache
def one_process(dtype: str, frozen: frozenset[str], starved: bool, adapted: bool) -> Reference:
    model = fresh_model(CONFIG)
    if starved:
        model.load_state_dict(biases(model, starving()), strict=False)
    model.to(getattr(torch, dtype))
    if adapted:
        adapt(model)
    return reference_step(model, make_plan(model, frozenset(GROUPS_U2) if adapted else frozen), PACKS, OPTIM)


def parity(name: str, zero: int, ep: int, dtype: str = "float32", **options: Any) -> dict:
    """One clipped step, compared with that of one process."""
    starved = "bias" in options
    want = one_process(dtype, options.get("frozen", frozenset()), starved, options.get("adapted", False))
    engine, _, trained, peaks = build(zero, ep, dtype, **options)
    loss = accumulate(engine, PACKS, WORLD)
    record = {"case": name, "zero": zero, "ep": ep, "dtype": dtype}
    if starved:
        local = safe_get_full_grad(trained["model.layers.1.mlp.experts.gate_proj"])
        record["experts_reached"] = WORLD.gather_ints(int(local.flatten(1).any(1).sum()))
    return record | compare(engine, trained, peaks, loss, want)


def compare(
    engine: Engine, trained: dict[str, Parameter], peaks: dict[str, float], loss: float, want: Reference
) -> dict:
    """Gradients, then the norm and the weights of the step. Ends the engine."""
    errors = {n: distance(whole_gradient(p), want.grads[n]) for n, p in trained.items()}
    worst = max(errors, key=errors.__getitem__)
    outcome = engine.step(peaks)
    moved = {n: t for n, kind, t in gather_state(engine, trained) if kind == "master"}
    record = {
        "loss": [loss, want.loss],
        "same_names": sorted(trained) == sorted(want.grads),
        "worst_gradient": errors[worst],
        "worst_name": worst,
        "norm": [outcome.grad_norm, want.norm],
        "applied": outcome.applied,
    }
    if WORLD.is_main:
        record["worst_weight"] = max(distance(moved[n], want.weights[n]) for n in trained)
    engine.close()
    return record


def starving() -> Tensor:
    """Selection bias that gives every token to experts of the first rank of two, and none to the others."""
    return torch.where(torch.arange(8) < 4, 100.0, -100.0)


def golden_gate(name: str) -> dict:
    """The router inside a bf16 engine chooses the experts of the golden case."""
    config = U2Config.load(GOLDEN / name)
    stored = load_file(GOLDEN / name / "gate.safetensors")
    engine, model, _, _ = build(3, 2, "bfloat16", weights=GOLDEN / name, config=config)
    router = model.model.layers[1].mlp.gate
    with torch.no_grad(), gathered(router.parameters()):
        topk = Router.forward(router, stored["hidden"]).topk_idx
    record = {
        "case": "gate",
        "golden": name,
        "weight": str(router.weight.dtype),
        "bias": torch.equal(router.expert_bias, stored["expert_bias"]),
        "chosen": torch.equal(topk, stored["topk_idx"]),
        "bias_matters": not torch.equal(topk, stored["nobias_topk_idx"]),
    }
    engine.close()
    return record


def continued(zero: int, dtype: str, ep: int = 2, **block: object) -> list[dict]:
    """What has to leave no trace: a change of engines, and gradients that were dropped."""
    key = {"zero": zero, "ep": ep, "dtype": dtype, "offload": bool(block)}
    make = partial(build, zero, ep, dtype, frozen=frozenset({"word_embeddings"}), **block)
    directory = WORK / f"weights-{zero}-{ep}-{dtype}-{len(block)}"
    return [
        {"case": "resume", **key, **resume(make, PACKS, directory, CONFIG, WORLD)},
        {"case": "nonfinite", **key, **nonfinite(make, PACKS, WORLD)},
    ]


def over_replicas(self: object, params: list, size: int) -> int:
    return size


def wrongly_averaged() -> dict:
    """Planted fault: gradients of experts are averaged over those who hold the same experts only."""
    with patch.object(DeepSpeedZeroOptimizer_Stage3, "_gradient_averaging_world_size", over_replicas):
        return parity("wrong_average", 3, 2)


def transposed() -> dict:
    """Planted fault: ranks expect as many rows as they send."""
    real = experts_module.exchange_rows
    engine, *_ = build(2, 2)
    message = ""
    with patch.object(experts_module, "exchange_rows", lambda rows, send, receive, ep: real(rows, receive, send, ep)):
        try:
            engine(**PACKS[WORLD.rank].model_inputs())
        except (RuntimeError, ValueError) as error:
            message = str(error)
    return {"case": "transposed", "messages": WORLD.gather_objects(message)}


def core() -> list[dict]:
    records = [parity("plain", zero, 2, checkpointing=True) for zero in (1, 2, 3)]
    records += [parity("starved", zero, 2, bias=starving()) for zero in (2, 3)]
    records += [parity("bf16", zero, 2, "bfloat16") for zero in (1, 3)]
    records += [parity("adapted", zero, 2, adapted=True) for zero in (2, 3)]
    records += continued(2, "float32") + continued(3, "bfloat16")
    near_ties = choose_near_ties(partial(build, 3, 2, "bfloat16"), PACKS[0], WORK / "near-ties", CONFIG, WORLD)
    records += [{"case": "near_ties", **near_ties}, golden_gate("A"), golden_gate("B")]
    return [*records, parity("unmarked", 3, 2, adapted=True, marked=False), wrongly_averaged(), transposed()]


def rest() -> list[dict]:
    frozen = frozenset({"word_embeddings", "attention", "experts"})
    records = [parity("starved", 1, 2, bias=starving()), parity("bf16", 2, 2, "bfloat16")]
    records += [parity("starved", zero, 2, "bfloat16", bias=starving()) for zero in (1, 3)]
    records += [parity("adapted", 1, 2, adapted=True), parity("unmarked", 2, 2, adapted=True, marked=False)]
    records += [parity("adapted_bf16", zero, 2, "bfloat16", adapted=True) for zero in (1, 2, 3)]
    for zero in (1, 2, 3):
        records += [
            parity("frozen", zero, 2, frozen=frozen, checkpointing=True),
            parity("only_experts", zero, 2, frozen=ALL_BUT_EXPERTS, checkpointing=True),
            parity("only_experts", zero, 2, "bfloat16", frozen=ALL_BUT_EXPERTS),
        ]
    for zero in (2, 3):
        records.append(parity("offload", zero, 2, **OFFLOAD))
        records += continued(zero, "float32", **OFFLOAD)
    records.append(parity("offload_param", 3, 2, **OFFLOAD, offload_param={"device": "cpu"}))
    records.append(parity("whole", 3, 2, stage3_param_persistence_threshold=10**6))
    records.append(parity("prefetch", 3, 2, stage3_prefetch_bucket_size=3000, checkpointing=True))
    records.append(parity("aligned", 2, 2, parameter_alignment=True))
    records += continued(1, "bfloat16") + continued(1, "float32") + continued(2, "bfloat16") + continued(3, "float32")
    return records


def four() -> list[dict]:
    records = []
    for ep in (2, 4):
        for zero in (1, 2, 3):
            records.append(parity("plain", zero, ep, checkpointing=True))
            records.append(parity("bf16", zero, ep, "bfloat16"))
            if zero > 1:
                records.append(parity("starved", zero, ep, bias=starving()))
                records.append(parity("adapted", zero, ep, adapted=True))
    records += continued(1, "bfloat16", 2) + continued(2, "float32", 4) + continued(3, "float32", 2)
    return [*records, wrongly_averaged()]


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    records = {"core": core, "rest": rest, "four": four}[PART]()
    if WORLD.is_main:
        (WORK / f"ep-{PART}.json").write_text(json.dumps(records))


main()
WORLD.close()
