"""Packs for the attention kernels' tests, and the reference that they are compared with."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from parity import Inputs, guarded
from torch import Tensor

from lumina_ft.kernels.attention.ref import allowed_mask
from lumina_ft.kernels.attention.tile_plan import TilePlan, plan_bidirectional, plan_causal, plan_tiles
from lumina_ft.kernels.attention.tiled import tiled_attention

RULES = ("blocks", "coarse", "causal", "bidirectional")


def starts_of(lengths: list[int]) -> list[int]:
    """First token of each sample of a pack."""
    return [sum(lengths[:i]) for i in range(len(lengths))]


def random_metadata(lengths: list[int], tail: int, *, invalid: int = 0, seed: int = 0) -> dict[str, Tensor]:
    """Token metadata without any order, which is the hardest case; `tail` tokens belong to no sample."""
    gen = torch.Generator().manual_seed(seed)
    tokens = sum(lengths) + tail
    valid = torch.ones(tokens, dtype=torch.bool)
    valid[sum(lengths) :] = False
    valid[torch.randperm(sum(lengths), generator=gen)[:invalid]] = False
    return {
        "type_ids": torch.randint(0, 5, (tokens,), generator=gen),
        "turn_ids": torch.randint(0, 3, (tokens,), generator=gen),
        "block_ids": torch.randint(-1, 3, (tokens,), generator=gen),
        "is_clean": torch.rand(tokens, generator=gen) < 0.5,
        "valid": valid,
    }


def text_metadata(prompt: int, answer: int, block: int) -> dict[str, Tensor]:
    """One text sample as it is trained: prompt, noisy answer, its clean copy."""
    blocks = torch.arange(answer) // block
    outside = torch.full((prompt,), -1)
    lengths = torch.tensor([prompt, answer, answer])
    return {
        "type_ids": torch.tensor([1, 3, 3]).repeat_interleave(lengths),
        "turn_ids": torch.tensor([0, 1, 1]).repeat_interleave(lengths),
        "block_ids": torch.cat((outside, blocks, blocks)),
        "is_clean": torch.tensor([True, False, True]).repeat_interleave(lengths),
        "valid": torch.ones(prompt + 2 * answer, dtype=torch.bool),
    }


def plan_and_mask(
    rule: str, lengths: list[int], meta: dict[str, Tensor], *, head_dim: int, dtype: torch.dtype, heads_per_key: int
) -> tuple[TilePlan, Tensor]:
    """The plan of a rule of RULES, and the dense mask [T, T] that it stands for."""
    starts = starts_of(lengths)
    sizes = {"head_dim": head_dim, "dtype": dtype, "heads_per_key": heads_per_key}
    bounds = torch.tensor([*starts, sum(lengths)])
    valid = meta["valid"]
    if rule == "coarse":
        meta = meta | {"block_ids": torch.full_like(meta["block_ids"], -1)}
    if rule in ("blocks", "coarse"):
        plan = plan_tiles(starts, lengths, **meta, has_metadata=True, **sizes)
        return plan, allowed_mask(**meta, cu_seqlens=bounds)
    mask = allowed_mask(meta["type_ids"], cu_seqlens=bounds, valid=valid)
    if rule == "causal":
        return plan_causal(starts, lengths, valid=valid, **sizes), mask.tril()
    return plan_bidirectional(starts, lengths, valid=valid, **sizes), mask


def attention_inputs(
    tokens: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype = torch.float32, seed: int = 1
) -> Inputs:
    """q, k and v, each lying between NaNs."""
    gen = torch.Generator().manual_seed(seed)
    names = {"q": heads[0], "k": heads[1], "v": heads[1]}
    return {n: guarded(torch.randn(tokens, h, head_dim, generator=gen).to(dtype)) for n, h in names.items()}


def reference(mask: Tensor) -> Callable[..., Tensor]:
    """PyTorch's own attention under a mask [T, T], in the dtype of its inputs; 0 for a query that sees nothing."""
    hears = mask.any(-1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask & hears.unsqueeze(1), float("-inf"))
        q_HTD, k_HTD, v_HTD = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q_HTD, k_HTD, v_HTD, attn_mask=bias, enable_gqa=True)
        return out[0].transpose(0, 1).masked_fill(~hears.view(-1, 1, 1), 0.0)

    return attend


def kernel(plan: TilePlan) -> Callable[..., Tensor]:
    """`tiled_attention` with its plan bound."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tiled_attention(q, k, v, plan)

    return attend
