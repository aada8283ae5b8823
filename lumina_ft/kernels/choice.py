"""`model.kernels`: which implementation runs attention, routed experts and router, as sizes, dtype and device allow.

A named choice stands for every operation or is refused. `auto` decides for each operation and says once what it chose.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lumina_ft.errors import ConfigError
from lumina_ft.kernels.attention.tiled import tiled_unsupported_reason
from lumina_ft.kernels.launch import unavailable_reason
from lumina_ft.kernels.moe.fused import fused_experts, fused_mlp, fused_unsupported_reason
from lumina_ft.kernels.moe.grouped import grouped_experts, grouped_mlp
from lumina_ft.kernels.moe.products import unsupported_reason
from lumina_ft.kernels.moe.ref import expert_buckets, expert_loop
from lumina_ft.kernels.moe.weights import Experts
from lumina_ft.kernels.router.fused import fused_route, router_unsupported_reason
from lumina_ft.kernels.router.ref import Routing, route

logger = logging.getLogger(__name__)

CHOICES = ("auto", "triton", "torch", "eager")

_OPERATIONS = ("attention", "experts", "router")
_ELSEWHERE = "the reference loop needs every expert on its rank"

ExpertsFunction = Callable[[Tensor, Experts, Tensor, Tensor, Tensor | None], Tensor]
"""(x [T, H], experts, topk_idx [T, K], topk_weight [T, K], dropout keys [T, K] or None) -> [T, H]."""

RowsFunction = Callable[[Tensor, Experts, Tensor, Tensor, Tensor | None], Tensor]
"""(rows [N, H] by expert, experts, row weight [N, 1], offsets [E], dropout keys [N, 1] or None) -> [N, H]."""

RouteFunction = Callable[..., Routing]
"""As `router.ref.route`."""

AttentionName = Literal["tiled", "segmented", "dense"]


def eager_experts(
    x: Tensor, experts: Experts, topk_idx: Tensor, topk_weight: Tensor, keys: Tensor | None = None
) -> Tensor:
    """The reference on stacked weights: the loop when gradients are recorded, buckets otherwise."""
    run = expert_loop if torch.is_grad_enabled() else expert_buckets
    return run(x, experts.unbind(), topk_idx, topk_weight, keys)


class Operations(NamedTuple):
    """What a choice stands for on one device.

    Attributes:
        attention: kind of plan that `attend` gets.
        experts: routed experts that are all here.
        rows: rows that have come to the experts of this rank; the reference has no such form.
        route: the router.
    """

    attention: AttentionName
    experts: ExpertsFunction
    rows: RowsFunction | None
    route: RouteFunction


@dataclass(frozen=True)
class Kernels:
    """The choice of a model, and what the model asks of its kernels.

    Attributes:
        choice: one of CHOICES.
        hidden_size: H. expert_size: I.
        num_experts: E; 0 without routed experts.
        head_dim: D of the attention. heads_per_key: query heads of one key head.
        spread: ranks share the routed experts, which the reference can't follow.

    Raises:
        ConfigError: an unknown choice.
    """

    choice: str
    hidden_size: int
    expert_size: int
    num_experts: int
    head_dim: int
    heads_per_key: int = 1
    spread: bool = False

    def __post_init__(self) -> None:
        if self.choice not in CHOICES:
            raise ConfigError(f"model.kernels — {self.choice!r} — must be one of {', '.join(CHOICES)} — use auto")

    @property
    def strict(self) -> bool:
        """Whether inputs that only the reference can serve are refused (T7)."""
        return self.choice in ("triton", "torch")

    def on(self, device: torch.device, dtype: torch.dtype) -> Operations:
        """The functions to call with tensors of this dtype on this device.

        Raises:
            ConfigError: see `check`.
        """
        return _resolve(self, device, dtype)

    def check(self, device: torch.device | None, dtype: torch.dtype) -> None:
        """Find out whether the choice can run, without saying anything.

        Args:
            device: None: some GPU.
            dtype: of weights and activations.

        Raises:
            ConfigError: an operation has no implementation for these sizes, this dtype or this device.
        """
        self._select(device, dtype)

    def _select(self, device: torch.device | None, dtype: torch.dtype) -> dict[str, tuple[str, str]]:
        """Operation -> implementation, and why a preferred one can't run."""
        refused = {name: self._refused(name, device, dtype) for name in CHOICES[1:]}
        if self.choice == "auto":
            on_gpu = device is None or device.type == "cuda"
            preferred = CHOICES[1:] if on_gpu else CHOICES[2:]
            return {operation: _first(operation, preferred, refused) for operation in _OPERATIONS}
        own = refused[self.choice]
        if own:
            others = [name for name in CHOICES[1:] if name != self.choice and not refused[name]]
            # The reference can run anything that isn't spread.
            fix = f"use auto or {others[0]}" if others else "use auto and parallel.expert_parallel_size: 1"
            if self.choice == "eager":
                fix += ", or parallel.expert_parallel_size: 1"
            raise ConfigError(f"model.kernels — {self.choice} — {next(iter(own.values()))} — {fix}")
        return dict.fromkeys(_OPERATIONS, (self.choice, ""))

    def _refused(self, name: str, device: torch.device | None, dtype: torch.dtype) -> dict[str, str]:
        """Operation -> why an implementation can't run it; the others are missing."""
        reasons: dict[str, str | None] = {}
        if name == "triton":
            nowhere = None if device is None else unavailable_reason(device, dtype)
            reasons = {
                "attention": nowhere or tiled_unsupported_reason(self.head_dim, dtype),
                "experts": nowhere
                or fused_unsupported_reason(self.hidden_size, self.expert_size, dtype, self.num_experts),
                "router": nowhere or router_unsupported_reason(self.num_experts),
            }
        elif name == "torch":
            reasons["experts"] = unsupported_reason(self.hidden_size, self.expert_size, dtype)
        elif self.spread:
            reasons["experts"] = _ELSEWHERE
        needed = _OPERATIONS if self.num_experts else ("attention",)
        return {operation: reason for operation in needed if (reason := reasons.get(operation)) is not None}


def log_choice(text: str) -> None:
    """Say what `auto` chose, each thing once in a process."""
    _log_once(f"kernels=auto chose {text}")


@lru_cache(maxsize=64)
def _log_once(message: str) -> None:
    logger.info(message)


_ATTENTION: dict[str, AttentionName] = {"triton": "tiled", "torch": "segmented", "eager": "dense"}
_EXPERTS: dict[str, ExpertsFunction] = {"triton": fused_experts, "torch": grouped_experts, "eager": eager_experts}
_ROWS: dict[str, RowsFunction] = {"triton": fused_mlp, "torch": grouped_mlp}
_ROUTE: dict[str, RouteFunction] = {"triton": fused_route, "torch": route, "eager": route}


@lru_cache(maxsize=64)
def _resolve(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> Operations:
    chosen = kernels._select(device, dtype)
    if kernels.choice == "auto":
        log_choice(_described(chosen))
    attention, experts, router = (chosen[operation][0] for operation in _OPERATIONS)
    return Operations(_ATTENTION[attention], _EXPERTS[experts], _ROWS.get(experts), _ROUTE[router])


def _first(operation: str, names: tuple[str, ...], refused: dict[str, dict[str, str]]) -> tuple[str, str]:
    """The first implementation of an operation that can run, and why those before it can't."""
    reasons: list[str] = []
    for name in names:
        if operation not in refused[name]:
            return name, ", ".join(reasons)
        reasons.append(refused[name][operation])
    reason = ", and ".join(reasons)
    raise ConfigError(f"model.kernels — auto — {reason} — use parallel.expert_parallel_size: 1, or another model.dtype")


def _described(chosen: dict[str, tuple[str, str]]) -> str:
    """One clause per implementation and reason; operations are named where they differ."""
    groups: dict[tuple[str, str], list[str]] = {}
    for operation, picked in chosen.items():
        groups.setdefault(picked, []).append(operation)
    clauses = (
        name + (f" for {' and '.join(operations)}" if len(groups) > 1 else "") + (f" ({reason})" if reason else "")
        for (name, reason), operations in groups.items()
    )
    return ", ".join(clauses)
