"""What rank scripts share that compare engines with one process: packs, plan, gradients, distances."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from dist_tiny import SPEC
from torch import Tensor
from torch.nn import Parameter
from transformers.initialization import no_init_weights

from lumina_ft.batch import Batch
from lumina_ft.config.schema import DataConfig, LossConfig, OptimConfig
from lumina_ft.data.dataset import PackedDataset
from lumina_ft.models.groups import group_of
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.parallel.dist import World
from lumina_ft.parallel.engine import Engine
from lumina_ft.parallel.state import adam_steps, gather_state, load_state
from lumina_ft.parallel.zero3 import full_shape, whole
from lumina_ft.stages import ParamInfo, StagePlan, apply_plan
from lumina_ft.train.dropout import seed_dropout
from lumina_ft.train.objective import TERMS, supervised_counts, term_scales
from lumina_ft.train.optim import build_optimizer

WEIGHTS = LossConfig()

Built = tuple[Engine, U2ForDiffusion, dict[str, Parameter], dict[str, float]]
"""Engine, model, trained parameters by name, learning rates."""
Build = Callable[..., Built]
"""Makes a new engine; `weights` is a directory to load."""


class Reference(NamedTuple):
    """One step in one process without DeepSpeed.

    Attributes:
        grads: fp32, before clipping. norm: of all of them.
        weights: after the step.
    """

    loss: float
    grads: dict[str, Tensor]
    norm: float
    weights: dict[str, Tensor]


def packs(data: Path, *tasks: str, count: int) -> list[Batch]:
    """The first packs of an epoch."""
    dataset = PackedDataset(DataConfig(path=data, max_pack_tokens=128, tasks=tasks or None), spec=SPEC, seed=1)
    return [dataset.batch(pack) for pack in dataset.packs(0)[:count]]


def fresh_model(config: U2Config, seed: int = 11) -> U2ForDiffusion:
    """In one process, as `build_model` draws it."""
    with no_init_weights():
        model = U2ForDiffusion(config)
    model.init_weights_(seed)
    return model


def make_plan(model: U2ForDiffusion, frozen: Collection[str]) -> StagePlan:
    """Everything but the frozen groups trains, at one rate."""
    infos = tuple(ParamInfo(n, group_of(n), tuple(full_shape(p))) for n, p in model.named_parameters())
    return StagePlan(0, "s", infos, {i.group: 1e-2 for i in infos if i.group not in frozen})


def reference_step(model: U2ForDiffusion, plan: StagePlan, batches: Sequence[Batch], optim: OptimConfig) -> Reference:
    """Gradients are summed in fp32, whatever the model's dtype.

    Without `decay_unused`, parameters whose gradient is zero stay as they are.
    """
    apply_plan(model, plan)
    counts = dict(zip(TERMS, supervised_counts(batches).tolist(), strict=True))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    grads = {n: torch.zeros(p.shape) for n, p in trained.items()}
    total = 0.0
    for number, batch in enumerate(batches):
        seed_dropout(7, 0, 0, number)
        out = model(**batch.model_inputs())
        loss = sum(getattr(WEIGHTS, n) * out.losses[n].total.float() / counts[n] for n in TERMS if counts[n])
        loss.backward()
        total += float(loss.detach())
        for name, param in trained.items():
            grads[name] += param.grad
            param.grad = None
    masters = {n: p.detach().float().clone().requires_grad_() for n, p in trained.items()}
    for name, master in masters.items():
        master.grad = grads[name].clone()
    optimizer, _ = build_optimizer({**dict(model.named_parameters()), **masters}, plan, optim)
    norm = float(torch.nn.utils.clip_grad_norm_(list(masters.values()), optim.max_grad_norm))
    optimizer.step()
    weights = {n: p.detach() for n, p in masters.items()}
    if not optim.decay_unused:
        weights |= {n: trained[n].detach().float() for n, grad in grads.items() if not grad.any()}
    return Reference(total, grads, norm, weights)


def accumulate(engine: Engine, batches: Sequence[Batch], world: World) -> float:
    """Forward and backward of this rank's share.

    Returns:
        The step's loss over all ranks.
    """
    counts = dict(zip(TERMS, supervised_counts(batches).tolist(), strict=True))
    scales = term_scales(counts, WEIGHTS, world.size)
    mine = batches[world.rank :: world.size]
    total = torch.zeros(1, dtype=torch.float64)
    for i, batch in enumerate(mine):
        seed_dropout(7, 0, 0, i * world.size + world.rank)
        out = engine(**batch.model_inputs())
        loss = (out["totals"] * scales).sum()
        engine.backward(loss, last=i == len(mine) - 1)
        total += loss.detach().double()
    return float(world.sum(total)) / world.size


def distance(got: Tensor, want: Tensor) -> float:
    """Relative L2; absolute where the reference is zero."""
    return float((got - want).detach().norm()) / (float(want.norm()) or 1.0)


def weights_of(model: U2ForDiffusion) -> dict[str, Tensor]:
    """Whole weights and buffers. Collective."""
    out = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        with whole([tensor]) as (value,):
            out[name] = value.clone()
    return out


def same_bits(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[k].view(torch.uint8), right[k].view(torch.uint8)) for k in left
    )


def write_weights(directory: Path, tensors: dict[str, Tensor], config: U2Config) -> None:
    from safetensors.torch import save_file

    directory.mkdir(exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, directory / "model.safetensors")
    config.save_pretrained(directory)


def biases(model: U2ForDiffusion, values: Tensor) -> dict[str, Tensor]:
    """The same selection bias for every router, by the buffers' names."""
    return {n: values.clone() for n, _ in model.named_buffers() if n.endswith("expert_bias")}


def resume(build: Build, batches: Sequence[Batch], directory: Path, config: U2Config, world: World) -> dict:
    """Two steps, state out; a third step; the same third step in a new engine that got the state."""
    engine, model, trained, peaks = build()
    for _ in range(2):
        accumulate(engine, batches, world)
        engine.step(peaks)
    saved = world.from_main({(n, k): t for n, k, t in gather_state(engine, trained)})
    middle = weights_of(model)
    steps = adam_steps(engine)
    accumulate(engine, batches, world)
    engine.step(peaks)
    after, masters = weights_of(model), {(n, k): t for n, k, t in gather_state(engine, trained)}
    engine.close()

    if world.is_main:
        write_weights(directory, middle, config)
    world.barrier()
    engine, model, trained, peaks = build(weights=directory)
    load_state(engine, trained, lambda n, k: saved[n, k], adam_steps=steps)
    accumulate(engine, batches, world)
    engine.step(peaks)
    again, masters_again = weights_of(model), {(n, k): t for n, k, t in gather_state(engine, trained)}
    engine.close()
    record = {"steps": steps, "weights": same_bits(after, again)}
    if world.is_main:
        record["state"] = same_bits(masters, masters_again)
        record["moved"] = not same_bits(middle, after)
    return record


def nonfinite(build: Build, batches: Sequence[Batch], world: World) -> dict:
    """A discarded micro-batch leaves no trace; a non-finite gradient changes nothing."""
    engine, model, _, peaks = build()
    out = engine(**batches[3].model_inputs())
    engine.backward(out["totals"].sum(), last=False)
    engine(**batches[2].model_inputs())
    engine.discard()
    accumulate(engine, batches, world)
    first = engine.step(peaks)
    discarded = weights_of(model)
    out = engine(**batches[world.rank].model_inputs())
    bad = float("inf") if world.rank == 1 else 1.0
    engine.backward(out["totals"].sum() * bad, last=True)
    second = engine.step(peaks)
    unchanged = same_bits(discarded, weights_of(model))
    engine.close()
    engine, model, _, peaks = build()
    accumulate(engine, batches, world)
    engine.step(peaks)
    record = {
        "discard_leaves_no_trace": same_bits(discarded, weights_of(model)),
        "applied": [first.applied, second.applied],
        "unchanged": unchanged,
    }
    engine.close()
    return record


def choose_near_ties(build: Build, batch: Batch, directory: Path, config: U2Config, world: World) -> dict:
    """Buffers keep dtype and bits; near ties between experts are decided in fp32.

    The biases are closer to each other than bf16 resolves at their size: experts 6 and 7 win, rounded all would tie.
    """
    near_ties = 100.0 + torch.arange(8, dtype=torch.float32) * 0.02
    if world.is_main:
        model = fresh_model(config)
        # Without router weights all scores are 0.5: the biases alone decide.
        routers = {n: torch.zeros_like(p) for n, p in model.named_parameters() if n.endswith("mlp.gate.weight")}
        write_weights(directory, {**model.state_dict(), **routers, **biases(model, near_ties)}, config)
    world.barrier()
    engine, model, _, _ = build(weights=directory)
    found = dict(model.named_buffers())
    wanted = {**found, **biases(model, near_ties)}
    with torch.no_grad():
        out = model(**batch.model_inputs())
    record = {
        "parameters": sorted({str(p.dtype) for p in model.parameters()}),
        "dtypes": sorted({f"{n.rsplit('.', 1)[1]}:{b.dtype}" for n, b in found.items()}),
        "equal": same_bits(found, wanted),
        "chosen": [topk.sort(-1).values.unique(dim=0).tolist() for topk in out.router_topk],
        "rounding_would_tie": len(set(near_ties.bfloat16().tolist())) == 1,
    }
    engine.close()
    return record
