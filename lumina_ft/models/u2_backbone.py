"""Embeddings and decoder layers of InternLumina-U2 (spec §1).

Shape legend: T tokens, H hidden, C codebooks, E experts, K chosen experts per token.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lumina_ft.kernels import AttentionPlan, Kernels
from lumina_ft.models.attention import Attention, RMSNorm, Rotary, rotary_tables
from lumina_ft.models.losses import RowSet
from lumina_ft.models.moe import MLP, MoEBlock
from lumina_ft.models.u2_config import U2Config
from lumina_ft.parallel.expert_parallel import ExpertParallel


class DecoderLayer(nn.Module):
    """Pre-norm block: h += Attn(RMS(h)); h += MLP(RMS(h))."""

    def __init__(self, config: U2Config, index: int, kernels: Kernels, expert_parallel: ExpertParallel | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if index < config.first_k_dense_replace:
            self.mlp = MLP(config.hidden_size, config.intermediate_size)
        else:
            self.mlp = MoEBlock(config, kernels, expert_parallel)

    def forward(
        self, hidden: Tensor, rotary: Rotary, plan: AttentionPlan
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """hidden: [T, H] -> (hidden [T, H], router logits [T, E] or None, chosen experts [T, K] or None)."""
        hidden = hidden + self.attention(self.input_layernorm(hidden), rotary, plan)
        normed = self.post_attention_layernorm(hidden)
        if isinstance(self.mlp, MLP):
            return hidden + self.mlp(normed), None, None
        out, logits, topk_idx = self.mlp(normed)
        return hidden + out, logits, topk_idx


class BackboneOutput(NamedTuple):
    """hidden: [T, H] after the final norm. Per MoE layer: router_logits [T, E] float32, router_topk [T, K] int64."""

    hidden: Tensor
    router_logits: list[Tensor]
    router_topk: list[Tensor]


class Embedded(NamedTuple):
    """hidden: [T, H]. media: [n, H] rows of the image branch (a stand-in without media), None in text-only models."""

    hidden: Tensor
    media: Tensor | None


class U2Backbone(nn.Module):
    """Everything named `model.*` in checkpoints."""

    def __init__(self, config: U2Config, kernels: Kernels, expert_parallel: ExpertParallel | None) -> None:
        super().__init__()
        assert config.text_rows is not None
        self.config = config
        # The pad row never gets gradient, as in the published model.
        self.word_embeddings = nn.Embedding(config.text_rows, config.hidden_size, padding_idx=config.pad_token_id)
        if config.num_codebooks is not None:
            self.img_embeddings = nn.ModuleList(
                nn.Embedding(config.image_embedding_rows, config.hidden_size) for _ in range(config.num_codebooks)
            )
            self.img_embeddings_proj = nn.Linear(
                config.hidden_size * config.num_codebooks, config.hidden_size, bias=False
            )
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, kernels, expert_parallel) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.checkpoint_layers = False
        self.keep_random_state = False

    def embed(self, input_ids: Tensor, is_media: Tensor) -> Embedded:
        """Token embeddings: column 0 in the word table, or all columns in the image tables and projected.

        Args:
            input_ids: [T, C] int64, or [T, 1] when nothing is media. is_media: [T] bool.
        """
        word_ids = input_ids[:, 0].masked_fill(is_media, self.config.pad_token_id or 0)
        hidden = self.word_embeddings(word_ids)
        if self.config.num_codebooks is None:
            return Embedded(hidden, None)
        rows = RowSet.of(is_media)
        codes = input_ids.index_select(0, rows.rows) * int(rows.count > 0)
        codes = codes.expand(-1, self.config.num_codebooks)
        media = self.img_embeddings_proj(
            torch.cat([table(codes[:, c]) for c, table in enumerate(self.img_embeddings)], dim=-1)
        )
        hidden = hidden.masked_fill(is_media.unsqueeze(-1), 0.0)
        return Embedded(hidden.index_add(0, rows.rows, media * rows.weight), media)

    def code_embeddings(self, codes: Tensor) -> Tensor:
        """Embeddings of the first codes of image positions, unprojected. codes: [n, c] int64 -> [n, c, H]."""
        columns = [self.img_embeddings[k](codes[:, k]) for k in range(codes.shape[1])]
        if not columns:
            return self.img_embeddings_proj.weight.new_zeros(codes.shape[0], 0, self.config.hidden_size)
        return torch.stack(columns, dim=1)

    def forward(self, hidden: Tensor, position_ids: Tensor, plan: AttentionPlan) -> BackboneOutput:
        """Run all layers.

        Args:
            hidden: [T, H] embeddings. position_ids: [T] int64. plan: attention of all layers.
        """
        rotary = rotary_tables(
            position_ids, rotary_dim=self.config.rotary_dim, theta=self.config.rope_theta, dtype=hidden.dtype
        )
        router_logits: list[Tensor] = []
        router_topk: list[Tensor] = []
        for layer in self.layers:
            if self.checkpoint_layers and torch.is_grad_enabled():
                # With early stop: run to its end, the recomputation would free the partitioned weight of the very
                # module whose backward asked for it, and accumulating its gradient would fail.
                hidden, logits, topk = checkpoint(
                    layer,
                    hidden,
                    rotary,
                    plan,
                    use_reentrant=False,
                    preserve_rng_state=self.keep_random_state,
                    early_stop=True,
                )
            else:
                hidden, logits, topk = layer(hidden, rotary, plan)
            if logits is not None:
                router_logits.append(logits)
                router_topk.append(topk)
        return BackboneOutput(self.norm(hidden), router_logits, router_topk)
