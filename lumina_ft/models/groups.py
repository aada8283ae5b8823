"""Which freezing unit and which row of the size table a parameter belongs to; each belongs to exactly one."""

import re
from collections.abc import Iterable

from lumina_ft.config.groups import ADAPTER_GROUP

_LAYER = r"model\.layers\.\d+\."

# Row of the published size table -> (freezing unit of `config.groups.GROUPS_U2`, pattern of the packed parameter name).
_ROWS: dict[str, tuple[str, str]] = {
    "text_embeddings": ("word_embeddings", r"model\.word_embeddings\.weight"),
    "image_embeddings": ("image_embeddings", r"model\.img_embeddings\.\d+\.weight"),
    "image_embeddings_proj": ("image_projection", r"model\.img_embeddings_proj\.weight"),
    "attention_qkv_and_dense": ("attention", _LAYER + r"attention\.(query_key_value|dense)\.weight"),
    "attention_qk_norm": ("norms", _LAYER + r"attention\.(query|key)_layernorm\.weight"),
    "layer_norms_and_final_norm": ("norms", rf"({_LAYER}(input|post_attention)_layernorm|model\.norm)\.weight"),
    "dense_mlp_layer0": ("dense_mlp", _LAYER + r"mlp\.(gate|up|down)_proj\.weight"),
    "router_gate_weight": ("router", _LAYER + r"mlp\.gate\.weight"),
    "shared_experts": ("shared_experts", _LAYER + r"mlp\.shared_experts\.(gate|up|down)_proj\.weight"),
    "routed_experts": ("experts", _LAYER + r"mlp\.experts\.(gate|up|down)_proj"),
    "lm_head": ("lm_head", r"lm_head\.weight"),
    "lm_img_head": ("image_heads", r"lm_img_head\.\d+\.weight"),
    "multi_codebook_head": ("codebook_head", r"multi_codebook_head\..+"),
}
SIZE_ROWS = tuple(_ROWS)
"""Rows of the size table, in the order in which it is printed."""


# Of PEFT's layers, and of routed experts (`models.experts`).
_ADAPTER_PART = re.compile(r"\.lora_(A|B|magnitude_vector)\.|\.experts\.(gate|up|down)_proj_lora_(A|B)$")
_ADAPTER_B = re.compile(r"\.lora_B\.|\.experts\.(gate|up|down)_proj_lora_B$")


def is_adapter_name(name: str) -> bool:
    """Whether a parameter belongs to an adapter: of a linear layer (PEFT's) or of routed experts."""
    return _ADAPTER_PART.search(name) is not None


def is_adapter_b(name: str) -> bool:
    """Whether a parameter is the B matrix of an adapter pair, or of all experts' pairs."""
    return _ADAPTER_B.search(name) is not None


def base_name(name: str) -> str:
    """Name of a base tensor as in checkpoints: PEFT's layers hold the adapted module as `base_layer`."""
    return name.replace(".base_layer.", ".")


def size_row_of(name: str) -> str:
    """Row of the size table that counts a parameter.

    Args:
        name: packed parameter name, as `named_parameters()` gives it.
    """
    rows = [row for row, (_, pattern) in _ROWS.items() if re.fullmatch(pattern, name)]
    assert len(rows) == 1, f"parameter {name} belongs to {rows or 'no group'}"
    return rows[0]


def group_of(name: str) -> str:
    """Freezing unit of a parameter: one of `config.groups.GROUPS_U2`, or `lora`."""
    return ADAPTER_GROUP if is_adapter_name(name) else _ROWS[size_row_of(base_name(name))][0]


def row_sizes(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Parameters per row of the size table, rows without any left out.

    Args:
        sizes: (packed parameter name, number of elements).
    """
    totals = dict.fromkeys(SIZE_ROWS, 0)
    for name, size in sizes:
        totals[size_row_of(name)] += size
    return {row: total for row, total in totals.items() if total}
