"""`lumina-ft bench kernels`: all operations on this device."""

import platform
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from lumina_ft.bench.kernels import attention, cross_entropy, moe, router
from lumina_ft.bench.kernels.contest import Contest, settle
from lumina_ft.bench.kernels.measure import Meter, one_thread
from lumina_ft.bench.kernels.packs import LAYOUTS, build_pack, shares
from lumina_ft.bench.kernels.targets import check_targets
from lumina_ft.errors import ConfigError
from lumina_ft.kernels.attention.tile_plan import live_pairs, plan_tiles
from lumina_ft.kernels.launch import record_launches
from lumina_ft.kernels.tiles import device_architecture

_OPERATIONS = {"moe": moe, "attention": attention, "router": router, "cross-entropy": cross_entropy}
OPERATIONS = tuple(_OPERATIONS)
SIZES = ("real", "small", "tiny")
"""Of the published model, for a CPU, for a trial of the bench itself."""


def bench_kernels(
    *,
    operations: Sequence[str] = OPERATIONS,
    skip: Sequence[str] = (),
    size: str | None = None,
    seconds: float = 2.0,
) -> dict[str, Any]:
    """Every kernel against its peers: bfloat16 on a GPU, float32 on one thread of the CPU.

    Args:
        operations: names from OPERATIONS.
        skip: sides to leave out, such as `flex`, whose compilation takes a while.
        size: one of SIZES; None: real on a GPU, small on a CPU.
        seconds: of timing per contest; a round in which each side runs once is never cut short.

    Returns:
        `device`, versions, `clock`, `ceilings`, `shares` (with attention), `contests` (see `contest.settle`), `targets`
        (at real size on a GPU), and `wrong`: what was wrong or failed; empty if all is well.

    Raises:
        ConfigError: real size without a GPU.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    size = size or ("real" if on_gpu else "small")
    if size == "real" and not on_gpu:
        raise ConfigError("--size — real — needs a CUDA device: weights and references take 30 GB — use small")
    with nullcontext() if on_gpu else one_thread():
        meter = Meter(device, dtype)
        results = [
            settle(without(contest, skip), meter, seconds)
            for name in operations
            for contest in _OPERATIONS[name].contests(_OPERATIONS[name].SIZES[size], device, dtype)
        ]
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "size": size,
        "clock": "events of the GPU" if on_gpu else "processor time of one thread",
        "ceilings": meter.ceilings._asdict(),
        "contests": results,
    }
    if "attention" in operations:
        result["shares"] = live_shares(device)
    if on_gpu and size == "real":
        result["targets"] = check_targets(results)
    result["wrong"] = [
        f"{contest['operation']}, {contest['case']}: {name}: {side['wrong']}"
        for contest in results
        for name, side in contest["sides"].items()
        if "wrong" in side
    ]
    return result


def without(contest: Contest, skip: Sequence[str]) -> Contest:
    """The contest with some sides left out, which it says."""
    left_out = {name: "left out" for name in skip if name in contest.sides}
    sides = {name: side for name, side in contest.sides.items() if name not in left_out}
    return replace(contest, sides=sides, unavailable=contest.unavailable | left_out)


def live_shares(device: torch.device) -> dict[str, Any]:
    """Of the S x S pairs of packs of 16,384 tokens: those allowed, those in tiles that run, those in whole samples.

    Args:
        device: whose tiles count; those of sm_90 without a GPU.
    """
    name = device_architecture(device) if device.type == "cuda" else "sm_90"
    found: dict[str, Any] = {"tiles_of": name}
    sizes = attention.SIZES["real"]
    for layout in LAYOUTS:
        pack = build_pack(layout)
        with record_launches(name):
            plan = plan_tiles(
                **pack.plan_arguments(),
                head_dim=sizes.head_dim,
                dtype=torch.bfloat16,
                heads_per_key=sizes.heads // sizes.key_heads,
            )
        share = shares(pack)
        tiles = {"tiles": plan.forward, "tiles_dq": plan.dq, "tiles_dkv": plan.dkv}
        share |= {part: live_pairs(tile_list) / pack.tokens**2 for part, tile_list in tiles.items()}
        found[layout] = share | {"tiles_over_exact": share["tiles"] / share["exact"]}
    return found
