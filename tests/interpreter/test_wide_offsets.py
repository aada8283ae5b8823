"""Attention over tokens that lie more than 2^31 elements apart, as in a narrow column of a wide buffer."""

import torch
import torch.nn.functional as F
from parity import assert_close, outputs_and_gradients, sparse_zeros
from torch import Tensor

from lumina_ft.kernels.attention.tile_plan import plan_causal
from lumina_ft.kernels.attention.tiled import tiled_attention

TOKENS, HEADS, HEAD_DIM = 160, 2, 16
TOKEN_STRIDE = 2**24
"""The tokens of one tile lie within 2^31 elements, those of all tiles don't."""


def random(seed: int) -> Tensor:
    return torch.randn(TOKENS, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


def test_tokens_that_lie_far_apart_are_attended_to_where_they_are() -> None:
    assert (TOKENS - 32) * TOKEN_STRIDE >= 2**31
    dense = {name: random(seed) for seed, name in enumerate(("q", "k", "v"))}
    buffer = sparse_zeros((TOKENS + 1, TOKEN_STRIDE), torch.float32)
    far: dict[str, Tensor] = {}
    for number, (name, values) in enumerate(dense.items()):
        start = buffer.storage_offset() + number * HEADS * HEAD_DIM
        far[name] = buffer.as_strided(values.shape, (TOKEN_STRIDE, HEAD_DIM, 1), start).copy_(values).requires_grad_()
    valid = torch.ones(TOKENS, dtype=torch.bool)
    plan = plan_causal([0], [TOKENS], valid=valid, head_dim=HEAD_DIM, dtype=torch.float32)
    upstream = random(3)
    out = tiled_attention(far["q"], far["k"], far["v"], plan)
    grads = torch.autograd.grad(out, list(far.values()), upstream)
    got = {"out": out.detach()} | {f"grad {name}": grad for name, grad in zip(far, grads, strict=True)}
    exact = {name: values.double() for name, values in dense.items()}
    assert_close(got, outputs_and_gradients(causal, exact, ("q", "k", "v"), upstream))
