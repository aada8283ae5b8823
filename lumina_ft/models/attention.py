"""Attention of a decoder layer: fused q/k/v, norms on q and k, partial rotary positions, grouped key heads (spec §1).

Shape legend: T tokens, H hidden, Hq query heads, Hk key heads, D head dim, R rotated dims of a head.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lumina_ft.kernels import AttentionPlan, attend
from lumina_ft.models.u2_config import U2Config


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), computed in float32 and cast to the input dtype before the weight multiplies it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size]; same shape and dtype out."""
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight


class Rotary(NamedTuple):
    """cos, sin: [T, 1, R / 2] in the dtype of the activations."""

    cos: Tensor
    sin: Tensor


def rotary_tables(position_ids: Tensor, *, rotary_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """Angles position * theta^(-2i / R), i = 0..R/2-1, in float32, cast at the end.

    Args:
        position_ids: [T] int64.

    The frequencies are recomputed each forward: a buffer would follow the model into bfloat16, where they are useless.
    """
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=position_ids.device) / rotary_dim
    angles = position_ids.float().unsqueeze(-1) * theta**-exponent
    return Rotary(angles.cos().to(dtype).unsqueeze(1), angles.sin().to(dtype).unsqueeze(1))


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the pairs (i, i + R/2) of the first R dims; the other dims pass.

    Args:
        x: [T, heads, D].
    """
    half = rotary.cos.shape[-1]
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * rotary.cos - second * rotary.sin, second * rotary.cos + first * rotary.sin, rest), dim=-1)


class Attention(nn.Module):
    """Self-attention under a ready plan."""

    def __init__(self, config: U2Config) -> None:
        super().__init__()
        assert config.head_dim is not None
        self.head_dim = config.head_dim
        self.heads = config.num_attention_heads
        self.key_heads = config.num_key_value_heads
        width = self.head_dim * (self.heads + 2 * self.key_heads)
        self.query_key_value = nn.Linear(config.hidden_size, width, bias=False)
        self.query_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.key_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.dense = nn.Linear(self.head_dim * self.heads, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, plan: AttentionPlan) -> Tensor:
        """x: [T, H] -> [T, H]; 0 for padding tokens."""
        # Rows of the fused weight: all query heads, all key heads, all value heads.
        fused = self.query_key_value(x).view(x.shape[0], -1, self.head_dim)
        q, k, v = fused.split((self.heads, self.key_heads, self.key_heads), dim=1)
        q = rotate(self.query_layernorm(q), rotary)
        k = rotate(self.key_layernorm(k), rotary)
        return self.dense(attend(q, k, v, plan).flatten(1))
