"""Each operation's Triton kernels on the device: every output and gradient against a more exact reference."""

from collections.abc import Iterable

import pytest
import torch
from gpu_device import DEVICE, DTYPES, LIMITS, on_gpu

from lumina_ft.bench.kernels import attention, moe, router
from lumina_ft.bench.kernels.attention import AttentionSizes
from lumina_ft.bench.kernels.contest import Contest, check
from lumina_ft.bench.kernels.moe import MoESizes
from lumina_ft.bench.kernels.packs import LAYOUTS
from lumina_ft.bench.kernels.router import RouterSizes

pytestmark = pytest.mark.gpu

MOE_SIZES = {
    "ragged": on_gpu(MoESizes(1021, 272, 144, 37, 5, 24), MoESizes(37, 48, 32, 7, 3, 5)),
    "one token": on_gpu(MoESizes(1, 2048, 512, 256, 8, 16), MoESizes(1, 32, 16, 16, 2, 4)),
    "published": on_gpu(moe.SIZES["real"], moe.SIZES["tiny"]),
}
ATTENTION_SIZES = {
    "published": on_gpu(attention.SIZES["real"], attention.SIZES["tiny"]),
    "head dim 128": on_gpu(AttentionSizes(509, 5, 16, 4, 128), AttentionSizes(53, 2, 4, 2, 128)),
    "head dim 64": on_gpu(AttentionSizes(1024, 3, 8, 1, 64), AttentionSizes(40, 2, 3, 1, 64)),
    "head dim 80": on_gpu(AttentionSizes(333, 2, 6, 6, 80), AttentionSizes(24, 1, 1, 1, 80)),
}
ROUTER_SIZES = {
    "published": on_gpu(router.SIZES["real"], router.SIZES["tiny"]),
    "prime": on_gpu(RouterSizes(4099, 2048, 256, 8, 4, 8), RouterSizes(13, 32, 32, 8, 4, 8)),
    "no groups": on_gpu(RouterSizes(257, 256, 24, 1, 1, 3), RouterSizes(5, 16, 24, 1, 1, 3)),
}


def pairs_of(sizes: Iterable[str], exact: tuple[str, ...]) -> list[tuple[str, torch.dtype]]:
    """All sizes in bfloat16, those of `exact` in float32 too: its kernels take long to compile."""
    return [(name, dtype) for name in sizes for dtype in DTYPES if name in exact or dtype == DTYPES[-1]]


def assert_right(contest: Contest) -> None:
    assert "triton" in contest.sides, contest.unavailable
    differences = check(contest, contest.sides["triton"], contest.reference())["differences"]
    limit = LIMITS[contest.dtype]
    # Written so that NaN fails.
    assert not {name: value for name, value in differences.items() if not value <= limit}


@pytest.mark.parametrize(("sizes", "dtype"), pairs_of(MOE_SIZES, ("ragged",)))
@pytest.mark.parametrize("case", moe.CASES)
def test_routed_experts_agree_with_the_loop(sizes: str, case: str, dtype: torch.dtype) -> None:
    assert_right(moe.contest(case, MOE_SIZES[sizes], DEVICE, dtype))


@pytest.mark.parametrize(("sizes", "dtype"), pairs_of(ATTENTION_SIZES, ("head dim 128", "head dim 64")))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_agrees_with_the_rule(sizes: str, layout: str, dtype: torch.dtype) -> None:
    assert_right(attention.contest(layout, ATTENTION_SIZES[sizes], DEVICE, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", ROUTER_SIZES)
def test_the_router_chooses_and_weights_as_written_out(sizes: str, dtype: torch.dtype) -> None:
    for contest in router.contests(ROUTER_SIZES[sizes], DEVICE, dtype):
        assert_right(contest)
