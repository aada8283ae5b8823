"""InternLumina-U2 for block-diffusion training and decoding, and its text-only ancestors (spec §1, §3, §5).

Shape legend: B rows, S tokens of a row, T = B * S, H hidden, C codebooks, V text rows, K image codes, E experts, L MoE
layers, m supervised text tokens, n supervised image positions.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils.generic import ModelOutput

from lumina_ft.batch import LossSum
from lumina_ft.errors import ConfigError
from lumina_ft.kernels import LinearLoss, all_finite, loss_of_logits
from lumina_ft.models.attention_plan import plan_attention
from lumina_ft.models.experts import PackedExperts
from lumina_ft.models.init import initial_values
from lumina_ft.models.inputs import ModelInputs, normalise_inputs
from lumina_ft.models.loss_head import LossHead
from lumina_ft.models.losses import RowSet, balance_loss, count_experts, normalise_labels
from lumina_ft.models.moe import Router
from lumina_ft.models.u2_backbone import U2Backbone
from lumina_ft.models.u2_config import U2Config, kernels_for
from lumina_ft.models.u2_heads import CodebookHead
from lumina_ft.parallel.expert_parallel import ExpertParallel
from lumina_ft.parallel.zero3 import full_shape, write_tensor


@dataclass
class U2Output(ModelOutput):
    """Result of a forward pass.

    Attributes:
        hidden: [T, H] after the final norm.
        losses: with labels: `text`, `balance` and, in models with image parts, `image`.
        logits_text: [m, V], logits_image: [n, C, K] with `return_logits`; supervised positions in token order.
        targets_text: [m] int64, targets_image: [n, C] int64, with `return_logits`.
        router_logits: per MoE layer [T, E] float32. router_topk: per MoE layer [T, K] int64, best first.
        expert_counts: [L, E] int64, slots of valid tokens routed to each expert in this forward.
        finite: place -> 0-dim bool; the places are the same whatever the batch holds.
        attention: name of the implementation that ran.
    """

    hidden: Tensor | None = None
    losses: dict[str, LossSum] | None = None
    logits_text: Tensor | None = None
    logits_image: Tensor | None = None
    targets_text: Tensor | None = None
    targets_image: Tensor | None = None
    router_logits: list[Tensor] | None = None
    router_topk: list[Tensor] | None = None
    expert_counts: Tensor | None = None
    finite: dict[str, Tensor] | None = None
    attention: str | None = None


class U2ForDiffusion(PreTrainedModel):
    """The whole model; parameter names are those of the packed checkpoint layout.

    Weights are undefined until `init_weights_` or a checkpoint fills them: construction draws no random numbers.

    Args:
        config: sizes.
        kernels: `triton` and `torch` run nothing else and refuse inputs that they can't serve; `eager` is the
            reference; `auto` takes the fastest that can run, and the reference under an explicit mask.
        expert_parallel: ranks that share the routed experts; this one then holds its own experts only.
    """

    config: U2Config  # pyright: ignore[reportIncompatibleVariableOverride]
    config_class = U2Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]
    _supports_sdpa = True

    balance_over_padding = False
    """Parity switch: count padding in the balance loss, as the published code does."""

    def __init__(
        self,
        config: U2Config,
        *,
        kernels: str = "auto",
        expert_parallel: ExpertParallel | None = None,
    ) -> None:
        super().__init__(config)
        self.kernels = kernels_for(config, kernels, spread=expert_parallel is not None)
        with no_init_weights():
            self.model = U2Backbone(config, self.kernels, expert_parallel)
            self.lm_head = LossHead(config.hidden_size, config.text_rows or 0)
            if config.num_codebooks is not None:
                self.lm_img_head = nn.ModuleList(
                    LossHead(config.hidden_size, config.image_head_classes) for _ in range(config.num_codebooks)
                )
                self.multi_codebook_head = CodebookHead(config)
        self.set_kernels(kernels)
        self.post_init()

    def init_weights(self) -> None:
        """Called by the base class after construction; does nothing, see `init_weights_`."""

    def init_weights_(self, seed: int, *, writer: Callable[[Tensor, Tensor], None] = write_tensor) -> None:
        """Draw all parameters from `seed`. Collective under ZeRO-3, with equal results on any number of ranks.

        Args:
            writer: fills one parameter with its whole value.
        """
        named = dict(self.named_parameters())
        pad = self.config.pad_token_id
        values = initial_values(
            ((name, full_shape(p)) for name, p in named.items()),
            std=self.config.initializer_range,
            seed=seed,
            pad_row=None if pad is None else ("model.word_embeddings.weight", pad),
        )
        for name, value in values:
            writer(named[name], value)

    def set_kernels(self, choice: str) -> None:
        """Choose kernels after construction.

        Raises:
            ConfigError: unknown name.
        """
        self.kernels = replace(self.kernels, choice=choice)
        for module in self.modules():
            if isinstance(module, (Router, PackedExperts)):
                module.kernels = self.kernels
            elif isinstance(module, LossHead):
                module.impl = choice

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Recompute decoder layers and codebook blocks in backward, without reentrance.

        Args:
            gradient_checkpointing_kwargs: `preserve_rng_state: true` repeats random draws in the recomputation. The
                model itself draws nothing; adapters with dropout do.

        Raises:
            ConfigError: other options, which this model doesn't have.
        """
        options = {"use_reentrant": False, "preserve_rng_state": False, **(gradient_checkpointing_kwargs or {})}
        if len(options) > 2 or options["use_reentrant"]:
            raise ConfigError(
                f"gradient_checkpointing_kwargs — {gradient_checkpointing_kwargs} — layers are checkpointed without "
                "reentrance; the only option is preserve_rng_state — leave the others out"
            )
        self._set_checkpointing(True, keep_random_state=bool(options["preserve_rng_state"]))

    def gradient_checkpointing_disable(self) -> None:
        """Keep activations again."""
        self._set_checkpointing(False)

    def _set_checkpointing(self, enabled: bool, *, keep_random_state: bool = False) -> None:
        self.model.checkpoint_layers = enabled
        self.model.keep_random_state = keep_random_state
        if self.config.has_image:
            self.multi_codebook_head.checkpoint_blocks = enabled
            self.multi_codebook_head.keep_random_state = keep_random_state

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.model.checkpoint_layers

    def get_input_embeddings(self) -> nn.Module:
        return self.model.word_embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,
        *,
        type_ids: Tensor,
        position_ids: Tensor | None = None,
        turn_ids: Tensor | None = None,
        block_ids: Tensor | None = None,
        is_clean: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        valid: Tensor | None = None,
        labels: Tensor | None = None,
        allowed: Tensor | None = None,
        return_logits: bool = False,
    ) -> U2Output:
        """Hidden states, and losses if labels are given.

        Conditional parts (image tables, all heads) run in every call, on a stand-in row of weight 0 if there is no real
        one, so that their collectives and gradients are the same on every rank (T1).

        Args:
            input_ids: [S, C], [B, S, C], or one column [S], [B, S] without media.
            type_ids: [S] or [B, S]; see `lumina_ft.tokens`.
            position_ids: rotary positions; default 0, 1, 2, … in each sample.
            turn_ids, block_ids, is_clean: block-diffusion metadata (spec §3); need cu_seqlens.
            cu_seqlens: [n + 1] sample bounds, shared by all rows; default: each row is one sample.
            valid: False for padding, which attends to nothing and counts nowhere.
            labels: [S, C], [B, S, C], or one column without image supervision; -100 elsewhere.
            allowed: bool [S, S] or [B, S, S], used as it is instead of the rule above.
            return_logits: keep logits and targets of supervised positions.

        Raises:
            DataError: an input breaks a rule, see `models.inputs` and `models.losses`.
        """
        inputs = normalise_inputs(
            self.config,
            input_ids=input_ids,
            type_ids=type_ids,
            position_ids=position_ids,
            turn_ids=turn_ids,
            block_ids=block_ids,
            is_clean=is_clean,
            cu_seqlens=cu_seqlens,
            valid=valid,
        )
        return self._run(inputs, allowed, cu_seqlens is not None, labels, return_logits)

    def _run(
        self, inputs: ModelInputs, allowed: Tensor | None, bounded: bool, labels: Tensor | None, return_logits: bool
    ) -> U2Output:
        embedded = self.model.embed(inputs.input_ids, inputs.is_media)
        plan = plan_attention(
            inputs, kernels=self.kernels, allowed=allowed, bounded=bounded, dtype=embedded.hidden.dtype
        )
        backbone = self.model(embedded.hidden, inputs.position_ids, plan)
        finite = {"embeddings": all_finite(embedded.hidden), "backbone": all_finite(backbone.hidden)}
        if embedded.media is not None:
            finite["embeddings.image"] = all_finite(embedded.media)
        out = U2Output(
            hidden=backbone.hidden,
            router_logits=backbone.router_logits,
            router_topk=backbone.router_topk,
            expert_counts=count_experts(backbone.router_topk, inputs.valid, self.config.num_experts),
            finite=finite,
            attention=plan.name,
        )
        if labels is not None:
            self._add_losses(out, labels, inputs, finite, return_logits)
        return out

    def _add_losses(
        self, out: U2Output, labels: Tensor, inputs: ModelInputs, finite: dict[str, Tensor], return_logits: bool
    ) -> None:
        """Run the heads on supervised rows and fill the loss fields of `out`."""
        assert out.hidden is not None and out.router_logits is not None and out.router_topk is not None
        targets = normalise_labels(labels, inputs, self.config)
        rows = out.hidden.index_select(0, targets.text.rows)
        if return_logits:
            logits = self.text_logits(rows)
            text = loss_of_logits(logits, targets.text_ids)
            out.logits_text = logits[: targets.text.count]
            out.targets_text = targets.text_ids[: targets.text.count]
        else:
            text = _head_loss(self.lm_head, rows, targets.text_ids)
        finite["logits.text"] = text.finite
        losses = {"text": _loss_sum(text, targets.text_ids, targets.text)}
        if self.config.has_image:
            states = self.image_states(out.hidden.index_select(0, targets.image.rows), targets.image_codes)
            if return_logits:
                logits = self._image_head(states)
                image = loss_of_logits(logits, targets.image_codes)
                out.logits_image = logits[: targets.image.count]
                out.targets_image = targets.image_codes[: targets.image.count]
            else:
                image = self._image_loss(states, targets.image_codes)
            finite["codebook_head"], finite["logits.image"] = all_finite(states), image.finite
            losses["image"] = _loss_sum(image, targets.image_codes, targets.image)
        counted = torch.ones_like(inputs.valid) if self.balance_over_padding else inputs.valid
        losses["balance"] = balance_loss(out.router_logits, out.router_topk, counted)
        out.losses = losses

    def embed(self, input_ids: Tensor, type_ids: Tensor) -> Tensor:
        """Input embeddings. input_ids: [S, C] or [S]; type_ids: [S]. Returns [S, H].

        Raises:
            DataError: see `forward`.
        """
        inputs = normalise_inputs(
            self.config,
            input_ids=input_ids,
            type_ids=type_ids,
            position_ids=None,
            turn_ids=None,
            block_ids=None,
            is_clean=None,
            cu_seqlens=None,
            valid=None,
        )
        return self.model.embed(inputs.input_ids, inputs.is_media).hidden

    def text_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [m, H] states of text positions -> [m, V]. No shift: the state at i predicts token i."""
        return self.lm_head(hidden)

    def image_states(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """States of the codebook head, teacher-forced. hidden: [n, H]; codes: [n, C] int64. Returns [n, C, H]."""
        return self.multi_codebook_head(hidden, self.model.code_embeddings(codes[:, :-1]))

    def image_logits(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """Logits of all codebooks, teacher-forced. hidden: [n, H]; codes: [n, C] int64. Returns [n, C, K]."""
        return self._image_head(self.image_states(hidden, codes))

    def image_step(self, hidden: Tensor, codes_so_far: Tensor) -> Tensor:
        """Logits of the next codebook. hidden: [n, H]; codes_so_far: [n, c] int64, 0 <= c < C. Returns [n, K]."""
        states = self.multi_codebook_head(hidden, self.model.code_embeddings(codes_so_far))
        return self.lm_img_head[codes_so_far.shape[1]](states[:, -1])

    def _image_head(self, states: Tensor) -> Tensor:
        return torch.stack([head(states[:, k]) for k, head in enumerate(self.lm_img_head)], dim=1)

    def _image_loss(self, states: Tensor, codes: Tensor) -> LinearLoss:
        """Loss of all codebooks. states: [n, C, H]; codes: [n, C] int64."""
        parts = zip(self.lm_img_head, states.unbind(1), codes.unbind(1), strict=True)
        totals, finite = zip(*(_head_loss(*part) for part in parts), strict=True)
        return LinearLoss(torch.stack(totals).sum(), torch.stack(finite).all())

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        directory: str | Path,
        *,
        config: U2Config | None = None,
        dtype: torch.dtype | None = None,
    ) -> "U2ForDiffusion":
        """Load a checkpoint directory of either layout; see `models.weights.load_pretrained`."""
        from lumina_ft.models.weights import load_pretrained

        return load_pretrained(cls, Path(directory), config=config, dtype=dtype)

    def save_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        directory: str | Path,
        *,
        layout: Literal["packed", "split"] = "packed",
        max_shard_bytes: int | None = None,
        source_dir: str | Path | None = None,
    ) -> None:
        """Write a checkpoint directory in either layout; see `models.weights.save_model`."""
        from lumina_ft.models.weights import DEFAULT_SHARD_BYTES, save_model

        save_model(
            self,
            Path(directory),
            layout=layout,
            max_shard_bytes=max_shard_bytes or DEFAULT_SHARD_BYTES,
            source_dir=None if source_dir is None else Path(source_dir),
        )


def _head_loss(head: nn.Module, hidden: Tensor, targets: Tensor) -> LinearLoss:
    """Loss of one head. A head that PEFT itself has adapted knows logits only.

    Args:
        hidden: [m, H]. targets: [m] int64.
    """
    if getattr(head, "computes_loss", False):
        return head(hidden, targets)
    return loss_of_logits(head(hidden), targets)


def _loss_sum(loss: LinearLoss, targets: Tensor, rows: RowSet) -> LossSum:
    """A stand-in row counts 0 but keeps its gradient path.

    Args:
        targets: [m] or [n, C] int64.
    """
    positions = rows.count * (targets.numel() // targets.shape[0])
    return LossSum(loss.total * rows.weight, torch.tensor(positions, device=targets.device))
