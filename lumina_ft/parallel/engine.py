"""The training engine: the only place that calls `deepspeed.initialize` and knows DeepSpeed's optimizer classes."""

import io
import logging
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from lumina_ft.errors import ConfigError, nearest
from lumina_ft.parallel.expert_parallel import allow_experts_alone, announced
from lumina_ft.parallel.state import local_decay, zero_gradient_params
from lumina_ft.parallel.zero3 import gather_for_good

log = logging.getLogger(__name__)


def check_zero_block(ds_config: Mapping[str, Any]) -> None:
    """Let DeepSpeed check names and types inside `zero_optimization`, before anything is built with them.

    Raises:
        ConfigError: one line per key that it refuses.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    known = [field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()]
    try:
        DeepSpeedZeroConfig(**ds_config["zero_optimization"])
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            key = ".".join(map(str, problem["loc"]))
            rule = problem["msg"]
            if problem["type"] == "extra_forbidden":
                rule = f"unknown key{nearest(key, known)}"
            lines.append(f"parallel.zero: zero_optimization.{key} — {problem['input']!r} — {rule} — fix the file")
        raise ConfigError("\n".join(lines)) from None


@dataclass(frozen=True)
class StepOutcome:
    """What an optimizer step did.

    Attributes:
        grad_norm: global L2 norm before clipping; inf where it isn't finite.
        applied: False if DeepSpeed refused the step because of a non-finite gradient. All ranks agree.
    """

    grad_norm: float
    applied: bool


class Engine:
    """Forward, backward and step of one stage.

    One call of `step` per optimizer step; the caller says which micro-batch is the last one. Losses must already be
    divided by the step's global counts and multiplied by the number of ranks: gradients are averaged over ranks.

    Attributes:
        module: what was passed in; parameters are partitioned under ZeRO-3.
        zero_stage: 0…3.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        ds_config: dict[str, Any],
        *,
        decay_unused: bool = True,
    ) -> None:
        import deepspeed

        self.zero_stage: int = ds_config["zero_optimization"]["stage"]
        self._decay_unused = decay_unused
        # Some of DeepSpeed's wrappers take a step with zero gradients to create the optimizer's state: with a learning
        # rate it would decay the weights, and it counts as the first of Adam's bias-corrected steps.
        self._members = {group["label"]: list(group["params"]) for group in optimizer.param_groups}
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        _import_muon_uncompiled()
        trained = [param for members in self._members.values() for param in members]
        # One of its optimizers prints its memory use on stdout, which belongs to results.
        stdout = redirect_stdout(sys.stderr if log.isEnabledFor(logging.DEBUG) else io.StringIO())
        with stdout, announced(module, trained if self.zero_stage < 3 else ()):
            self._engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=ds_config)
        allow_experts_alone(self._engine.optimizer)
        optimizer.state.clear()
        self.module = module
        self.optimizer = optimizer
        self._whole = self._drop_idle_hooks()

    @property
    def ds_optimizer(self) -> Any:
        """DeepSpeed's optimizer wrapper (the plain optimizer at ZeRO-0 in fp32)."""
        return self._engine.optimizer

    def __call__(self, **inputs: Any) -> Any:
        return self._engine(**inputs)

    def train(self, mode: bool = True) -> None:
        """Switch between training and evaluation."""
        self._engine.train(mode)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate gradients.

        Args:
            loss: 0-dim, see the class.
            last: the step's last micro-batch; gradients are complete on return.
        """
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self, lrs: Mapping[str, float]) -> StepOutcome:
        """Clip and update; or, with a non-finite gradient, drop the gradients and change nothing.

        Args:
            lrs: learning rate of each parameter group, by its `label`.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lrs[group["label"]]
        norm = self._plain_norm() if self._plain else None
        if norm is not None and not bool(torch.isfinite(norm)):
            self._engine.zero_grad()
            return StepOutcome(float("inf"), applied=False)
        decayed = [] if self._decay_unused else self._take_over_decay()
        self._engine.step()
        for group, weight_decay in decayed:
            group["weight_decay"] = weight_decay
        if self._whole:
            # A refused step returns before it gathers again what it has partitioned.
            gather_for_good(self.module.parameters())
        if norm is not None:
            return StepOutcome(float(norm), applied=True)
        reported: Any = self._engine.get_global_grad_norm()
        return StepOutcome(float(reported), applied=bool(self._engine.was_step_applied()))

    def discard(self) -> None:
        """Drop the gradients that earlier micro-batches of the step have left."""
        wrapper = self.ds_optimizer
        if self.zero_stage == 0:
            self._engine.zero_grad()
            return
        wrapper.zero_grad()
        if getattr(wrapper, "cpu_offload", False):
            wrapper.reset_cpu_buffers()
            wrapper.micro_step_id = -1  # the next micro-batch overwrites what is accumulated there
        if self.zero_stage in (1, 2) and hasattr(wrapper, "averaged_gradients"):
            wrapper._release_preflattened_grad_buffers()
            for kept in (wrapper.averaged_gradients, wrapper.all_grad_tensors):
                kept.update(dict.fromkeys(kept))

    def close(self) -> None:
        """Remove DeepSpeed's hooks and buffers from the module."""
        self._engine.destroy()

    @property
    def _plain(self) -> bool:
        """ZeRO-0 in fp32: gradients sit on the parameters and DeepSpeed reports no norm."""
        return self.ds_optimizer is self.optimizer

    def _drop_idle_hooks(self) -> bool:
        """Take ZeRO-3's hooks off a model none of whose parameters is large enough to be partitioned between steps.

        The hooks of each module would look in every pass for weights to gather and find none: a third of a step's time
        on a small model. Optimizer state and gradients stay partitioned.

        Returns:
            Whether the parameters stay whole.
        """
        if self.zero_stage != 3:
            return False
        if len(self.ds_optimizer.persistent_parameters) < sum(1 for _ in self.module.parameters()):
            return False
        self.ds_optimizer.parameter_offload._remove_module_hooks()
        gather_for_good(self.module.parameters())
        return True

    def _plain_norm(self) -> Tensor:
        grads = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        return torch.nn.utils.get_total_norm(grads)

    def _take_over_decay(self) -> list[tuple[dict[str, Any], float]]:
        """Decay the weights that have a gradient, and keep AdamW from decaying the others in this step.

        AdamW's decay is a factor applied to the weight before an update that doesn't depend on the weight.
        """
        idle, finite = zero_gradient_params(self, [p for members in self._members.values() for p in members])
        if not finite:
            return []
        taken = []
        for group in self.optimizer.param_groups:
            factor = 1.0 - group["lr"] * group["weight_decay"]
            taken.append((group, group["weight_decay"]))
            if group["weight_decay"]:
                local_decay(self, [p for p in self._members[group["label"]] if id(p) not in idle], factor)
                group["weight_decay"] = 0.0
        return taken


def _import_muon_uncompiled() -> None:
    """Import an optimizer that DeepSpeed always imports and that nothing here uses.

    Its decorators load torch's whole compiler, 1.5 s of each rank's start, unless `compile` does nothing meanwhile.
    """
    import deepspeed.runtime.compiler

    with patch.object(deepspeed.runtime.compiler, "compile", lambda **_: lambda function: function):
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
