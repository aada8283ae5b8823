"""Rank script: stages one after another in the same ranks, each with a fresh engine. Argument: a JSON list of jobs.

A job is `{"config": …, "stage": 0, "resume": checkpoint or null}`. Every rank notes in `seen-RANK.json` of the job's
run directory the sample ids of its batches, by step; -1 stands for a pack without samples.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lumina_ft.config.schema import RunConfig
from lumina_ft.parallel.dist import init_distributed
from lumina_ft.train import loop, run

torch.set_num_threads(1)
world = init_distributed("elastic", 5.0)
# All stages share one process group: the group of a stage is left by the process that ends with it.
run.init_distributed = lambda *_, **__: world
world.close = world.barrier

seen: dict[int, list[int]] = {}
real_batches = loop.stage_batches


def watched_batches(*args: Any, **kwargs: Any) -> Iterator[tuple[int, list]]:
    for step, batches in real_batches(*args, **kwargs):
        seen[step] = [index for batch in batches for index in batch.sample_ids.tolist()]
        yield step, batches


loop.stage_batches = watched_batches

for job in json.loads(Path(sys.argv[1]).read_text()):
    config = RunConfig.model_validate(job["config"])
    config.output_dir.mkdir(parents=True, exist_ok=True)
    seen.clear()
    run.train_stage(config, job["stage"], resume=job["resume"] and Path(job["resume"]), run_dir=config.output_dir)
    (config.output_dir / f"seen-{world.rank}.json").write_text(json.dumps(seen))
    world.barrier()
