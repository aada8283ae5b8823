"""Names of tensors in the two published checkpoint layouts (spec §1).

Native names are those of the packed layout, which are also the model's parameter names:
`model.layers.1.mlp.experts.gate_proj`, one tensor [E, ...] for all experts. The split layout holds
`model.layers.1.mlp.experts.0.gate_proj.weight` per expert. All other names are equal in both.
"""

import re
from collections.abc import Iterable
from typing import Literal

from lumina_ft.errors import CheckpointError

Layout = Literal["packed", "split"]

MODEL_TYPES: dict[Layout, str] = {"packed": "llada2_moe_veomni", "split": "llada2_moe"}
"""The published modeling code picks its expert class by `model_type`, so an export must name its layout there."""

CHANNEL_MASK = "multi_codebook_head.channel_mask"
"""A persistent buffer of the published code whose value follows from the number of codebooks: may be absent."""

_SPLIT = re.compile(r"^(?P<block>.+\.mlp\.experts)\.(?P<expert>\d+)\.(?P<proj>gate_proj|up_proj|down_proj)\.weight$")
_PACKED = re.compile(r"^(?P<name>.+\.mlp\.experts\.(?:gate_proj|up_proj|down_proj))(?P<suffix>\.weight)?$")


def parse_split(key: str) -> tuple[str, int] | None:
    """Native name and expert index of a per-expert key; None for any other key."""
    match = _SPLIT.match(key)
    if match is None:
        return None
    return f"{match['block']}.{match['proj']}", int(match["expert"])


def parse_packed(key: str) -> str | None:
    """Native name of a stacked expert key, with or without the `.weight` that some READMEs print; else None."""
    match = _PACKED.match(key)
    return None if match is None else match["name"]


def split_key(native: str, expert: int) -> str:
    """Key of one expert of a stacked tensor in the split layout."""
    block, proj = native.rsplit(".", 1)
    return f"{block}.{expert}.{proj}.weight"


def is_stacked_experts(native: str) -> bool:
    """Whether a native name is a stacked expert tensor."""
    return parse_packed(native) == native


def detect_layout(keys: Iterable[str], where: str) -> Layout:
    """Layout of a checkpoint, from its keys alone (`model_type` in published files can't be trusted).

    Args:
        keys: all tensor names.
        where: directory, for the message.

    Returns:
        `packed` also for a checkpoint without routed experts.

    Raises:
        CheckpointError: both layouts occur.
    """
    split = packed = None
    for key in keys:
        if parse_split(key) is not None:
            split = split or key
        elif parse_packed(key) is not None:
            packed = packed or key
    if split and packed:
        raise CheckpointError(
            f"{where} — {split!r} and {packed!r} — a checkpoint holds experts one by one or stacked, never both — "
            "remove the files that belong to another export"
        )
    return "split" if split else "packed"
