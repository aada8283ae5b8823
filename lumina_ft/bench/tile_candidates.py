"""Tiles worth trying, in order of preference: what tuning searches.

Large tiles with deep pipelines come first, since they read each operand least often; the ahead-of-time gate turns down
those that don't fit into registers or shared memory. The order is such that what is taken without timing passes on
Triton 3.6 to 3.9, whose register allocation differs. "64x128x64 w4 s3" is rows x columns x depth (the kernel's BLOCK_M,
BLOCK_N, BLOCK_K, those that it has), warps, and stages of the pipeline.
"""

from collections.abc import Iterator

from lumina_ft.kernels.tiles import Tile

BLOCK_ORDER = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK_T")
"""In which tiles are written."""

HALF: dict[str, dict[str, tuple[str, ...]]] = {
    "moe_gate_up": {
        "sm_90": ("64x128x64 w8 s3", "128x128x64 w8 s3", "64x128x64 w4 s3", "64x128x32 w4 s4", "64x64x64 w4 s4"),
        "sm_80": ("64x128x64 w8 s3", "64x128x32 w4 s4", "128x64x32 w4 s4", "64x64x64 w4 s3", "64x64x32 w4 s4"),
    },
    "moe_down": {
        "sm_90": ("128x256x64 w8 s3", "128x128x64 w8 s4", "128x128x64 w4 s3", "64x256x64 w8 s3", "64x128x64 w4 s4"),
        "sm_80": ("128x128x64 w8 s3", "128x128x32 w4 s4", "64x128x64 w4 s3", "64x64x64 w4 s3"),
    },
    "moe_hidden_grad": {
        "sm_90": ("64x128x64 w8 s3", "64x128x64 w8 s4", "64x128x64 w4 s3", "64x64x64 w4 s4", "64x64x64 w4 s3"),
        "sm_80": ("64x128x64 w8 s3", "64x128x32 w8 s4", "64x64x64 w4 s3", "64x64x32 w4 s4"),
    },
    "moe_input_grad": {
        "sm_90": ("128x256x32 w8 s3", "128x128x64 w8 s3", "64x256x32 w8 s3", "128x128x32 w8 s4", "64x128x32 w4 s3"),
        "sm_80": ("128x128x32 w8 s3", "64x128x32 w4 s3", "64x64x64 w4 s3", "64x64x32 w4 s3"),
    },
    "moe_weight_grad": {
        "sm_90": ("128x256x64 w8 s3", "128x128x64 w8 s4", "128x128x64 w8 s3", "128x128x64 w4 s3"),
        "sm_80": ("128x128x64 w8 s3", "128x128x32 w8 s4", "64x128x32 w4 s4", "64x64x64 w4 s3"),
    },
    "moe_shrink": {
        "sm_90": ("64x128 w4 s4", "64x128 w4 s3", "128x64 w4 s4", "64x64 w4 s4", "64x64 w4 s3"),
        "sm_80": ("64x128 w4 s3", "64x64 w4 s4", "64x64 w4 s3", "32x64 w4 s3"),
    },
    "moe_rank_grad": {
        "sm_90": ("128x64 w4 s3", "64x64 w4 s3", "128x32 w4 s3", "128x64 w4 s2", "128x64 w8 s3", "128x64 w4 s1"),
        "sm_80": ("128x64 w4 s3", "128x32 w4 s4", "64x64 w4 s3", "64x32 w4 s3"),
    },
    "attention_forward": {
        "sm_90": ("128x64 w8 s3", "128x64 w8 s2", "128x64 w4 s2", "64x64 w4 s3", "64x64 w4 s2"),
        "sm_80": ("128x64 w8 s2", "128x64 w4 s2", "128x32 w8 s2", "64x64 w8 s2", "64x64 w4 s2", "64x32 w4 s2"),
    },
    "attention_dq": {
        "sm_90": ("128x64 w8 s2", "128x64 w4 s2", "64x64 w4 s3", "64x64 w4 s2", "64x32 w4 s2"),
        "sm_80": ("128x64 w8 s2", "64x64 w8 s2", "64x64 w4 s2", "64x32 w4 s2", "32x32 w4 s2"),
    },
    "attention_dkv": {
        "sm_90": ("64x128 w8 s2", "32x128 w8 s2", "64x64 w4 s2", "32x64 w4 s2", "16x64 w4 s2"),
        "sm_80": ("32x64 w8 s2", "64x64 w8 s2", "64x32 w8 s2", "64x32 w4 s2", "32x32 w4 s2"),
    },
}
"""bfloat16 products on tensor cores: kernel -> architecture -> tiles."""

FULL: dict[str, tuple[str, ...]] = {
    "moe_gate_up": ("64x32x32 w4 s2", "32x32x32 w4 s2", "32x32x16 w4 s2"),
    "moe_down": ("64x64x32 w4 s2", "64x64x16 w4 s2", "64x32x32 w4 s2", "32x32x32 w4 s2"),
    "moe_hidden_grad": ("64x64x32 w4 s2", "64x64x16 w4 s2", "64x32x32 w4 s2", "32x32x32 w4 s2"),
    "moe_input_grad": ("64x64x16 w4 s2", "64x32x16 w4 s2", "32x32x16 w4 s2"),
    "moe_weight_grad": ("64x64x32 w4 s2", "64x64x16 w4 s2", "64x32x16 w4 s2", "32x32x16 w4 s2"),
    "moe_shrink": ("64x32 w4 s2", "32x32 w4 s2", "32x16 w4 s2"),
    "moe_rank_grad": ("64x32 w4 s2", "64x16 w4 s2", "32x32 w4 s2"),
    "attention_forward": ("32x32 w8 s1", "32x32 w4 s1", "32x16 w4 s1", "16x16 w8 s1"),
    "attention_dq": ("32x32 w4 s1", "32x32 w8 s1", "16x16 w8 s1"),
    "attention_dkv": ("32x32 w8 s1", "32x32 w4 s1", "16x16 w4 s1", "16x16 w8 s1"),
}
"""float32 products on scalar units, for checks rather than for speed; the same on all architectures."""

EXCEPTIONS: dict[tuple[str, str, str], tuple[str, ...]] = {
    ("attention_dkv", "bfloat16-64", "sm_80"): ("64x32 w8 s2", "64x32 w4 s2", "32x32 w4 s2"),
    ("attention_dkv", "float32-128", "sm_90"): ("16x16 w4 s1", "16x16 w8 s1"),
    ("attention_forward", "float32-128", "sm_80"): ("32x16 w4 s1", "16x16 w8 s1"),
}
"""(kernel, variant, architecture) -> tiles, where the first ones above compile well on some versions of Triton only."""

OTHER: dict[str, tuple[str, ...]] = {
    "moe_combine": ("1024 w4 s1", "2048 w4 s1", "512 w4 s1", "2048 w8 s1"),
    "moe_tiles": ("128 w4 s1",),
    "route": ("4 w4 s1", "2 w1 s1", "4 w2 s1", "8 w4 s1", "1 w1 s1"),
    "route_backward": ("32 w1 s1", "64 w2 s1", "128 w4 s1"),
}
"""Kernels without matrix products."""


def candidates(kernel: str, variant: str, architecture: str, known: Tile) -> Iterator[Tile]:
    """Tiles to try for a kernel.

    Args:
        known: its tile now, which has the names of its block sizes.
    """
    names = [name for name in BLOCK_ORDER if name in known.blocks]
    listed = EXCEPTIONS.get((kernel, variant, architecture), OTHER.get(kernel))
    if listed is None:
        # Without wgmma, other architectures are like sm_80 with less shared memory.
        of = "sm_90" if architecture == "sm_90" else "sm_80"
        listed = HALF[kernel][of] if variant.startswith("bfloat16") else FULL[kernel]
    for text in listed:
        sizes, warps, stages = text.split()
        blocks = dict(zip(names, map(int, sizes.split("x")), strict=True))
        yield Tile(blocks, int(warps.removeprefix("w")), int(stages.removeprefix("s")))
