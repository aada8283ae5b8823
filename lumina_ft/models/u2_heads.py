"""The codebook head: predicts the C codes of one image position one after the other (T11, spec §1 "AR head").

Shape legend: n image positions, C codebooks, c codes known so far, D = hidden size, A attention heads.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lumina_ft.models.moe import keep_dtype
from lumina_ft.models.u2_config import U2Config

LAYER_NORM_EPS = 1e-6
MLP_RATIO = 4


class ChannelAttention(nn.Module):
    """Causal attention over the codebooks of one position, with LayerNorm on queries and keys and no positions."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm = nn.LayerNorm(dim // heads, eps=LAYER_NORM_EPS)
        self.k_norm = nn.LayerNorm(dim // heads, eps=LAYER_NORM_EPS)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, C, D] -> [n, C, D]."""
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).unbind(2)
        out = F.scaled_dot_product_attention(
            self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.proj(out.transpose(1, 2).flatten(2))


class ChannelMLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, MLP_RATIO * dim)
        self.fc2 = nn.Linear(MLP_RATIO * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, C, D] -> [n, C, D]. Exact GELU."""
        return self.fc2(F.gelu(self.fc1(x)))


class ChannelBlock(nn.Module):
    """Transformer block whose norms and gates are modulated by a condition per codebook."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.attn = ChannelAttention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.mlp = ChannelMLP(dim)
        # Index 0 is the SiLU; checkpoints name the linear layer `adaLN_modulation.1`.
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x, condition: [n, C, D] -> [n, C, D]."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(condition).chunk(6, dim=-1)
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class ChannelFinal(nn.Module):
    """Parameter-free LayerNorm, modulated; the chunks are (scale, shift), the other way round than in the blocks."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x, condition: [n, C, D] -> [n, C, D]."""
        scale, shift = self.adaLN_modulation(condition).chunk(2, dim=-1)
        return F.layer_norm(x, x.shape[-1:], eps=LAYER_NORM_EPS) * (1 + scale) + shift


class CodebookHead(nn.Module):
    """States for codebooks 0..c of each position, from the backbone state and the embeddings of codes 0..c-1."""

    channel_mask: Tensor

    def __init__(self, config: U2Config) -> None:
        super().__init__()
        assert config.num_codebooks is not None
        dim, codebooks = config.hidden_size, config.num_codebooks
        self.condition_proj = nn.Linear(dim, dim)
        self.channel_embed = nn.Parameter(torch.empty(1, codebooks, dim))
        self.timesteps_embeddings = nn.Parameter(torch.empty(1, codebooks, dim))
        # Part of published checkpoints; the attention above is causal by construction and doesn't read it.
        causal = torch.full((codebooks, codebooks), float("-inf"), dtype=torch.bfloat16).triu(1)
        self.register_buffer("channel_mask", causal)
        self.channel_blocks = nn.ModuleList(
            ChannelBlock(dim, config.ar_head_heads) for _ in range(config.ar_head_depth)
        )
        self.channel_norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.channel_final = ChannelFinal(dim)
        self.checkpoint_blocks = False
        self.keep_random_state = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CodebookHead":
        before = self.channel_mask
        super()._apply(fn, recurse)
        keep_dtype(self, "channel_mask", before)
        return self

    def forward(self, hidden: Tensor, code_embeddings: Tensor) -> Tensor:
        """Run the head.

        Args:
            hidden: [n, D] backbone states after the final norm.
            code_embeddings: [n, c, D], embedding of code k of each position at index k, c < C.

        Returns:
            [n, c + 1, D]; index k holds the state that predicts code k and has seen codes 0..k-1 only.
        """
        query = self.condition_proj(hidden).unsqueeze(1)
        steps = code_embeddings.shape[1] + 1
        x = torch.cat((query, code_embeddings), dim=1) + self.channel_embed[:, :steps]
        condition = query + self.timesteps_embeddings[:, :steps]
        for block in self.channel_blocks:
            if self.checkpoint_blocks and torch.is_grad_enabled():
                keep = self.keep_random_state
                x = checkpoint(block, x, condition, use_reentrant=False, preserve_rng_state=keep, early_stop=True)
            else:
                x = block(x, condition)
        return self.channel_final(self.channel_norm(x), condition)
