"""What random batches don't show: far offsets, dropout, padding, other masks, and the same bits every time."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gpu_device import DEVICE, DTYPES, LIMITS, on_gpu
from torch import Tensor

from lumina_ft.bench.kernels import attention, moe
from lumina_ft.bench.kernels.measure import peak_bytes, relative_difference
from lumina_ft.bench.kernels.packs import build_pack
from lumina_ft.kernels import Experts, Lora, Projection, row_keys
from lumina_ft.kernels.attention.tile_plan import plan_bidirectional, plan_causal, plan_tiles
from lumina_ft.kernels.attention.tiled import tiled_attention
from lumina_ft.kernels.moe.fused import fused_experts
from lumina_ft.kernels.moe.grouped import grouped_experts
from lumina_ft.kernels.moe.ref import expert_loop

pytestmark = pytest.mark.gpu


def normal(*shape: int, dtype: torch.dtype, std: float = 1.0, seed: int = 0) -> Tensor:
    gen = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.empty(shape, dtype=dtype, device=DEVICE).normal_(std=std, generator=gen)


def test_the_last_of_many_large_experts_is_found() -> None:
    """512 * 2048 * 2304 elements: the last experts start where 32 bits have ended."""
    count, hidden, width = on_gpu((512, 2048, 2304), (6, 32, 16))
    dtype = DTYPES[-1]
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    weights = [
        normal(count, o, i, dtype=dtype, std=i**-0.5, seed=n).requires_grad_() for n, (o, i) in enumerate(shapes)
    ]
    x = normal(64, hidden, dtype=dtype)
    topk_idx = torch.tensor([[count - 2, count - 1]], device=DEVICE).expand(64, 2).contiguous()
    topk_weight = normal(64, 2, dtype=torch.float32).abs()
    out = fused_experts(x, Experts(*map(Projection, weights)), topk_idx, topk_weight)
    upstream = normal(64, hidden, dtype=dtype, seed=9)
    got = [out, *torch.autograd.grad(out, weights, upstream)]

    last = [weight.detach()[-2:].float().requires_grad_() for weight in weights]
    experts = Experts(*map(Projection, last)).unbind()
    expected = expert_loop(x.float(), experts, topk_idx - (count - 2), topk_weight)
    want = [expected, *torch.autograd.grad(expected, last, upstream.float())]
    for a, b in zip(got, want, strict=True):
        assert relative_difference(a.detach()[-b.shape[0] :], b.detach()) <= LIMITS[dtype]
    assert not any(grad[:-2].any() for grad in got[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adapters_drop_the_same_inputs_as_grouped_products(dtype: torch.dtype) -> None:
    sizes = on_gpu(moe.MoESizes(515, 256, 128, 16, 4, 8), moe.MoESizes(21, 32, 16, 5, 2, 4))
    problem = moe.Problem("lora", sizes, DEVICE, dtype)
    keys = row_keys(1234567890123, sizes.tokens, sizes.top_k, DEVICE)
    parts = (part._replace(lora=part.lora._replace(dropout=0.3)) for part in problem.experts() if part.lora)
    experts = Experts(*parts)

    def passes(run: Callable[..., Tensor]) -> list[Tensor]:
        out = run(problem.x, experts, problem.topk_idx, problem.topk_weight, keys)
        return [out.detach(), *torch.autograd.grad(out, list(problem.inputs.values()), problem.upstream)]

    # Both round to the dtype, in different places; other dropped inputs would differ by a third.
    for got, want in zip(passes(fused_experts), passes(grouped_experts), strict=True):
        assert relative_difference(got, want) <= 2 * LIMITS[dtype]


def test_experts_without_any_rows_give_zeros() -> None:
    shapes = ((4, 16, 32), (4, 16, 32), (4, 32, 16))
    weights = [normal(*shape, dtype=torch.float32).requires_grad_() for shape in shapes]
    lora = Lora(normal(4, 3, 32, dtype=torch.float32).requires_grad_(), normal(4, 16, 3, dtype=torch.float32), 1.0)
    experts = Experts(Projection(weights[0], lora), *map(Projection, weights[1:]))
    x = torch.empty(0, 32, device=DEVICE, requires_grad=True)
    out = fused_experts(x, experts, torch.empty(0, 2, dtype=torch.int64, device=DEVICE), x.new_empty(0, 2).detach())
    grads = torch.autograd.grad(out.sum(), [*weights, lora.a])
    assert out.shape == (0, 32) and not any(grad.any() for grad in grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_of_nan_neither_counts_nor_spreads(dtype: torch.dtype) -> None:
    sample, tail, heads, dim = on_gpu((301, 77, 8, 128), (45, 11, 2, 16))
    pack = build_pack("text", sample_tokens=sample, samples=2)
    tokens = pack.tokens + tail
    shapes = ((tokens, heads, dim), (tokens, 1, dim), (tokens, 1, dim))
    tensors = [normal(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes)]
    valid = torch.arange(tokens, device=DEVICE) < pack.tokens
    for tensor in tensors:
        tensor[pack.tokens :] = float("nan")
        tensor.requires_grad_()
    padded = {
        name: F.pad(getattr(pack, name), (0, tail)).to(DEVICE)
        for name in ("type_ids", "turn_ids", "block_ids", "is_clean")
    }
    plan = plan_tiles(
        pack.starts,
        pack.lengths,
        **padded,
        valid=valid,
        has_metadata=True,
        head_dim=dim,
        dtype=dtype,
        heads_per_key=heads,
    )
    out = tiled_attention(*tensors, plan)
    grads = torch.autograd.grad(out, tensors, normal(*out.shape, dtype=dtype, seed=5))
    for result in (out, *grads):
        assert result.isfinite().all() and not result[pack.tokens :].any() and result[: pack.tokens].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_plain_masks_agree_with_pytorch(causal: bool, dtype: torch.dtype) -> None:
    length, heads, dim = on_gpu((1023, 8, 128), (57, 2, 16))
    q, k, v = (normal(2 * length, n, dim, dtype=dtype, seed=n) for n in (heads, 2, 2))
    plan = (plan_causal if causal else plan_bidirectional)(
        [0, length],
        [length, length],
        valid=torch.ones(2 * length, dtype=torch.bool, device=DEVICE),
        head_dim=dim,
        dtype=dtype,
    )
    got = tiled_attention(q, k, v, plan)
    exact = torch.float64 if dtype == torch.float32 else torch.float32
    rows = (x.to(exact).view(2, length, -1, dim).transpose(1, 2) for x in (q, k, v))
    want = F.scaled_dot_product_attention(*rows, is_causal=causal, enable_gqa=True).transpose(1, 2)
    assert relative_difference(got, want.reshape(got.shape)) <= LIMITS[dtype]


@pytest.mark.parametrize("operation", ["moe", "attention"])
def test_equal_inputs_give_equal_bits(operation: str) -> None:
    dtype = DTYPES[-1]
    if operation == "moe":
        contest = moe.contest(
            "lora", on_gpu(moe.MoESizes(2049, 512, 256, 64, 8, 16), moe.MoESizes(19, 32, 16, 5, 2, 4)), DEVICE, dtype
        )
    else:
        sizes = on_gpu(attention.AttentionSizes(700, 4, 16, 4, 128), attention.AttentionSizes(40, 2, 2, 1, 16))
        contest = attention.contest("two turns", sizes, DEVICE, dtype)
    side = contest.sides["triton"]
    if side.prepare is not None:
        side.prepare()

    def bits() -> list[Tensor]:
        outputs = side.run()
        return [*outputs, *contest.gradients(side, outputs)]

    first = bits()
    for _ in range(on_gpu(20, 1)):
        assert all(torch.equal(a, b) for a, b in zip(first, bits(), strict=True))


def test_attention_needs_no_square_of_the_tokens() -> None:
    """16,384 tokens: the mask alone would be 268 MB. Inputs, output and gradients are 0.4 GB, row statistics 2 MB."""
    sizes = on_gpu(attention.AttentionSizes(2048, 8, 16, 4, 128), attention.AttentionSizes(64, 2, 2, 1, 16))
    contest = attention.contest("text", sizes, DEVICE, DTYPES[-1])
    side = contest.sides["triton"]
    assert side.prepare is not None
    side.prepare()
    held = peak_bytes(DEVICE, lambda: contest.gradients(side, side.run()))
    own = sum(x.numel() * x.itemsize for x in contest.inputs.values())
    # Output, its gradient made contiguous, gradients of the inputs, float32 statistics of each row and head.
    assert held <= 4 * own
