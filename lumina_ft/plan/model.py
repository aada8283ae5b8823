"""`lumina-ft plan`: the parameter arithmetic of a model, counted on the meta device (M9)."""

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from lumina_ft.models.groups import group_of, row_sizes
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config

_IMAGE_ROWS = ("image_embeddings", "image_embeddings_proj", "lm_img_head", "multi_codebook_head")
_BYTES_BF16 = 2


def describe_model(source: str | Path) -> dict[str, Any]:
    """Count every parameter of a model without allocating one.

    Args:
        source: `config.json`, its directory, or a shipped name.

    Returns:
        `groups` and `units`: parameters per row of the size table and per freezing unit; `total_parameters` and its
        parts; `per_layer`; `active_per_token`; `persistent_buffers` in elements; `tensors` per checkpoint layout.

    Raises:
        ConfigError: see `U2Config.load`.
    """
    config = U2Config.load(source)
    with torch.device("meta"):
        model = U2ForDiffusion(config)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    rows = row_sizes(sizes.items())
    total = sum(sizes.values())
    experts = rows.get("routed_experts", 0)
    image = sum(rows.get(row, 0) for row in _IMAGE_ROWS)
    layers = _numel(model.model.layers)
    chosen = experts * config.num_experts_per_tok // config.num_experts
    active = layers - experts + chosen + _numel(model.model.norm)
    expert_tensors = 3 * config.num_moe_layers
    units: dict[str, int] = {}
    for name, size in sizes.items():
        units[group_of(name)] = units.get(group_of(name), 0) + size
    return {
        "groups": rows,
        "units": units,
        "total_parameters": total,
        "without_image_parts": total - image,
        "image_parts": image,
        "without_routed_experts": total - experts,
        "decoder_layers": layers,
        "per_layer": _layer_sizes(model, config),
        "active_per_token": {
            "layers": active,
            "layers_and_lm_head": active + rows["lm_head"],
            "routed_experts": chosen,
        },
        "bytes_bf16_parameters": total * _BYTES_BF16,
        "persistent_buffers": sum(b.numel() for b in model.buffers()),
        "tensors": {
            "packed_parameters": len(sizes),
            "split_parameters": len(sizes) + expert_tensors * (config.num_experts - 1),
            "buffers": len(list(model.buffers())),
        },
    }


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _layer_sizes(model: U2ForDiffusion, config: U2Config) -> dict[str, int]:
    """Parameters of one layer of each kind and of one routed expert, leaving out kinds the model doesn't have."""
    layers: list[nn.Module] = list(model.model.layers.children())
    sizes: dict[str, int] = {}
    if config.first_k_dense_replace:
        sizes["dense_layer"] = _numel(layers[0])
    if config.num_moe_layers:
        sizes["moe_layer"] = _numel(layers[-1])
        sizes["routed_experts_of_layer"] = _numel(layers[-1].get_submodule("mlp.experts"))
        sizes["one_expert"] = sizes["routed_experts_of_layer"] // config.num_experts
    return sizes


def print_plan(plan: dict[str, Any], console: Console | None = None) -> None:
    """Print a description as tables."""
    console = console or Console()
    table = Table("group", "parameters", "share", title="Parameters")
    for column in table.columns[1:]:
        column.justify = "right"
    total = plan["total_parameters"]
    for row, size in plan["groups"].items():
        table.add_row(row, f"{size:,}", f"{100 * size / total:.2f} %")
    table.add_section()
    table.add_row("total", f"{total:,}", "")
    console.print(table)
    facts = Table("quantity", "parameters", title="Arithmetic")
    facts.columns[1].justify = "right"
    for label, size in (
        ("one routed expert", plan["per_layer"].get("one_expert")),
        ("routed experts of one layer", plan["per_layer"].get("routed_experts_of_layer")),
        ("one MoE layer", plan["per_layer"].get("moe_layer")),
        ("one dense layer", plan["per_layer"].get("dense_layer")),
        ("all but routed experts", plan["without_routed_experts"]),
        ("image parts", plan["image_parts"]),
        ("without image parts", plan["without_image_parts"]),
        ("active per token, layers", plan["active_per_token"]["layers"]),
        ("active per token, with lm_head", plan["active_per_token"]["layers_and_lm_head"]),
    ):
        if size is not None:
            facts.add_row(label, f"{size:,}")
    facts.add_row("bf16 weights", f"{plan['bytes_bf16_parameters'] / 1e9:.2f} GB")
    console.print(facts)
