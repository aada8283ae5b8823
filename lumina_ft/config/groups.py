"""Freezing units of a model: names, aliases, and how a user's list of them is read."""

from lumina_ft.errors import nearest

GROUPS_U2 = (
    "word_embeddings",
    "image_embeddings",
    "image_projection",
    "attention",
    "dense_mlp",
    "router",
    "shared_experts",
    "experts",
    "norms",
    "lm_head",
    "image_heads",
    "codebook_head",
)
"""Freezing units of the `u2` family (design §4); every parameter belongs to exactly one."""

GROUP_ALIASES_U2: dict[str, tuple[str, ...]] = {
    "vision": ("image_embeddings", "image_projection"),
    "heads": ("lm_head", "image_heads", "codebook_head"),
    "backbone": ("attention", "dense_mlp", "router", "shared_experts", "experts", "norms"),
    "all": GROUPS_U2,
}


ADAPTER_GROUP = "lora"
"""Freezing unit of adapter parameters. A stage trains it by its key `lora`, not by `train`; `group_lr` may name it."""

ADAPTER_MODULE_GROUPS = (
    "word_embeddings",
    "image_embeddings",
    "image_projection",
    "lm_head",
    "image_heads",
    "codebook_head",
)
"""Groups made of whole modules, which an adapter directory can carry as PEFT's `modules_to_save`."""


def expand_group(name: str, key: str) -> tuple[str, ...]:
    """Groups behind a group name or alias.

    Raises:
        ValueError: unknown name, with the nearest known one.
    """
    if name in GROUPS_U2:
        return (name,)
    if name in GROUP_ALIASES_U2:
        return GROUP_ALIASES_U2[name]
    known = [*GROUPS_U2, *GROUP_ALIASES_U2]
    raise ValueError(f"{key}: unknown parameter group {name!r}{nearest(name, known)}; known: {', '.join(known)}")
