"""Rank script: a stage through the real entry point, watched from inside. Arguments: config JSON, output directory.

Writes `memory-<rank>.json`: bytes of the states before the update of each step but the first, and the largest anonymous
memory of the process that a thread has seen.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from lumina_ft.config.schema import RunConfig
from lumina_ft.parallel.engine import Engine
from lumina_ft.parallel.memory import anonymous_bytes, measured_bytes
from lumina_ft.train.run import train_stage

INTERVAL_SECONDS = 0.01
states: list[tuple[int, ...]] = []
peaks: dict[str, int] = {}
phase = ["start"]


def watch() -> None:
    while True:
        peaks[phase[0]] = max(peaks.get(phase[0], 0), anonymous_bytes())
        time.sleep(INTERVAL_SECONDS)


step = Engine.step
finished = []


def watched(self: Engine, lrs: Any) -> Any:
    if finished:
        states.append(tuple(measured_bytes(self)))
    outcome = step(self, lrs)
    finished.append(outcome)
    phase[0] = f"after step {len(finished)}"
    return outcome


torch.set_num_threads(1)
config = RunConfig.model_validate(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
config.output_dir.mkdir(parents=True, exist_ok=True)
Engine.step = watched
threading.Thread(target=watch, daemon=True).start()
train_stage(config, 0, resume=None, run_dir=config.output_dir)
record = {"states": states, "peak": max(peaks.values()), "peaks": peaks}
(Path(sys.argv[2]) / f"memory-{os.environ['RANK']}.json").write_text(json.dumps(record))
