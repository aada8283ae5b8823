"""Rank script: what engines hold of every state, against the plan of the same run.

Arguments: the work directory; `core` or `all` cases. Writes `memory-<ranks>-<which>.json` on rank 0: one record per
case, with every rank's bytes, which `test_memory.py` judges.
"""

import gc
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from dist_tiny import run_config

from lumina_ft.config.schema import RunConfig
from lumina_ft.models.u2_config import U2Config
from lumina_ft.parallel.dist import init_distributed
from lumina_ft.parallel.footprint import StateBytes
from lumina_ft.parallel.memory import measured_bytes
from lumina_ft.plan.states import stage_states
from lumina_ft.train.batches import step_batches
from lumina_ft.train.loop import train_step
from lumina_ft.train.run import build_stage
from lumina_ft.train.start import find_start

WORK, WHICH = Path(sys.argv[1]), sys.argv[2]
WORLD = init_distributed("memory", 5.0)
CONFIG = U2Config.load(WORK / "tiny.json")
LORA = {"rank": 3, "alpha": 6, "targets": ["attention", "shared_experts", "experts"], "lr_ratio": 4.0}
LAYOUTS = {
    **{str(stage): {"stage": stage} for stage in range(4)},
    "3 some persist": {"stage": 3, "stage3_param_persistence_threshold": 600, "sub_group_size": 3000},
    "3 partitioned": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
SIZES = [size for size in (1, 2) if WORLD.size % size == 0]
CORE = {
    ("0", "bfloat16", 1, True),
    ("1", "bfloat16", 2, False),
    ("2", "float32", 2, False),
    ("3", "bfloat16", 2, False),
    ("3", "float32", 1, True),
    ("3 some persist", "bfloat16", 2, True),
    ("3 partitioned", "float32", 2, True),
}
"""Each layout once; each dtype, placement of experts and way to train at least three times."""


def cases() -> Iterator[dict[str, Any]]:
    for zero, dtype, size, adapter in itertools.product(LAYOUTS, ("float32", "bfloat16"), SIZES, (False, True)):
        case = {"zero": zero, "dtype": dtype, "experts_over": size, "adapter": adapter}
        if not (zero == "0" and size > 1) and (WHICH == "all" or tuple(case.values()) in CORE):
            yield case


def configured(case: dict[str, Any]) -> RunConfig:
    stage = {"name": "s", "steps": 9} | ({} if case["adapter"] else {"freeze": ["word_embeddings", "dense_mlp"]})
    sections: dict[str, Any] = {"stages": [stage]} | ({"lora": LORA} if case["adapter"] else {})
    raw = run_config(WORK, "run", **sections)
    raw["model"]["dtype"] = case["dtype"]
    raw["parallel"] = {
        "ranks": WORLD.size,
        "zero": str(WORK / f"{case['zero']}.json"),
        "expert_parallel_size": case["experts_over"],
    }
    raw["data"] |= {"max_pack_tokens": 64, "block_tokens": 8, "eval_fraction": 0.0}
    raw["train"]["packs_per_step"] = 2 * WORLD.size
    return RunConfig.model_validate(raw)


def measured(cfg: RunConfig) -> StateBytes:
    """Bytes between backward and update of the second step, of the engine that the stage itself builds."""
    run = build_stage(cfg, 0, find_start(cfg, 0, None), WORLD, WORK / "run")
    found: list[StateBytes] = []
    step = run.engine.step

    def watched(lrs: Any) -> Any:
        found.append(measured_bytes(run.engine))
        return step(lrs)

    run.engine.step = watched
    for number in range(2):
        train_step(run, number, step_batches(run.train_data, number, cfg.train.packs_per_step, WORLD), first=False)
    run.engine.close()
    if run.metrics is not None and run.progress is not None:
        run.metrics.close()
        run.progress.close()
    return found[1]


def main() -> None:
    torch.set_num_threads(1)
    if WORLD.is_main:
        (WORK / "run").mkdir(exist_ok=True)
        for name, block in LAYOUTS.items():
            (WORK / f"{name}.json").write_text(json.dumps({"zero_optimization": block}))
    WORLD.barrier()
    records = []
    for case in cases():
        cfg = configured(case)
        found = WORLD.gather_objects(tuple(measured(cfg)))
        if WORLD.is_main:
            planned = stage_states(cfg, 0, CONFIG).ranks
            records.append(case | {"measured": found, "planned": [tuple(states) for states in planned]})
        gc.collect()
    if WORLD.is_main:
        (WORK / f"memory-{WORLD.size}-{WHICH}.json").write_text(json.dumps(records))


main()
WORLD.close()
