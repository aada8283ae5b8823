"""Golden sets A and B. `LUMINA_GOLDEN` names another folder of the same structure."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from lumina_ft import kernels
from lumina_ft.models.u2 import U2ForDiffusion

GOLDEN = Path(os.environ.get("LUMINA_GOLDEN") or Path(__file__).parents[1] / "golden")

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

    def model(self, attention: str = "segmented", experts: str = "auto") -> U2ForDiffusion:
        """A fresh fp32 model; strict segmented attention unless said otherwise."""
        model = U2ForDiffusion.from_pretrained(self.path, dtype=torch.float32)
        model.set_implementations(attention=attention, experts=experts)
        return model

    def inputs(self, case: str, prefix: str = "in.") -> dict[str, Tensor]:
        """Forward keywords stored under `prefix` of a case."""
        stored = self.tensors(case)
        return {ours: stored[prefix + name] for name, ours in _INPUTS.items() if prefix + name in stored}


@pytest.fixture(params=["A", "B"])
def golden(request: pytest.FixtureRequest) -> GoldenSet:
    return GoldenSet(GOLDEN / request.param)


@pytest.fixture
def assert_close() -> Callable[[Tensor, Tensor], None]:
    """Hidden states and logits: 5e-5 absolute (golden README)."""

    def check(got: Tensor, want: Tensor) -> None:
        assert got.shape == want.shape
        difference = float((got - want).detach().abs().max()) if want.numel() else 0.0
        assert difference <= 5e-5, difference

    return check


@pytest.fixture
def published_masked_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make dense attention treat rows without any allowed key as the published code does (surprise 8).

    There such a row averages uniformly over all keys, since finfo.min swallows the scores. Gradients need torch's fused
    CPU kernel itself: its backward recovers probabilities as exp(score - logsumexp), where finfo.min swallows log(S)
    too, so a masked row sends back S times the gradient of that average. The golden gradients contain this.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, plan: kernels.DensePlan) -> Tensor:
        rows, tokens = plan.allowed.shape[:2]
        heads = q.shape[1]
        q, k, v = (x.view(rows, tokens, -1, x.shape[-1]).transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        bias = torch.zeros(plan.allowed.shape).masked_fill(~plan.allowed, torch.finfo(torch.float32).min)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(1))
        return out.transpose(1, 2).reshape(rows * tokens, heads, -1)

    monkeypatch.setattr(kernels, "dense_attention", attend)
