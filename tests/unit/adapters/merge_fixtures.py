"""A small base model and adapters for it, written as files by hand."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from small_u2 import small_config

from lumina_ft.models.identity import model_identity
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.models.weights import save_model

DENSE = "model.layers.0.attention.dense"
QKV = "model.layers.1.attention.query_key_value"
SHARED = "model.layers.1.mlp.shared_experts.down_proj"
HEAD = "lm_img_head.0"
TARGETS = (DENSE, QKV, SHARED)
EXPERTS = "model.layers.1.mlp.experts"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
NUM_EXPERTS = 4
BIAS = "model.layers.1.mlp.gate.expert_bias"


def tiny_config() -> U2Config:
    return small_config(num_hidden_layers=2)


def tiny_model(dtype: torch.dtype = torch.float32, *, seed: int = 3) -> U2ForDiffusion:
    model = U2ForDiffusion(tiny_config())
    model.init_weights_(seed=seed)
    model.get_buffer(BIAS).copy_(torch.arange(4.0) / 3)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def write_base(directory: Path, dtype: torch.dtype = torch.float32, *, layout="packed", seed: int = 3) -> Path:
    """A base with code, tokenizer and licence files, as published checkpoints have."""
    model = tiny_model(dtype, seed=seed)
    save_model(model, directory, layout=layout)
    config = json.loads((directory / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_x.Model"}
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("modeling_x.py", "tokenizer.json", "tokenizer_config.json", "LICENSE"):
        (directory / name).write_text(f"base {name}")
    return directory


def write_adapter(
    directory: Path,
    base: Path | None,
    *,
    targets: Sequence[str] = TARGETS,
    rank: int = 4,
    alpha: float = 10.0,
    b_std: float = 0.1,
    seed: int = 0,
    dora: bool = False,
    rslora: bool = False,
    whole: Mapping[str, torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    experts: Sequence[str] = (),
) -> Path:
    """A plain PEFT directory.

    Args:
        base: its hashes are stored; None: as other tools write it.
        experts: projections of layer 1's routed experts that are adapted too.
    """
    state, draw = tiny_model().state_dict(), torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for module in targets:
        weight = state[f"{module}.weight"]
        prefix = f"base_model.model.{module}.lora_"
        tensors[f"{prefix}A.weight"] = torch.randn(rank, weight.shape[1], generator=draw)
        tensors[f"{prefix}B.weight"] = torch.randn(weight.shape[0], rank, generator=draw) * b_std
        if dora:
            norms = weight.norm(dim=1) * (1 + 0.1 * torch.rand(weight.shape[0], generator=draw))
            tensors[f"{prefix}magnitude_vector"] = norms
    tensors |= _expert_tensors(experts, rank, b_std, draw)
    for name, value in (whole or {}).items():
        tensors[f"base_model.model.{name}"] = value
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": rslora,
        "use_dora": dora,
        "target_modules": list(targets),
        "modules_to_save": sorted({name.rsplit(".", 1)[0] for name in whole or {}}) or None,
        "bias": "none",
        "base_model_name_or_path": str(base),
        "target_parameters": [f"{EXPERTS}.{projection}" for projection in experts] or None,
    }
    metadata = {"format": "pt"}
    if base is not None:
        identity = model_identity(base)
        metadata |= {"lumina_ft.base": identity.digest, "lumina_ft.base_tensors": json.dumps(identity.tensors)}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file({k: v.to(dtype) for k, v in tensors.items()}, directory / "adapter_model.safetensors", metadata)
    return directory


def _expert_tensors(
    projections: Sequence[str], rank: int, b_std: float, draw: torch.Generator
) -> dict[str, torch.Tensor]:
    """PEFT's layout, place by place; see `expert_keys`."""
    tensors: dict[str, torch.Tensor] = {}
    for projection in projections:
        outputs, inputs = tiny_model().get_parameter(f"{EXPERTS}.{projection}").shape[1:]
        a, b = torch.empty(NUM_EXPERTS * rank, inputs), torch.empty(outputs, rank * NUM_EXPERTS)
        for expert in range(NUM_EXPERTS):
            for k in range(rank):
                a[expert * rank + k] = torch.randn(inputs, generator=draw)
                b[:, k * NUM_EXPERTS + expert] = torch.randn(outputs, generator=draw) * b_std
        keys = expert_keys(projections, projection)
        tensors |= {keys[0]: a, keys[1]: b}
    return tensors


def expert_keys(adapted: Sequence[str], projection: str) -> tuple[str, str]:
    """Keys of A and B. PEFT wraps the adapted parameters in the model's order, each around the ones before."""
    around = [p for p in PROJECTIONS if p in adapted and PROJECTIONS.index(p) > PROJECTIONS.index(projection)]
    prefix = f"base_model.model.{EXPERTS}{'.base_layer' * len(around)}.lora_"
    return f"{prefix}A.weight", f"{prefix}B.weight"


def edit_adapter(directory: Path, changes: Mapping[str, torch.Tensor]) -> None:
    """Replace tensors of an adapter, keeping its metadata."""
    from safetensors import safe_open

    path = directory / "adapter_model.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file({**load_file(path), **changes}, path, metadata)


def plain_merge(weight: torch.Tensor, adapter: Path, module: str, *, rslora: bool = False) -> torch.Tensor:
    """W + scale B A in float64, straight from the files."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if rslora else config["r"])
    if not module.startswith(EXPERTS):
        a, b = (tensors[f"base_model.model.{module}.lora_{part}.weight"].double() for part in "AB")
        return weight.double() + scale * (b @ a)
    adapted = [name.rpartition(".")[2] for name in config["target_parameters"]]
    a, b = (tensors[key].double() for key in expert_keys(adapted, module.rpartition(".")[2]))
    merged = weight.double()
    for expert in range(NUM_EXPERTS):
        for k in range(config["r"]):
            column, row = b[:, k * NUM_EXPERTS + expert], a[expert * config["r"] + k]
            merged[expert] += scale * torch.outer(column, row)
    return merged
