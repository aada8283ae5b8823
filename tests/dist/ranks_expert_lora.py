"""Rank script: adapters of experts that two ranks share, against one process. Argument: the work directory.

Writes `expert_lora.json` on rank 0: one record per ZeRO stage, which `test_expert_lora.py` judges. Leaves the adapters
that were trained here.
"""

import json
import sys
from pathlib import Path

import torch
from dist_engines import WEIGHTS, accumulate, distance, fresh_model, make_plan, packs
from torch import Tensor

from lumina_ft.adapters.files import write_adapter
from lumina_ft.adapters.lora import Adapter, attach_adapter, merged_tensors
from lumina_ft.config.groups import GROUPS_U2
from lumina_ft.config.lora_schema import LoraConfig
from lumina_ft.config.schema import ModelConfig, OptimConfig
from lumina_ft.models.groups import is_adapter_name
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.parallel.dist import init_distributed
from lumina_ft.parallel.ds_config import ZeroSettings, resolve_ds_config
from lumina_ft.parallel.engine import Engine
from lumina_ft.parallel.expert_parallel import join_experts
from lumina_ft.parallel.zero3 import full_shape, write_tensor
from lumina_ft.stages import apply_plan
from lumina_ft.train.objective import TERMS, Objective, supervised_counts
from lumina_ft.train.optim import build_optimizer
from lumina_ft.train.run import build_model

WORK = Path(sys.argv[1])
CONFIG = U2Config.load(WORK / "tiny.json")
WORLD = init_distributed("expert lora", 5.0)
BASE = WORK / "base"
LORA = LoraConfig(
    rank=4,
    alpha=8.0,
    targets=("attention", "experts"),
    rank_pattern={"experts.up_proj": 2, "experts.gate_proj": 3},
    alpha_pattern={"experts.down_proj": 6.0},
)
PACKS = packs(WORK / "data", count=4)


def write(folder: Path, model: U2ForDiffusion, adapter: Adapter) -> None:
    main = folder if WORLD.is_main else None
    write_adapter(main, model, adapter, base=None, base_name="base", changed=())


def move(model: U2ForDiffusion) -> None:
    """Give the adapter values that aren't its first ones, the same in every layout."""
    generator = torch.Generator().manual_seed(5)
    for name, param in model.named_parameters():
        if is_adapter_name(name):
            write_tensor(param, torch.randn(full_shape(param), generator=generator) * 0.1)


def reference(folder: Path) -> tuple[dict[str, Tensor], dict[str, float | None]]:
    """In one process: the new adapter, the moved one, and what merging gives."""
    model = U2ForDiffusion.from_pretrained(BASE)
    adapter = attach_adapter(model, LORA, seed=1)
    write(folder / "new", model, adapter)
    move(model)
    write(folder / "moved", model, adapter)
    found = [(name, tensor.clone(), cosine) for name, tensor, cosine in merged_tensors(model, adapter)]
    return {name: tensor for name, tensor, _ in found}, {name: cosine for name, _, cosine in found}


def build(zero: int, source: Path | None) -> tuple[dict, U2ForDiffusion, Adapter]:
    block: dict = {"stage": zero} | ({"stage3_param_persistence_threshold": 0} if zero == 3 else {})
    settings = ZeroSettings(WORLD.size, 2, "float32", 1.0, 5000, overlap=False, expert_parallel_size=2)
    ds_config = resolve_ds_config({"zero_optimization": block}, settings)
    model_cfg = ModelConfig(config="x", random_init=True, dtype="float32", gradient_checkpointing=True)
    model = build_model(model_cfg, CONFIG, ds_config, weights=BASE, seed=9, world=WORLD, experts=join_experts(2))
    return ds_config, model, attach_adapter(model, LORA, seed=1, source=source)


def same_files(left: Path, right: Path) -> bool:
    names = ("adapter_config.json", "adapter_model.safetensors")
    return all((left / name).read_bytes() == (right / name).read_bytes() for name in names)


def stored(zero: int, merged: dict[str, Tensor], cosines: dict[str, float | None]) -> dict:
    """An adapter is built, moved, merged, trained, written, and continued by new ranks."""
    folder = WORK / f"zero{zero}"
    ds_config, model, adapter = build(zero, None)
    write(folder / "new", model, adapter)
    move(model)
    plan = make_plan(model, GROUPS_U2)
    apply_plan(model, plan)
    optimizer, peaks = build_optimizer(dict(model.named_parameters()), plan, OptimConfig(lr=1e-2))
    engine = Engine(Objective(model), optimizer, ds_config)
    engine.train()
    write(folder / "moved", model, adapter)
    found = [(name, distance(tensor, merged[name]), cosine) for name, tensor, cosine in merged_tensors(model, adapter)]
    accumulate(engine, PACKS, WORLD)
    engine.step(peaks)
    write(folder / "trained", model, adapter)
    loss = evaluate(model)
    engine.close()
    WORLD.barrier()

    _, again, continued = build(zero, folder / "trained")
    write(folder / "again", again, continued)
    WORLD.barrier()
    one = WORK / "one"
    return {
        "zero": zero,
        "new": same_files(folder / "new", one / "new"),
        "moved": same_files(folder / "moved", one / "moved"),
        "trained_moved": not same_files(folder / "trained", folder / "moved"),
        "again": same_files(folder / "again", folder / "trained"),
        "same_names": [name for name, *_ in found] == list(merged),
        "worst_merged": max(far for name, far, _ in found if "channel_mask" not in name),
        "worst_cosine": max(abs(cosine - (cosines[name] or 0.0)) for name, _, cosine in found if cosine is not None),
        "merged": sum(cosine is not None for *_, cosine in found),
        "loss": loss,
    }


def evaluate(model: U2ForDiffusion) -> float:
    """Loss of all packs, each rank its share."""
    counts = dict(zip(TERMS, supervised_counts(PACKS).tolist(), strict=True))
    total = torch.zeros(1, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for batch in PACKS[WORLD.rank :: WORLD.size]:
            losses = model(**batch.model_inputs()).losses
            total += sum(getattr(WEIGHTS, n) * float(losses[n].total) / counts[n] for n in TERMS if counts[n])
    return float(WORLD.sum(total))


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if WORLD.is_main:
        fresh_model(CONFIG).save_pretrained(BASE)
    WORLD.barrier()
    merged, cosines = reference(WORK / "one")
    records = [stored(zero, merged, cosines) for zero in (2, 3)]
    if WORLD.is_main:
        (WORK / "expert_lora.json").write_text(json.dumps(records))


main()
WORLD.close()
