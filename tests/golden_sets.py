"""Golden sets A and B. `LUMINA_GOLDEN` names another folder of the same structure."""

import json
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from lumina_ft.models.u2 import U2ForDiffusion

GOLDEN = Path(os.environ.get("LUMINA_GOLDEN") or Path(__file__).parent / "golden")

# Golden name -> our keyword.
_INPUTS = {
    "input_ids": "input_ids",
    "type_position_ids": "type_ids",
    "position_ids": "position_ids",
    "turn_ids": "turn_ids",
    "block_ids": "block_ids",
    "is_clean": "is_clean",
    "cu_seqlens": "cu_seqlens",
    "attention_mask": "valid",
    "labels": "labels",
}


@lru_cache
def _load(path: Path, case: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((path / f"{case}.json").read_text()), load_file(path / f"{case}.safetensors")


@dataclass(frozen=True)
class GoldenSet:
    path: Path

    def info(self, case: str) -> dict[str, Any]:
        return _load(self.path, case)[0]

    def tensors(self, case: str) -> dict[str, Tensor]:
        return _load(self.path, case)[1]

    def model(self, kernels: str = "torch") -> U2ForDiffusion:
        """A fresh fp32 model; strict kernels unless said otherwise."""
        model = U2ForDiffusion.from_pretrained(self.path, dtype=torch.float32)
        model.set_kernels(kernels)
        return model

    def inputs(self, case: str, prefix: str = "in.") -> dict[str, Tensor]:
        """Forward keywords stored under `prefix` of a case."""
        stored = self.tensors(case)
        return {ours: stored[prefix + name] for name, ours in _INPUTS.items() if prefix + name in stored}
