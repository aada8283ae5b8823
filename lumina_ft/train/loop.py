"""The training loop of one stage: steps, logging, evaluation, checkpoints. Everything it works on is built in `run.py`.

count (all micro-batches, all ranks) → per micro-batch: forward → finite everywhere? → backward → step → log
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from lumina_ft.batch import Batch
from lumina_ft.checkpoint.directory import TrainState
from lumina_ft.config.schema import RunConfig
from lumina_ft.data.dataset import PackedDataset
from lumina_ft.errors import Interrupted, RunError
from lumina_ft.monitor.expert_load import load_summary
from lumina_ft.monitor.metrics import MetricsWriter
from lumina_ft.monitor.progress import StageProgress
from lumina_ft.parallel.dist import World
from lumina_ft.parallel.engine import Engine
from lumina_ft.parallel.progress import SAVE
from lumina_ft.stages import StagePlan
from lumina_ft.train.balance import largest_bias, selection_biases, shift_biases
from lumina_ft.train.batches import stage_batches
from lumina_ft.train.dropout import draws_dropout, seed_dropout
from lumina_ft.train.evaluate import evaluate
from lumina_ft.train.nonfinite import NonFinite, describe_nonfinite, write_report
from lumina_ft.train.objective import (
    TERMS,
    Objective,
    is_trainable_step,
    mean_losses,
    supervised_counts,
    term_scales,
)
from lumina_ft.train.optim import lr_factor
from lumina_ft.train.participation import check_participation, watched_forward
from lumina_ft.train.stop import StopRequest, agreed

log = logging.getLogger(__name__)


@dataclass
class StageRun:
    """A stage that is ready to train, and where it stands.

    Attributes:
        params: trainable parameters by name.
        peak_lrs: peak learning rate per parameter group, by the group's name.
        total_steps: length of the stage.
        step: steps done, skipped ones included.
        tokens: valid tokens trained on, over all ranks.
        seconds: time spent in earlier, interrupted runs of the stage.
        metrics, progress: on rank 0 only.
        save: writes a checkpoint of the current state. Collective.
        stop: whether this rank was told to stop.
        expert_counts: [L, E] slots routed to each expert up to the last logged step, over all ranks.
        losses: last training losses and last held-out losses.
    """

    cfg: RunConfig
    plan: StagePlan
    world: World
    engine: Engine
    objective: Objective
    params: dict[str, Parameter]
    peak_lrs: dict[str, float]
    train_data: PackedDataset
    eval_data: PackedDataset | None
    total_steps: int
    metrics: MetricsWriter | None
    progress: StageProgress | None
    save: Callable[["StageRun"], None]
    stop: StopRequest = field(default_factory=StopRequest)
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    expert_counts: Tensor | None = None
    losses: dict[str, float] = field(default_factory=dict)
    skipped_in_a_row: int = 0
    unlogged_counts: Tensor | None = None
    _saved_step: int = 0
    _started: float = field(default_factory=time.monotonic)
    _logged_at: tuple[float, int] = (0.0, 0)

    @property
    def elapsed(self) -> float:
        """Seconds spent in the stage, earlier runs included."""
        return self.seconds + time.monotonic() - self._started

    def kept_counts(self) -> tuple[list[list[int]], list[list[int]]]:
        """`TrainState.expert_counts` and `unlogged_counts`: a resumed run's records shall miss none. Collective."""
        logged, since = self.expert_counts, self.unlogged_counts
        return (
            [] if logged is None else logged.tolist(),
            [] if since is None else self.world.sum(since.clone()).tolist(),
        )

    def restore_counts(self, state: TrainState) -> None:
        """Continue counting where a checkpoint of this stage has stopped."""
        if state.expert_counts:
            self.expert_counts = torch.tensor(state.expert_counts)
        if state.unlogged_counts:
            since = torch.tensor(state.unlogged_counts, device=self.world.device)
            # They will be summed over the ranks again.
            self.unlogged_counts = since if self.world.is_main else torch.zeros_like(since)

    def lr_share(self, step: int) -> float:
        """Learning rate of a 0-based step as a share of the peak."""
        optim, stage = self.cfg.optim, self.cfg.stages[self.plan.index]
        return lr_factor(
            step,
            self.total_steps,
            schedule=stage.schedule or optim.schedule,
            warmup_ratio=optim.warmup_ratio,
            min_lr_ratio=optim.min_lr_ratio,
        )


@dataclass(frozen=True)
class StepResult:
    """What one step did on all ranks.

    Attributes:
        counts: global counts of the loss terms.
        totals: [3] fp64 this rank's sums, ordered as TERMS.
        expert_counts: [L, E] of this rank; None if nothing ran.
        grad_norm: before clipping.
        failure: set if a value wasn't finite and nothing was updated.
        idle: nothing was supervised, so nothing ran.
        stop_signal: a rank was told to stop by it, so nothing ran; 0: none.
    """

    counts: dict[str, int]
    totals: Tensor | None = None
    expert_counts: Tensor | None = None
    grad_norm: float = 0.0
    failure: NonFinite | None = None
    idle: bool = False
    stop_signal: int = 0


def train_loop(run: StageRun) -> None:
    """Train from `run.step` to the end of the stage, evaluate, and leave the stage-end checkpoint.

    Raises:
        RunError: a value wasn't finite and `on_nonfinite` is `stop`, or too many steps in a row were skipped; or ranks
            differ in what they run.
        Interrupted: a rank was told to stop; the steps done are saved, and every rank raises.
    """
    every = run.cfg.train
    run._saved_step = run.step
    run._logged_at = (time.monotonic(), run.tokens)
    batches = stage_batches(
        run.train_data,
        range(run.step, run.total_steps),
        every.packs_per_step,
        run.world,
        ahead=run.world.device.type == "cuda",
    )
    first = True
    for step, micro_batches in batches:
        result = train_step(run, step, micro_batches, first=first)
        if result.stop_signal:
            _save_and_stop(run, result.stop_signal)
        first = first and result.idle
        run.step = step + 1
        if result.expert_counts is not None:
            run.tokens += result.counts["balance"]
            run.unlogged_counts = _plus(run.unlogged_counts, result.expert_counts)
        _react_to_failure(run, result, micro_batches)
        last = run.step == run.total_steps
        if last or run.step % every.log_every_steps == 0 or result.failure or result.idle:
            _log_step(run, step, result)
        if run.eval_data and (last or (every.eval_every_steps and run.step % every.eval_every_steps == 0)):
            _evaluate(run)
        if last or (every.save_every_steps and run.step % every.save_every_steps == 0):
            _save(run)


def train_step(run: StageRun, step: int, batches: list[Batch], *, first: bool) -> StepResult:
    """One optimizer step over all ranks.

    Args:
        step: 0-based step of the stage.
        batches: this rank's micro-batches, the same number on every rank.
        first: compare the ranks' participation (T1).
    """
    weights, world, progress = run.cfg.loss, run.world, run.world.progress
    progress.mark("counts")
    shares = torch.cat([supervised_counts(batches), torch.tensor([run.stop.vote])])
    *totals_by_term, stop_votes = world.sum(shares.to(world.device)).tolist()
    counts = dict(zip(TERMS, totals_by_term, strict=True))
    if stop_signal := agreed(stop_votes):
        return StepResult(counts, stop_signal=stop_signal)
    if not is_trainable_step(counts, weights):
        return StepResult(counts, idle=True)
    scales = term_scales(counts, weights, world.size).to(world.device)
    sums = torch.zeros(len(TERMS), dtype=torch.float64, device=world.device)
    expert_counts: Tensor | None = None
    for i, batch in enumerate(batches):
        progress.mark("forward", micro_batch=i + 1, batch=batch)
        inputs = batch.to(world.device).model_inputs()
        if draws_dropout(run.cfg, run.plan.index):
            seed_dropout(run.cfg.seed, run.plan.index, step, i * world.size + world.rank)
        if first and i == 0:
            with watched_forward(run.objective.model, world):
                out = run.engine(**inputs)
        else:
            out = run.engine(**inputs)
        loss = (out["totals"] * scales).sum()
        if first and i == 0:
            check_participation(loss, run.params, world)
        failure = _find_nonfinite(run, out["finite"], loss)
        if failure is not None:
            run.engine.discard()
            return StepResult(counts, failure=failure)
        progress.mark("backward")
        run.engine.backward(loss, last=i == len(batches) - 1)
        sums += out["totals"].detach().double()
        expert_counts = _plus(expert_counts, out["expert_counts"])
    progress.mark("optimizer", micro_batch=0)
    share = run.lr_share(step)
    outcome = run.engine.step({name: lr * share for name, lr in run.peak_lrs.items()})
    if not outcome.applied:
        return StepResult(counts, failure=NonFinite(("gradients",)))
    _balance(run, expert_counts)
    return StepResult(counts, sums, expert_counts, outcome.grad_norm)


def _balance(run: StageRun, expert_counts: Tensor | None) -> None:
    """Move the routers' selection bias by the step's load over all ranks (M4). Collective unless that is off."""
    rate = run.cfg.bias_rate(run.plan.index)
    if rate and expert_counts is not None:
        shift_biases(selection_biases(run.objective), run.world.sum(expert_counts.clone()), rate)


def _find_nonfinite(run: StageRun, finite: Tensor, loss: Tensor) -> NonFinite | None:
    """Ask all ranks whether every checked place and the loss are finite, before anything is added up (T4)."""
    bad = torch.cat([~finite, ~torch.isfinite(loss.detach()).reshape(1)])
    local = bad.to(torch.int32)
    anywhere = run.world.max(local.clone()).tolist()
    if not any(anywhere):
        return None
    places = (*run.objective.places, "loss")
    return NonFinite(tuple(name for name, flag in zip(places, local.tolist(), strict=True) if flag))


def _react_to_failure(run: StageRun, result: StepResult, batches: list[Batch]) -> None:
    """Report a non-finite step; stop if so configured, on every rank."""
    if result.failure is None:
        run.skipped_in_a_row = 0
        return
    reports = run.world.gather_objects(result.failure.with_batches(batches))
    path = write_report(run.cfg.output_dir, run.plan.name, run.step, reports) if run.world.is_main else None
    message = describe_nonfinite(run.plan.name, run.step, reports, run.world.from_main(str(path)))
    run.skipped_in_a_row += 1
    every = run.cfg.train
    if every.on_nonfinite == "stop":
        raise RunError(f"{message} — lower the learning rate, look at these samples, or set train.on_nonfinite=skip")
    if run.skipped_in_a_row > every.max_skipped_steps:
        raise RunError(
            f"{message} — more than train.max_skipped_steps={every.max_skipped_steps} steps in a row — "
            "lower the learning rate or look at these samples"
        )
    if run.world.is_main:
        log.warning("%s; step skipped on every rank", message)


def _log_step(run: StageRun, step: int, result: StepResult) -> None:
    """Reduce and record the numbers of one step."""
    run.world.progress.mark("log")
    values: dict[str, float] = {}
    if result.totals is not None and run.unlogged_counts is not None:
        layers, experts = run.unlogged_counts.shape
        local = torch.cat([result.totals, run.unlogged_counts.double().flatten()])
        summed = run.world.sum(local).cpu()
        totals = dict(zip(TERMS, summed[: len(TERMS)].tolist(), strict=True))
        slots = summed[len(TERMS) :].long().view(layers, experts)
        run.expert_counts = _plus(run.expert_counts, slots)
        run.unlogged_counts = None
        values |= mean_losses(totals, result.counts, run.cfg.loss)
        run.losses = {**run.losses, **values}
        values |= {"grad_norm": result.grad_norm} | load_summary(slots.numpy())
        if run.cfg.bias_rate(run.plan.index):
            values["expert_bias_max"] = largest_bias(selection_biases(run.objective))
    elif run.world.is_main and result.idle:
        log.info("%s step %d: no supervised position in any pack; skipped", run.plan.name, run.step)
    now = time.monotonic()
    then, tokens_then = run._logged_at
    run._logged_at = (now, run.tokens)
    values |= {
        "lr": max(run.plan.lr.values()) * run.lr_share(step),
        "tokens": result.counts["balance"],
        "skipped": int(result.totals is None),
        "tokens_per_second": (run.tokens - tokens_then) / max(now - then, 1e-9),
    }
    if run.metrics is not None:
        run.metrics.write(run.step, run.plan.name, values)
    if run.progress is not None:
        run.progress.update(run.step, values)


def _evaluate(run: StageRun) -> None:
    assert run.eval_data is not None
    values = evaluate(
        run.engine,
        run.eval_data,
        run.world,
        weights=run.cfg.loss,
        packs_per_step=run.cfg.train.packs_per_step,
    )
    run.losses = {**run.losses, **values}
    if run.metrics is not None:
        run.metrics.write(run.step, run.plan.name, values)
    if run.progress is not None:
        run.progress.update(run.step, values)


def _save(run: StageRun) -> None:
    run.world.progress.mark(SAVE)
    run.save(run)
    run._saved_step = run.step


def _save_and_stop(run: StageRun, number: int) -> NoReturn:
    """Leave a checkpoint of the steps done, unless there is one, and end the stage on every rank."""
    if run.step > run._saved_step:
        _save(run)
    where = f"saved after step {run.step} of {run.total_steps}" if run.step else "before its first step"
    raise Interrupted(number, f"stage {run.plan.name!r}, {where}")


def _plus(sum_so_far: Tensor | None, value: Tensor) -> Tensor:
    return value if sum_so_far is None else sum_so_far + value
