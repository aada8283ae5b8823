"""Rank script: stages one after another in the same ranks, each with a fresh engine. Argument: a JSON list of jobs.

A job is `{"config": …, "stage": 0, "resume": checkpoint or null}`, with `"fault": "twins"` if every rank shall take
itself for the first of those that share the experts, and `"fails": true` if an error of ours is due. Every rank notes
in `seen-RANK.json` of the job's run directory

    samples  sample ids of its batches, by step; -1 stands for a pack without samples
    gaps     by step, how close any choice of experts came to another one: the smallest difference between the last
             score that was taken and the first that wasn't, of groups and of experts
    biases   the routers' selection bias at the end, by layer
    error    what was raised
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lumina_ft.config.schema import RunConfig
from lumina_ft.errors import LuminaError
from lumina_ft.models.moe import Router
from lumina_ft.parallel.dist import World, init_distributed
from lumina_ft.parallel.expert_parallel import ExpertParallel, join_experts
from lumina_ft.train import loop, run
from lumina_ft.train.balance import selection_biases
from lumina_ft.train.start import Start

torch.set_num_threads(1)
world = init_distributed("elastic", 5.0)
# All stages share one process group: the group of a stage is left by the process that ends with it.
run.init_distributed = lambda *_, **__: world
leave = world.close
world.close = world.barrier

samples: dict[int, list[int]] = {}
gaps: dict[int, float] = {}
built: list[loop.StageRun] = []
real_batches, real_forward, real_build = loop.stage_batches, Router.forward, run.build_stage


def watched_batches(*args: Any, **kwargs: Any) -> Iterator[tuple[int, list]]:
    for step, batches in real_batches(*args, **kwargs):
        samples[step] = [index for batch in batches for index in batch.sample_ids.tolist()]
        gaps[step] = 1.0
        yield step, batches


def watched_forward(self: Router, x: Tensor) -> Any:
    routing = real_forward(self, x)
    step = max(gaps)
    # A row of zeros stands for no token.
    logits = routing.logits.detach()[routing.logits.detach().any(dim=1)]
    if len(logits):
        gaps[step] = min(gaps[step], smallest_gap(torch.sigmoid(logits) + self.expert_bias, self))
    return routing


def smallest_gap(scores: Tensor, router: Router) -> float:
    """scores: [T, E] by which experts are chosen."""
    groups = scores.unflatten(1, (router.num_groups, -1))
    best = groups.topk(2, dim=2).values.sum(2)
    order = best.argsort(dim=1, descending=True)[:, : router.kept_groups]
    kept = groups.gather(1, order.unsqueeze(2).expand(-1, -1, groups.shape[2])).flatten(1)
    pairs = ((best, router.kept_groups), (kept, router.top_k))
    ranked = [(values.sort(dim=1, descending=True).values, count) for values, count in pairs]
    return min(float((values[:, count - 1] - values[:, count]).min()) for values, count in ranked)


def watched_build(cfg: RunConfig, stage_index: int, start: Start, ranks: World, run_dir: Path) -> loop.StageRun:
    built.append(real_build(cfg, stage_index, start, ranks, run_dir))
    return built[-1]


def twins(size: int) -> ExpertParallel | None:
    experts = join_experts(size)
    return experts and replace(experts, rank=0)


def run_job(job: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    run.join_experts = twins if job.get("fault") == "twins" else join_experts
    resume = job["resume"] and Path(job["resume"])
    try:
        run.train_stage(config, job["stage"], resume=resume, run_dir=config.output_dir)
    except LuminaError as error:
        if not job.get("fails"):
            raise
        built.clear()
        return {"error": f"{type(error).__name__}: {error}"}
    biases = [bias.tolist() for bias in selection_biases(built.pop().objective)]
    return {"samples": samples, "gaps": gaps, "biases": biases}


loop.stage_batches, Router.forward, run.build_stage = watched_batches, watched_forward, watched_build

for job in json.loads(Path(sys.argv[1]).read_text()):
    config = RunConfig.model_validate(job["config"])
    config.output_dir.mkdir(parents=True, exist_ok=True)
    samples.clear()
    gaps.clear()
    (config.output_dir / f"seen-{world.rank}.json").write_text(json.dumps(run_job(job, config)))
    world.barrier()
leave()
