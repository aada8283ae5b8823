"""The DeepSpeed JSON of a run: read, checked against the run's own keys, every "auto" filled.

Pure dictionaries: nothing here imports DeepSpeed or torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lumina_ft.errors import ConfigError, nearest

_PACKAGED = Path(__file__).resolve().parent.parent / "ds_configs"
_CHECKOUT = Path(__file__).resolve().parent.parent.parent / "ds_configs"

_PASSED_THROUGH = frozenset(
    {
        "zero_optimization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "communication_data_type",
        "data_types",
        "prescale_gradients",
        "gradient_predivide_factor",
        "comms_logger",
        "wall_clock_breakdown",
        "memory_breakdown",
        "flops_profiler",
        "dump_state",
        "disable_python_gc",
        "aio",
        "steps_per_print",
    }
)
_OWN_KEY = {
    "optimizer": "optim.*",
    "scheduler": "optim.schedule and optim.warmup_ratio",
    "fp16": "model.dtype (float32 or bfloat16)",
    "amp": "model.dtype",
    "torch_autocast": "model.dtype",
    "tensorboard": "train.tensorboard",
    "activation_checkpointing": "model.gradient_checkpointing",
}
"""Blocks of DeepSpeed's JSON that would contradict the run configuration, and where to say it instead."""

PERSISTENCE_NUMEL = 1_000_000
"""Auto value of stage3_param_persistence_threshold. Norms, routers and biases of the 16.9B model lie below it (12M
parameters together); gathering those one by one costs more than keeping them whole."""
_BUCKET_NUMEL = 200_000_000
_PREFETCH_NUMEL = 50_000_000


@dataclass(frozen=True)
class ZeroSettings:
    """What the auto values depend on.

    Attributes:
        micro_batches: forward passes of one rank in one optimizer step.
        trainable_numel: elements that get gradients; no reduction bucket needs to be larger.
        overlap: communicate during backward; pointless on the CPU, which does both itself.
        expert_parallel_size: ranks that share the routed experts among them.
    """

    world_size: int
    micro_batches: int
    dtype: Literal["float32", "bfloat16"]
    max_grad_norm: float
    trainable_numel: int
    overlap: bool
    expert_parallel_size: int = 1


def read_ds_config(zero: str) -> dict[str, Any]:
    """Read a preset (`zero0`…`zero3`) or a JSON file.

    Raises:
        ConfigError: no such preset or file, or not a JSON object.
    """
    folder = _CHECKOUT if _CHECKOUT.is_dir() else _PACKAGED
    presets = {path.stem: path for path in sorted(folder.glob("*.json"))}
    path = presets.get(zero, Path(zero))
    if not path.is_file():
        raise ConfigError(
            f"parallel.zero — {zero!r} — must be one of {', '.join(presets)} or an existing DeepSpeed JSON file"
            f"{nearest(zero, presets)} — fix the name"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise ConfigError(f"parallel.zero — {path}: {err} — must be readable JSON — fix the file") from err
    if not isinstance(raw, dict):
        raise ConfigError(f"parallel.zero — {path}: {type(raw).__name__} — must be a JSON object — fix the file")
    return raw


def zero_stage(raw: Mapping[str, Any]) -> int:
    """ZeRO stage of a DeepSpeed JSON.

    Raises:
        ConfigError: not 0, 1, 2 or 3.
    """
    block = raw.get("zero_optimization", {})
    stage = block.get("stage", 0) if isinstance(block, Mapping) else None
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise ConfigError(f"parallel.zero: zero_optimization.stage — {stage!r} — must be 0, 1, 2 or 3 — fix the file")
    return stage


def resolve_ds_config(raw: Mapping[str, Any], settings: ZeroSettings) -> dict[str, Any]:
    """Fill every "auto", add what the run configuration owns, refuse what contradicts it.

    Raises:
        ConfigError: an unknown or contradicting block, one that can't work, alone or with expert parallelism, or an
            "auto" without a rule.
    """
    owned = _owned_values(settings)
    _refuse_conflicts(raw, owned)
    stage = zero_stage(raw)
    if settings.expert_parallel_size > 1 and (problems := expert_parallel_problems(raw)):
        raise ConfigError("\n".join(problems))
    if stage in (1, 2) and raw["zero_optimization"].get("round_robin_gradients"):
        raise ConfigError(
            "parallel.zero: zero_optimization.round_robin_gradients — True — DeepSpeed then mistakes which part of the "
            "optimizer's state belongs to which parameter, and checkpoints would mix them up — remove it"
        )
    config: dict[str, Any] = {key: value for key, value in raw.items() if key in _PASSED_THROUGH}
    config |= owned
    config["zero_optimization"] = _fill_zero(dict(raw.get("zero_optimization", {})), stage, settings)
    # Our steps are numbered and printed by the loop; DeepSpeed's own line would come on every rank's stdout.
    config.setdefault("steps_per_print", 1_000_000_000)
    if settings.dtype == "bfloat16":
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
        if stage == 1:
            # Without it this optimizer adds the sum of all earlier micro-batches again with every backward pass.
            config["bf16"]["immediate_grad_update"] = True
        if stage > 0:
            config.setdefault("data_types", {"grad_accum_dtype": "fp32"})
    if "offload_optimizer" in config["zero_optimization"]:
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    for path, value in _leaves(config):
        if value == "auto":
            raise ConfigError(f"parallel.zero: {path} — 'auto' — this key has no automatic value — give a number")
    return config


def expert_parallel_problems(raw: Mapping[str, Any]) -> list[str]:
    """What in a DeepSpeed JSON can't work, or would train the experts wrongly, where ranks share the experts.

    Returns:
        One message per key, ready for a ConfigError.

    Raises:
        ConfigError: the stage isn't one.
    """
    stage = zero_stage(raw)
    if stage == 0:
        return [
            "parallel.expert_parallel_size — above 1 with ZeRO-0 — its gradients are averaged over all ranks, which "
            "hold different experts — set parallel.zero to zero1, zero2 or zero3"
        ]
    return [
        f"parallel.zero: {key} — {value!r} — can't be combined with parallel.expert_parallel_size: {reason} — "
        "remove it, or set parallel.expert_parallel_size=1"
        for key, value, wrong, reason in _expert_rules(raw, stage)
        if wrong
    ]


def _expert_rules(raw: Mapping[str, Any], stage: int) -> list[tuple[str, Any, bool, str]]:
    """(key, value, whether it excludes shared experts, reason)."""
    block = raw.get("zero_optimization", {})
    lost = "gradients of experts would be averaged over all ranks, which hold different experts"
    unproven = "nothing proves yet that experts are trained rightly with it"
    offload = block.get("offload_optimizer")
    super_offload = offload.get("super_offload") if isinstance(offload, Mapping) else None
    predivide = raw.get("gradient_predivide_factor", 1)
    prescale = raw.get("prescale_gradients", False)
    rules: list[tuple[str, Any, bool, str]] = [
        ("zero_optimization.zenflow", block.get("zenflow"), "zenflow" in block, "ZenFlow doesn't know of experts"),
        (
            "zero_optimization.offload_optimizer.super_offload",
            super_offload,
            bool(super_offload),
            "SuperOffload doesn't know of experts",
        ),
        (
            "gradient_predivide_factor",
            predivide,
            predivide != 1,
            "experts are averaged in other groups than the rest, and DeepSpeed undoes the factor in some of them only",
        ),
        ("prescale_gradients", prescale, bool(prescale), unproven),
    ]
    for target in ("offload_optimizer", "offload_param"):
        device = block[target].get("device") if isinstance(block.get(target), Mapping) else None
        rules.append((f"zero_optimization.{target}.device", device, device == "nvme", unproven))
    if stage == 3:
        secondary = block.get("zero_hpz_partition_size", 1)
        quantized = {key: block.get(key, False) for key in ("zero_quantized_gradients", "zero_quantized_weights")}
        rules += [
            ("zero_optimization.zero_hpz_partition_size", secondary, secondary != 1, "hpZ ignores the experts' groups"),
            *((f"zero_optimization.{k}", v, bool(v), lost if "grad" in k else unproven) for k, v in quantized.items()),
        ]
    else:
        for key in ("reduce_scatter", "contiguous_gradients", "use_multi_rank_bucket_allreduce"):
            value = block.get(key, True)
            rules.append((f"zero_optimization.{key}", value, value is False, unproven if "multi" in key else lost))
    return rules


def _owned_values(settings: ZeroSettings) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": settings.micro_batches,
        "train_batch_size": settings.micro_batches * settings.world_size,
        "gradient_clipping": settings.max_grad_norm,
    }


def _refuse_conflicts(raw: Mapping[str, Any], owned: Mapping[str, Any]) -> None:
    source = {
        "train_micro_batch_size_per_gpu": "one pack is one micro-batch",
        "gradient_accumulation_steps": "train.packs_per_step divided by the ranks",
        "train_batch_size": "train.packs_per_step",
        "gradient_clipping": "optim.max_grad_norm",
    }
    for key, value in raw.items():
        if key in _OWN_KEY:
            raise ConfigError(
                f"parallel.zero: {key} — block present — the run configuration decides this — "
                f"remove the block and set {_OWN_KEY[key]}"
            )
        if key == "bf16":
            raise ConfigError("parallel.zero: bf16 — block present — model.dtype decides this — remove the block")
        if key in owned:
            if value not in ("auto", owned[key]):
                raise ConfigError(
                    f"parallel.zero: {key} — {value!r} — must be {owned[key]!r} ({source[key]}) — "
                    "remove it or say 'auto'"
                )
        elif key not in _PASSED_THROUGH:
            known = [*_PASSED_THROUGH, *owned]
            raise ConfigError(
                f"parallel.zero: {key} — not supported{nearest(key, known)} — known: {', '.join(sorted(known))} — "
                "remove it"
            )


def _fill_zero(block: dict[str, Any], stage: int, settings: ZeroSettings) -> dict[str, Any]:
    bucket = max(1, min(_BUCKET_NUMEL, settings.trainable_numel))
    auto: dict[str, Any] = {"overlap_comm": settings.overlap, "reduce_bucket_size": bucket}
    if stage in (1, 2):
        # DeepSpeed wants this one even, and at least one element per rank and alignment unit.
        auto["allgather_bucket_size"] = 2 * max(bucket, 1000)
    if stage == 3:
        auto |= {
            "stage3_prefetch_bucket_size": min(_PREFETCH_NUMEL, bucket) if settings.overlap else 0,
            "stage3_param_persistence_threshold": PERSISTENCE_NUMEL,
        }
        # DeepSpeed's memory-saving linear replaces torch.nn.functional.linear for the whole process. Without it,
        # autograd keeps gathered weights outside recomputed layers until backward; `lumina-ft plan` counts them.
        block.setdefault("memory_efficient_linear", False)
    for key, value in auto.items():
        if block.get(key, "auto") == "auto":
            block[key] = value
    block["stage"] = stage
    return block


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [leaf for key, item in value.items() for leaf in _leaves(item, f"{path}.{key}" if path else str(key))]
    return [(path, value)]
