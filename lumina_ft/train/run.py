"""READ FIRST: one stage in one rank, from configuration to stage-end checkpoint.

ranks → data → plan → model (weights, adapter) → engine (→ optimizer state) → loop → checkpoint, summary, pictures
"""

import json
import logging
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers.initialization import no_init_weights

from lumina_ft.adapters.lora import Adapter
from lumina_ft.adapters.targets import summarise_targets, targets_table
from lumina_ft.checkpoint.directory import TrainState
from lumina_ft.checkpoint.experts import check_experts
from lumina_ft.checkpoint.resume import check_base, check_fingerprint, load_optimizer
from lumina_ft.checkpoint.save import ModelFiles, save_checkpoint
from lumina_ft.config.groups import ADAPTER_GROUP
from lumina_ft.config.schema import ModelConfig, RunConfig
from lumina_ft.data.dataset import PackedDataset
from lumina_ft.data.shards import read_meta
from lumina_ft.data.tokenizer import load_tokenizer
from lumina_ft.errors import Interrupted
from lumina_ft.models.groups import base_name
from lumina_ft.models.json_files import write_json
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.models.weights import load_weights
from lumina_ft.monitor.metrics import SUMMARY_FILE, MetricsWriter
from lumina_ft.monitor.plots import plot_expert_load, plot_losses
from lumina_ft.monitor.progress import StageProgress
from lumina_ft.parallel.dist import World, init_distributed
from lumina_ft.parallel.ds_config import ZeroSettings, read_ds_config, resolve_ds_config
from lumina_ft.parallel.engine import Engine, check_zero_block
from lumina_ft.parallel.expert_parallel import ExpertParallel, join_experts
from lumina_ft.parallel.progress import LOAD
from lumina_ft.parallel.state import adam_steps
from lumina_ft.parallel.watchdog import OnHang
from lumina_ft.parallel.zero3 import fill_tensor, init_context, place_buffers, write_tensor
from lumina_ft.stages import StagePlan, apply_plan, plan_stage
from lumina_ft.train.loop import StageRun, train_loop
from lumina_ft.train.objective import Objective
from lumina_ft.train.optim import build_optimizer
from lumina_ft.train.stage_adapter import attach_stage_adapter, check_pissa, describe_parameters, stage_lora
from lumina_ft.train.start import Start, find_start
from lumina_ft.train.stop import StopRequest

log = logging.getLogger(__name__)

_STAGE_SEED_STRIDE = 1_000_003


def train_stage(
    cfg: RunConfig,
    stage_index: int,
    *,
    resume: Path | None,
    run_dir: Path,
    stop: StopRequest | None = None,
    on_hang: OnHang | None = None,
) -> None:
    """Train one stage. Runs in every rank; the process should end afterwards (ZeRO-3 engines don't give memory back).

    Args:
        resume: checkpoint to start from: the end of the previous stage, or one inside this stage. None: `cfg.model`.
        run_dir: existing run directory.
        stop: asks the loop to stop between two steps; None: nobody will.
        on_hang: see `init_distributed`.

    Raises:
        LuminaError: something a user can fix; see the modules.
        Interrupted: the loop was asked to stop, or this rank was when the stage was complete. What is done is saved.
    """
    start = find_start(cfg, stage_index, resume)
    world = init_distributed(f"stage-{stage_index}", cfg.parallel.timeout_minutes, run_dir=run_dir, on_hang=on_hang)
    _make_deterministic(world)
    run = build_stage(cfg, stage_index, start, world, run_dir)
    run.stop = stop or StopRequest()
    stopped: Interrupted | None = None
    with run.stop.heeded():
        try:
            train_loop(run)
        except Interrupted as request:
            stopped = request
        finally:
            if run.progress is not None:
                run.progress.close()
            if run.metrics is not None:
                run.metrics.close()
        if stopped is None and world.is_main:
            _finish(run, run_dir)
        world.close()
    if stopped is None and run.stop.number:
        stopped = Interrupted(run.stop.number, f"stage {run.plan.name!r}, saved at its end")
    if stopped is not None:
        raise stopped


def build_stage(cfg: RunConfig, stage_index: int, start: Start, world: World, run_dir: Path) -> StageRun:
    """Everything that the loop works on."""
    model_config = U2Config.load(start.weights or cfg.model.path or cfg.model.config or "")
    train_data, eval_data = _open_data(cfg, stage_index, model_config)
    stage, per_step = cfg.stages[stage_index], cfg.train.packs_per_step
    total_steps = stage.steps or train_data.steps_of_epochs(stage.epochs or 1.0, per_step)
    world.progress.begin_stage(stage.name, total_steps, train_data.tasks)
    train_data.rank_packs(train_data.packs_of_step(0, per_step), world.rank, world.size)

    lora = stage_lora(cfg, stage_index)
    plan = plan_stage(cfg, stage_index, describe_parameters(model_config, lora))
    check_pissa(cfg, plan, start)
    check_experts(model_config, start.checkpoint, start.weights)
    if start.checkpoint is not None:
        check_base(start.checkpoint, world)
    ds_config = engine_config(cfg, plan, world.size, cuda=world.device.type == "cuda")
    group = join_experts(cfg.parallel.expert_parallel_size)
    model = build_model(
        cfg.model, model_config, ds_config, weights=start.weights, seed=cfg.seed, world=world, experts=group
    )
    seed = stage_seed(cfg, stage_index)
    adapter = attach_stage_adapter(model, cfg, plan, start, seed=seed, progress=world.progress)
    apply_plan(model, plan)
    params = dict(model.named_parameters())
    optimizer, peak_lrs = build_optimizer(params, plan, cfg.optim, lr_ratio=lora.lr_ratio if lora else 1.0)
    objective = Objective(model)
    engine = Engine(objective, optimizer, ds_config, decay_unused=cfg.optim.decay_unused)
    engine.train()
    world.progress.follow(model)

    trained = {base_name(info.name): params[info.name] for info in plan.trained}
    fingerprint = _fingerprint(cfg, plan, total_steps)
    if start.inside is not None:
        check_fingerprint(start.inside, fingerprint)
        load_optimizer(start.inside, engine, trained, world.progress)
    data_cfg = cfg.stage_data(stage_index)
    files = ModelFiles(start.weights, data_cfg.path, data_cfg.block_tokens, cfg.seed)
    step = start.inside.state.stage_step if start.inside else 0
    run = StageRun(
        cfg=cfg,
        plan=plan,
        world=world,
        engine=engine,
        objective=objective,
        params=trained,
        peak_lrs=peak_lrs,
        train_data=train_data,
        eval_data=eval_data,
        total_steps=total_steps,
        metrics=MetricsWriter(run_dir, cfg.train.tensorboard, (plan.name, step)) if world.is_main else None,
        progress=StageProgress(plan.name, total_steps, step) if world.is_main else None,
        save=lambda run: _save(run, run_dir, model, adapter, files, start, fingerprint),
        step=step,
        tokens=start.inside.state.tokens if start.inside else 0,
        seconds=start.inside.state.seconds if start.inside else 0.0,
    )
    if start.inside:
        run.restore_counts(start.inside.state)
    _announce(run, ds_config, adapter)
    return run


def stage_seed(cfg: RunConfig, stage_index: int) -> int:
    """Stages draw other orders, drops and noise from the run's one seed."""
    return cfg.seed + _STAGE_SEED_STRIDE * stage_index


def engine_config(cfg: RunConfig, plan: StagePlan, ranks: int, *, cuda: bool) -> dict[str, Any]:
    """DeepSpeed's configuration, checked and without `auto`."""
    settings = ZeroSettings(
        world_size=ranks,
        micro_batches=cfg.train.packs_per_step // ranks,
        dtype=cfg.model.dtype,
        max_grad_norm=cfg.optim.max_grad_norm,
        trainable_numel=sum(info.numel for info in plan.trained),
        overlap=cuda,
        expert_parallel_size=cfg.parallel.expert_parallel_size,
    )
    ds_config = resolve_ds_config(read_ds_config(cfg.parallel.zero), settings)
    check_zero_block(ds_config)
    return ds_config


def build_model(
    cfg: ModelConfig,
    model_config: U2Config,
    ds_config: dict[str, Any],
    *,
    weights: Path | None,
    seed: int,
    world: World,
    experts: ExpertParallel | None = None,
) -> U2ForDiffusion:
    """The model with its weights; its experts spread and, under ZeRO-3, partitioned from the start. Collective.

    Args:
        weights: model directory to load; None draws from `seed`.
        world: where training runs, and what notes each tensor.
        experts: ranks that share the routed experts.
    """
    with init_context(ds_config, getattr(torch, cfg.dtype)), no_init_weights():
        model = U2ForDiffusion(
            model_config,
            kernels=cfg.kernels,
            expert_parallel=experts,
        )
    # A choice that can't run here ends the run before weights are read.
    model.kernels.on(world.device, getattr(torch, cfg.dtype))
    place_buffers(model, world.device)
    if weights is not None:
        load_weights(model, weights, fill=world.progress.marking(LOAD, fill_tensor))
    else:
        model.init_weights_(seed, writer=world.progress.marking(LOAD, write_tensor))
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def _make_deterministic(world: World) -> None:
    """Same seed, same bits: on the CPU that only takes torch's deterministic algorithms."""
    if world.device.type == "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
        # A debugging aid of that mode which fills every new tensor with NaN.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def _open_data(cfg: RunConfig, stage_index: int, model_config: U2Config) -> tuple[PackedDataset, PackedDataset | None]:
    """Training data of the stage, and held-out data if there is any."""
    data_cfg = cfg.stage_data(stage_index)
    source = cfg.model.tokenizer or cfg.model.path
    identity = load_tokenizer(source).identity if source is not None else None
    spec = model_config.token_spec()
    seed = stage_seed(cfg, stage_index)
    train = PackedDataset(data_cfg, spec=spec, seed=seed, split="train", tokenizer_identity=identity)
    if data_cfg.eval_path is None and data_cfg.eval_fraction == 0:
        return train, None
    held = PackedDataset(data_cfg, spec=spec, seed=seed, split="eval", tokenizer_identity=identity)
    return train, held


def _fingerprint(cfg: RunConfig, plan: StagePlan, total_steps: int) -> dict[str, Any]:
    """What the remaining steps of a stage depend on."""
    lora = stage_lora(cfg, plan.index)
    return {
        "seed": cfg.seed,
        "packs_per_step": cfg.train.packs_per_step,
        "stage_steps": total_steps,
        "dataset": read_meta(cfg.stage_data(plan.index).path).identity,
        "trained_groups": sorted(plan.lr),
        "dtype": cfg.model.dtype,
        # A ratio of learning rates may change, as those themselves may.
        "adapter": lora.model_dump(mode="json", exclude={"lr_ratio"}) if lora else None,
    }


def _save(
    run: StageRun,
    run_dir: Path,
    model: U2ForDiffusion,
    adapter: Adapter | None,
    files: ModelFiles,
    start: Start,
    fingerprint: dict[str, Any],
) -> None:
    expert_counts, unlogged_counts = run.kept_counts()
    state = TrainState(
        global_step=start.global_step + run.step,
        stage_index=run.plan.index,
        stage_name=run.plan.name,
        stage_step=run.step,
        stage_steps=run.total_steps,
        adam_steps=adam_steps(run.engine),
        seconds=round(run.elapsed, 3),
        tokens=run.tokens,
        fingerprint=fingerprint,
        changed_groups=tuple(sorted(start.changed | _changed_groups(run))) if adapter else (),
        expert_counts=expert_counts,
        unlogged_counts=unlogged_counts,
    )
    save_checkpoint(
        run_dir,
        engine=run.engine,
        model=model,
        state=state,
        files=files,
        world=run.world,
        keep=run.cfg.train.keep_checkpoints,
        spare=start.checkpoint.path if start.checkpoint else None,
        adapter=adapter,
        at_end=run.cfg.stages[run.plan.index].lora_at_end,
    )
    if run.world.is_main:
        log.info("%s step %d: saved checkpoint-%d", run.plan.name, run.step, state.global_step)


def _changed_groups(run: StageRun) -> set[str]:
    """Groups of base weights that the stage changes; of the router also the selection bias counts."""
    moved = {"router"} if run.cfg.bias_rate(run.plan.index) else set()
    return set(run.plan.lr) - {ADAPTER_GROUP} | moved


def _announce(run: StageRun, ds_config: dict[str, Any], adapter: Adapter | None) -> None:
    """Say once what is going to happen."""
    if not run.world.is_main:
        return
    from rich.console import Console

    console = Console(stderr=True, width=100)
    console.print(run.plan.table())
    if adapter is not None:
        console.print(targets_table(summarise_targets(adapter.targets)))
    zero = ds_config["zero_optimization"]["stage"]
    log.info(
        "%d steps of %d packs on %d ranks (%s, ZeRO-%d, %s%s), from step %d; %d training samples, %d held out",
        run.total_steps,
        run.cfg.train.packs_per_step,
        run.world.size,
        run.world.device.type,
        zero,
        run.cfg.model.dtype,
        f", experts over {size}" if (size := run.cfg.parallel.expert_parallel_size) > 1 else "",
        run.step,
        run.train_data.num_samples,
        run.eval_data.num_samples if run.eval_data else 0,
    )


def _finish(run: StageRun, run_dir: Path) -> None:
    """Summary and pictures of the stage, on rank 0."""
    path = run_dir / SUMMARY_FILE
    memory = psutil.Process().memory_info()
    stages = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    stages = [stage for stage in stages if stage["index"] < run.plan.index]
    stages.append(
        {
            "index": run.plan.index,
            "name": run.plan.name,
            "steps": run.total_steps,
            "losses": run.losses,
            "seconds": round(run.elapsed, 3),
            "tokens": run.tokens,
            "trained_parameters": sum(p.numel for p in run.plan.trained),
            "anonymous_rss_mib": round((memory.rss - memory.shared) / 2**20, 1),
            "expert_counts": run.expert_counts.tolist() if run.expert_counts is not None else [],
        }
    )
    write_json(path, stages)
    if run.cfg.train.plots:
        plot_losses(run_dir)
        if run.expert_counts is not None and run.expert_counts.numel():
            plot_expert_load(run.expert_counts.cpu().numpy(), run_dir / "plots" / f"expert_load_{run.plan.name}.png")
