"""Rank script: one stage through the real entry point. Arguments: config JSON, stage index, optional checkpoint."""

import json
import sys
from pathlib import Path

import torch

from lumina_ft.config.schema import RunConfig
from lumina_ft.train.run import train_stage

torch.set_num_threads(1)
config = RunConfig.model_validate(json.loads(Path(sys.argv[1]).read_text()))
config.output_dir.mkdir(parents=True, exist_ok=True)
checkpoint = Path(sys.argv[3]) if len(sys.argv) > 3 else None
train_stage(config, int(sys.argv[2]), resume=checkpoint, run_dir=config.output_dir)
