"""The golden sets, and how tests of parity compare with them."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lumina_ft import kernels

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden_sets import GOLDEN, GoldenSet  # noqa: E402


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
