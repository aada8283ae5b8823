"""Feed-forward parts of a decoder layer: dense MLP, router, routed and shared experts (spec §1, M1-M7).

Shape legend: T tokens, H hidden, I expert width, E experts, K chosen experts per token.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lumina_ft.kernels import Kernels, Routing
from lumina_ft.models.experts import PackedExperts
from lumina_ft.models.u2_config import U2Config
from lumina_ft.parallel.expert_parallel import ExpertParallel


def keep_dtype(module: nn.Module, name: str, before: Tensor) -> None:
    """Give a buffer its dtype and bits back after `Module.to`; only the move to another device stays.

    Args:
        name: a buffer of `module`. before: its tensor before the call.
    """
    after = getattr(module, name)
    if after.dtype == before.dtype:
        return
    # A meta tensor has no bits to move.
    kept = torch.empty_like(before, device=after.device) if before.is_meta else before.to(after.device)
    setattr(module, name, kept)


class MLP(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Chooses experts in float32, whatever the dtype of the model.

    `expert_bias` is added to the scores for the selection only. It stays float32 when the module is cast: in bfloat16
    near ties between experts would be decided by rounding.
    """

    expert_bias: Tensor

    def __init__(self, config: U2Config, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts, dtype=torch.float32))
        self.use_bias = config.moe_router_enable_expert_bias
        self.num_groups = config.n_group
        self.kept_groups = config.topk_group
        self.top_k = config.num_experts_per_tok
        self.scaling = config.routed_scaling_factor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        before = self.expert_bias
        super()._apply(fn, recurse)
        keep_dtype(self, "expert_bias", before)
        return self

    def forward(self, x: Tensor) -> Routing:
        """x: [T, H]."""
        return self.kernels.on(x.device, x.dtype).route(
            x,
            self.weight,
            self.expert_bias if self.use_bias else None,
            num_groups=self.num_groups,
            kept_groups=self.kept_groups,
            top_k=self.top_k,
            scaling=self.scaling,
        )


class MoEBlock(nn.Module):
    """Routed experts plus the always-on shared expert."""

    def __init__(self, config: U2Config, kernels: Kernels, expert_parallel: ExpertParallel | None) -> None:
        super().__init__()
        self.gate = Router(config, kernels)
        self.experts = PackedExperts(config, kernels, expert_parallel)
        if config.num_shared_experts is None:
            self.shared_experts = None
        else:
            self.shared_experts = MLP(config.hidden_size, config.moe_intermediate_size * config.num_shared_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [T, H] -> (output [T, H], router logits [T, E] float32, chosen experts [T, K] int64)."""
        routing = self.gate(x)
        out = self.experts(x, routing.topk_idx, routing.topk_weight)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        return out, routing.logits, routing.topk_idx
