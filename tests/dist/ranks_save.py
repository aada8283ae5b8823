"""Rank script: checkpoints written by two ranks, with and without adapters, and on disks that fail.

Argument: the work directory. Writes `save.json` on rank 0, which `test_save.py` judges.
"""

import errno
import json
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.initialization import no_init_weights

from lumina_ft.adapters.files import read_adapter
from lumina_ft.adapters.lora import attach_adapter, merged_tensors
from lumina_ft.batch import Batch
from lumina_ft.checkpoint import writers
from lumina_ft.checkpoint.directory import TrainState, checkpoints_dir, newest_intact
from lumina_ft.checkpoint.manifest import read_manifest
from lumina_ft.checkpoint.save import ModelFiles, save_checkpoint, state_name
from lumina_ft.config.groups import ADAPTER_GROUP
from lumina_ft.config.lora_schema import LoraConfig
from lumina_ft.config.schema import DataConfig, LossConfig, ModelConfig, OptimConfig
from lumina_ft.data.dataset import PackedDataset
from lumina_ft.errors import RunError
from lumina_ft.models import tensor_files
from lumina_ft.models.groups import base_name, group_of, is_adapter_name
from lumina_ft.models.identity import model_identity
from lumina_ft.models.init import initial_value
from lumina_ft.models.native import NativeReader
from lumina_ft.models.tensor_files import CheckpointReader
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.parallel.dist import init_distributed
from lumina_ft.parallel.ds_config import ZeroSettings, resolve_ds_config
from lumina_ft.parallel.engine import Engine
from lumina_ft.parallel.state import STATE_KEYS, gather_state
from lumina_ft.parallel.zero3 import full_shape, gathered
from lumina_ft.stages import ParamInfo, StagePlan, apply_plan
from lumina_ft.train.objective import TERMS, Objective, supervised_counts, term_scales
from lumina_ft.train.optim import build_optimizer
from lumina_ft.train.run import build_model

WORK = Path(sys.argv[1])
CONFIG = U2Config.load(WORK / "tiny.json")
WORLD = init_distributed("save", 5.0)
SEED = 11
SMALL_SHARDS = 20_000
FILES = ModelFiles(None, WORK / "data", 32, SEED)
LORA = LoraConfig(rank=2, alpha=4.0, targets=("attention",))
torch.set_num_threads(1)


class Training:
    """An engine after one step, and what is needed to save it."""

    def __init__(self, zero: int, trained: set[str], lora: LoraConfig | None = None) -> None:
        block: dict[str, Any] = {"stage": zero}
        if zero == 3:
            block["stage3_param_persistence_threshold"] = 0
        settings = ZeroSettings(WORLD.size, 1, "float32", 1.0, 5000, overlap=False)
        ds_config = resolve_ds_config({"zero_optimization": block}, settings)
        model_cfg = ModelConfig(config="x", random_init=True, dtype="float32")
        self.model = build_model(model_cfg, CONFIG, ds_config, weights=None, seed=SEED, world=WORLD)
        self.adapter = attach_adapter(self.model, lora, seed=1) if lora else None
        infos = tuple(ParamInfo(n, group_of(n), tuple(full_shape(p))) for n, p in self.model.named_parameters())
        plan = StagePlan(0, "s", infos, {g: 1e-2 for g in trained | ({ADAPTER_GROUP} if lora else set())})
        apply_plan(self.model, plan)
        params = dict(self.model.named_parameters())
        optimizer, self.peaks = build_optimizer(params, plan, OptimConfig(lr=1e-2))
        self.engine = Engine(Objective(self.model), optimizer, ds_config)
        self.trained = {info.name: params[info.name] for info in plan.trained}
        for batch in batches():
            counts = dict(zip(TERMS, supervised_counts([batch]).tolist(), strict=True))
            scales = term_scales(counts, LossConfig(), WORLD.size)
            out = self.engine(**batch.model_inputs())
            self.engine.backward((out["totals"] * scales).sum(), last=True)
        self.engine.step(self.peaks)

    def save(
        self, run_dir: Path, step: int, files: ModelFiles = FILES, *, changed: tuple[str, ...] = (), **more
    ) -> Path:
        state = TrainState(step, 0, "s", step, 10, 1, 0.0, 0, {}, changed_groups=changed)
        save_checkpoint(
            run_dir,
            engine=self.engine,
            model=self.model,
            state=state,
            files=files,
            world=WORLD,
            keep=9,
            adapter=self.adapter,
            **more,
        )
        return checkpoints_dir(run_dir) / f"checkpoint-{step}"

    def weights(self) -> dict[str, torch.Tensor]:
        """Whole weights of the model, by native name, without the adapter."""
        found = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            with gathered([tensor]):
                if not is_adapter_name(name):
                    found[base_name(name)] = tensor.detach().clone()
        return found


def batches() -> list[Batch]:
    data = PackedDataset(DataConfig(path=WORK / "data", max_pack_tokens=128), spec=CONFIG.token_spec(), seed=1)
    return [data.batch(data.packs(0)[WORLD.rank])]


def stored(folder: Path, stem: str = "model") -> dict[str, torch.Tensor]:
    with CheckpointReader(folder, stem) as reader:
        return {name: reader.read(name).clone() for name in reader.tensors}


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)


@contextmanager
def disk_full(rank: int, after: int):
    """Rank `rank` has room for `after` writes."""
    real, left = os.pwrite, [after]

    def pwrite(handle: int, data: memoryview, offset: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, data, offset)

    if WORLD.rank == rank:
        tensor_files.os.pwrite = pwrite
    try:
        yield
    finally:
        tensor_files.os.pwrite = real


def caught(training: Training, run_dir: Path, step: int) -> str:
    try:
        training.save(run_dir, step)
    except RunError as error:
        return str(error)
    return "saved"


def plain(zero: int) -> dict:
    """Shards of two ranks hold the same as one file; a full disk or a NaN on one rank ends all alike."""
    training = Training(zero, {"lm_head", "norms", "experts"})
    run_dir = WORK / f"plain-{zero}"
    writers.SHARD_BYTES = SMALL_SHARDS
    sharded = training.save(run_dir, 1)
    began = (sharded / "COMPLETE").stat().st_mtime_ns
    training.save(run_dir, 1)
    errors = []
    for rank, after in ((1, 3), (0, 2), (0, 40)):
        with disk_full(rank, after):
            errors.append(WORLD.gather_objects(caught(training, run_dir, 2)))
    writers.SHARD_BYTES = 1 << 40
    whole = training.save(run_dir, 3)
    state = {state_name(n, k): t for n, k, t in gather_state(training.engine, training.trained)}
    weights = training.weights()
    if zero < 3:
        with torch.no_grad():
            dict(training.model.named_parameters())["lm_head.weight"][5, 7] = torch.nan
        errors.append(WORLD.gather_objects(caught(training, run_dir, 4)))
    plans = [
        writers.plan_files(dict.fromkeys(weights, tensor_files.TensorSpec((4000,), torch.float32)), 2, "x")
        for writers.SHARD_BYTES in (SMALL_SHARDS,)
    ]
    record = {
        "zero": zero,
        "files": {path.name: sorted(read_manifest(path)) for path in (sharded, whole)},
        "untouched": (sharded / "COMPLETE").stat().st_mtime_ns == began,
        "owners": sorted(set(plans[0].owners)),
        "errors": errors,
        "left": sorted(p.name for p in checkpoints_dir(run_dir).iterdir()),
        "intact": [str(s) for s in newest_intact(run_dir).skipped],
    }
    if WORLD.is_main:
        record["same_weights"] = [same(stored(path / "model"), weights) for path in (sharded, whole)]
        record["same_state"] = [same(stored(path / "optimizer", "optimizer"), state) for path in (sharded, whole)]
        record["keys"] = sorted({name.rpartition("::")[2] for name in state}) == sorted(STATE_KEYS)
    training.engine.close()
    return record


def adapted(zero: int, init: str) -> dict:
    """Where base, adapter and modules beside it are stored, and what a merge leaves."""
    training = Training(zero, {"lm_head"}, replace_init(init))
    assert training.adapter is not None
    run_dir = WORK / f"adapted-{zero}-{init}"
    changed = ("lm_head",)
    random = training.save(run_dir, 1, changed=changed)
    on_disk = replace(FILES, source_dir=random / "model")
    kept = training.save(run_dir, 2, on_disk, changed=changed)
    unstorable = training.save(run_dir, 3, on_disk, changed=("experts", "lm_head"))
    merged = training.save(run_dir, 10, on_disk, changed=changed, at_end="merge")
    dropped = training.save(WORK / f"dropped-{zero}-{init}", 10, on_disk, changed=changed, at_end="drop")
    alone = training.save(WORK / f"alone-{zero}-{init}", 10, on_disk, at_end="drop")
    wanted = {n: t.clone() for n, t, _ in merged_tensors(training.model, training.adapter)}
    weights = training.weights()
    record: dict[str, Any] = {"zero": zero, "init": init}
    if WORLD.is_main:
        for name, path in {
            "random": random,
            "kept": kept,
            "unstorable": unstorable,
            "merged": merged,
            "dropped": dropped,
            "alone": alone,
        }.items():
            state = json.loads((path / "state.json").read_text())
            record[name] = {key: state[key] for key in ("base", "adapter", "changed_groups")}
            record[name] |= {"folders": sorted(p.name for p in path.iterdir() if p.is_dir())}
            if (path / "adapter").is_dir():
                file = read_adapter(path / "adapter")
                base = path / "model" if (path / "model").is_dir() else random / "model"
                if state["base"] and not (path.parents[1] / state["base"]).samefile(base):
                    raise AssertionError(state["base"])
                identity = model_identity(base)
                record[name]["modules"] = list(file.modules_to_save)
                record[name]["identity"] = file.base == identity and state["base_identity"] == identity.digest
                record[name]["companions"] = sorted(p.name for p in (path / "adapter").iterdir())
        originals = {}
        for target in training.adapter.targets:
            key = f"{target.module}.weight"
            shape = weights[key].shape
            originals[key] = initial_value(key, shape, std=CONFIG.initializer_range, seed=SEED)
        record["base_is_original"] = same(stored(random / "model"), {**weights, **originals})
        record["reads_back"] = model_identity(random / "model") == model_identity(unstorable / "model")
        record["merged_equal"] = same(stored(merged / "model"), wanted)
        record["merged_differs"] = not same(stored(merged / "model"), stored(random / "model"))
        with NativeReader(dropped / "model") as reader:
            record["dropped_layout"] = reader.layout
    training.engine.close()
    return record


def replace_init(init: str) -> LoraConfig:
    return LORA.model_copy(update={"init": init})


with no_init_weights():
    assert U2ForDiffusion(CONFIG) is not None
records = {"plain": [plain(zero) for zero in (3, 2, 0)]}
records["adapted"] = [adapted(3, "default"), adapted(3, "pissa"), adapted(2, "pissa")]
if WORLD.is_main:
    (WORK / "save.json").write_text(json.dumps(records))
WORLD.close()
