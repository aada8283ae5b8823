"""Rank script: checkpoints of adapters on experts that two ranks share. Argument: the work directory.

Leaves under the work directory, for `test_expert_save.py`, one run directory per ZeRO stage and what becomes of the
adapter.
"""

import sys
from dataclasses import replace
from pathlib import Path

from dist_engines import accumulate, make_plan, packs

from lumina_ft.adapters.lora import attach_adapter
from lumina_ft.checkpoint.directory import TrainState, checkpoints_dir
from lumina_ft.checkpoint.save import ModelFiles, save_checkpoint
from lumina_ft.config.groups import GROUPS_U2
from lumina_ft.config.lora_schema import LoraConfig
from lumina_ft.config.schema import ModelConfig, OptimConfig
from lumina_ft.models.u2_config import U2Config
from lumina_ft.parallel.dist import init_distributed
from lumina_ft.parallel.ds_config import ZeroSettings, resolve_ds_config
from lumina_ft.parallel.engine import Engine
from lumina_ft.parallel.expert_parallel import join_experts
from lumina_ft.stages import apply_plan
from lumina_ft.train.objective import Objective
from lumina_ft.train.optim import build_optimizer
from lumina_ft.train.run import build_model

WORK = Path(sys.argv[1])
CONFIG = U2Config.load(WORK / "tiny.json")
WORLD = init_distributed("expert save", 5.0)
SEED = 11
FILES = ModelFiles(None, WORK / "data", 32, SEED)
LORA = LoraConfig(
    rank=4,
    alpha=8.0,
    targets=("attention", "experts"),
    rank_pattern={"experts.up_proj": 2},
    alpha_pattern={"experts.down_proj": 6.0},
)
CHANGED = ("lm_head",)


def train_and_save(zero: int) -> None:
    """One step from random weights; then every way in which a checkpoint can hold the adapter."""
    block: dict = {"stage": zero} | ({"stage3_param_persistence_threshold": 0} if zero == 3 else {})
    settings = ZeroSettings(WORLD.size, 1, "float32", 1.0, 5000, overlap=False, expert_parallel_size=2)
    ds_config = resolve_ds_config({"zero_optimization": block}, settings)
    model_cfg = ModelConfig(config="x", random_init=True, dtype="float32")
    experts = join_experts(2)
    model = build_model(model_cfg, CONFIG, ds_config, weights=None, seed=SEED, world=WORLD, experts=experts)
    adapter = attach_adapter(model, LORA, seed=1)
    plan = make_plan(model, set(GROUPS_U2) - set(CHANGED))
    apply_plan(model, plan)
    optimizer, peaks = build_optimizer(dict(model.named_parameters()), plan, OptimConfig(lr=1e-2))
    engine = Engine(Objective(model), optimizer, ds_config)
    engine.train()
    accumulate(engine, packs(WORK / "data", count=2), WORLD)
    engine.step(peaks)

    def save(name: str, step: int, files: ModelFiles, at_end="keep", changed: tuple[str, ...] = ()) -> Path:
        run_dir = WORK / f"{name}-{zero}"
        state = TrainState(step, 0, "s", step, 10, 1, 0.0, 0, {}, changed_groups=changed)
        save_checkpoint(
            run_dir,
            engine=engine,
            model=model,
            state=state,
            files=files,
            world=WORLD,
            keep=9,
            adapter=adapter,
            at_end=at_end,
        )
        return checkpoints_dir(run_dir) / f"checkpoint-{step}"

    on_disk = replace(FILES, source_dir=save("random", 1, FILES) / "model")
    save("kept", 1, on_disk, changed=CHANGED)
    save("merged", 10, on_disk, "merge", changed=CHANGED)
    save("dropped", 10, on_disk, "drop")
    engine.close()


for stage in (3, 2):
    train_and_save(stage)
WORLD.close()
