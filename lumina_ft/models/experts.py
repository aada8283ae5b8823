"""Routed experts of a layer: all of them, or this rank's share of them (M5).

Shape legend: T tokens, H hidden, I expert width, E experts of the layer, L experts held here, K chosen experts per
token, N = T * K sorted rows, R rows received for the experts held here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lumina_ft.errors import ConfigError
from lumina_ft.kernels import (
    Experts,
    Kernels,
    Lora,
    Projection,
    RowsFunction,
    combine,
    dispatch,
    draw_key,
    permute,
    plan_experts,
    row_keys,
    sort_slots,
)
from lumina_ft.models.u2_config import U2Config
from lumina_ft.parallel.expert_parallel import ExpertParallel, exchange_counts, exchange_rows, share_experts

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ExpertLora:
    """How a projection's adapter is used: scale B A drop(x), drop with probability `dropout` in training.

    Attributes:
        rank: columns of B.
        scale: factor of B A.
        dropout: probability with which an input of A is dropped.
    """

    rank: int
    scale: float
    dropout: float


class PackedExperts(nn.Module):
    """Routed experts in three 3-D parameters; index e of dim 0 is the e-th expert held here.

    A projection's adapter is two more parameters of this module, `<projection>_lora_A` [L, r, in] and
    `<projection>_lora_B` [L, out, r]: ZeRO-3 gathers what a module holds itself.

    Attributes:
        lora: adapters by projection.

    Args:
        kernels: how they run.
        expert_parallel: ranks that share the layer's experts; None: all are here.

    Raises:
        ConfigError: the experts can't be shared evenly.
    """

    def __init__(self, config: U2Config, kernels: Kernels, expert_parallel: ExpertParallel | None) -> None:
        super().__init__()
        self.num_experts, self.expert_parallel = config.num_experts, expert_parallel
        self.sizes = (config.hidden_size, config.moe_intermediate_size)
        self.kernels = kernels
        self.lora: dict[str, ExpertLora] = {}
        ranks = 1 if expert_parallel is None else expert_parallel.size
        if self.num_experts % ranks:
            raise ConfigError(
                f"parallel.expert_parallel_size — {ranks} — must divide the {self.num_experts} experts of the model — "
                "use a divisor"
            )
        self.num_held = self.num_experts // ranks
        for projection in PROJECTIONS:
            self._add(projection, nn.Parameter(torch.empty(self.num_held, *self.features(projection))))

    def features(self, projection: str) -> tuple[int, int]:
        """(outputs, inputs) of one expert's projection."""
        hidden, width = self.sizes
        return (hidden, width) if projection == "down_proj" else (width, hidden)

    def add_lora(self, projection: str, *, rank: int, scale: float, dropout: float) -> None:
        """Put an adapter of zeros on a projection of all experts. Must happen before ZeRO takes hold of the layer.

        Args:
            projection: one of `PROJECTIONS`, without an adapter yet.
            rank, scale, dropout: see `ExpertLora`.
        """
        assert projection not in self.lora and rank > 0 and 0.0 <= dropout < 1.0
        weight, (outputs, inputs) = getattr(self, projection), self.features(projection)
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            value = torch.zeros(self.num_held, *shape, dtype=weight.dtype, device=weight.device)
            self._add(f"{projection}_lora_{part}", nn.Parameter(value))
        self.lora[projection] = ExpertLora(rank, scale, dropout)

    def _add(self, name: str, param: nn.Parameter) -> None:
        if self.expert_parallel is not None:
            share_experts(param, self.expert_parallel)
        self.register_parameter(name, param)

    def _weights(self) -> Experts:
        parts = []
        for stream, projection in enumerate(PROJECTIONS):
            lora, settings = None, self.lora.get(projection)
            if settings is not None:
                pair = (getattr(self, f"{projection}_lora_A"), getattr(self, f"{projection}_lora_B"))
                lora = Lora(*pair, settings.scale, settings.dropout, stream)
            parts.append(Projection(getattr(self, projection), lora))
        return Experts(*parts)

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weight: Tensor) -> Tensor:
        """Weighted sum over each token's experts. Collective over the ranks that share them.

        Args:
            x: [T, H]. topk_idx: [T, K] int64, of all experts. topk_weight: [T, K] float32.

        Returns:
            [T, H].
        """
        weights, ranks = self._weights(), self.expert_parallel
        operations = self.kernels.on(x.device, weights.gate.weight.dtype)
        keys = None
        if self.training and any(lora.dropout for lora in self.lora.values()):
            keys = row_keys(draw_key(), topk_idx.shape[0], topk_idx.shape[1], x.device)
        if ranks is None:
            return operations.experts(x, weights, topk_idx, topk_weight, keys)
        assert operations.rows is not None
        return _exchanged(x, weights, topk_idx, topk_weight, keys, ranks, operations.rows)


def _exchanged(
    x: Tensor,
    weights: Experts,
    topk_idx: Tensor,
    topk_weight: Tensor,
    keys: Tensor | None,
    ranks: ExpertParallel,
    run: RowsFunction,
) -> Tensor:
    """The weighted sum, each row computed on the rank that holds its expert.

    Args:
        weights: of the experts held here.
        x, topk_idx, topk_weight, keys: see `choice.ExpertsFunction`.
        run: computes the rows that have arrived.
    """
    held = weights.gate.weight.shape[0]
    plan = plan_experts(topk_idx, held * ranks.size)
    received = exchange_counts(plan.counts, ranks)
    # The one host read: collectives need their sizes there.
    send, receive = torch.stack([plan.counts.view(ranks.size, -1).sum(1), received.sum(1)]).tolist()
    expert = torch.arange(held, device=x.device).repeat(ranks.size)
    expert = expert.repeat_interleave(received.flatten(), output_size=sum(receive))
    local = plan_experts(expert.unsqueeze(1), held)

    def arrive(values: Tensor) -> Tensor:
        """[N, ...] sorted by expert -> [R, ...] sorted by expert held here."""
        return permute(exchange_rows(values, send, receive, ranks), local.order, local.inverse)

    own_keys = None if keys is None else arrive(sort_slots(keys, plan))
    row_weight = arrive(sort_slots(topk_weight, plan))
    out = run(arrive(dispatch(x, plan)), weights, row_weight, local.offsets, own_keys)
    return combine(exchange_rows(permute(out, local.inverse, local.order), receive, send, ranks), plan, x.shape[0])
