"""Tile sizes of the Triton kernels: one JSON file per GPU architecture, chosen offline and never at run time.

A file holds `{kernel: {variant: {"BLOCK_…": size, "num_warps": n, "num_stages": n}}}`. A variant is the dtype, followed
by `-<head dim>` for attention. Sizes never depend on the number of tokens: the same inputs give the same bits in packs
of any length.
"""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from lumina_ft.errors import ConfigError

CONFIGS = Path(__file__).parent / "configs"
INTERPRETER = "interpreter"

_SERVED_BY = {(8, 0): "sm_80", (9, 0): "sm_90", (10, 0): "sm_90", (10, 3): "sm_90"}
"""File of each compute capability; Blackwell data-centre GPUs have the limits of sm_90."""


class Tile(NamedTuple):
    """How one kernel is cut up.

    Attributes:
        blocks: constexpr name -> size, a power of two.
        num_warps, num_stages: of the software pipeline.
    """

    blocks: dict[str, int]
    num_warps: int
    num_stages: int


def architecture(capability: tuple[int, int]) -> str | None:
    """Name of the file that serves a compute capability, or None if there is none."""
    name = _SERVED_BY.get(capability, f"sm_{capability[0]}{capability[1]}")
    return name if (CONFIGS / f"{name}.json").is_file() else None


@cache
def device_architecture(device: torch.device) -> str:
    """File of a device; CPU tensors are served by Triton's interpreter.

    Raises:
        ConfigError: a GPU without a file.
    """
    if device.type != "cuda":
        return INTERPRETER
    capability = torch.cuda.get_device_capability(device)
    name = architecture(capability)
    if name is None:
        raise ConfigError(
            f"model.kernels — triton — no tile sizes for compute capability {capability[0]}.{capability[1]} — use "
            "model.kernels: torch, or for 8.6 and 8.9 write them with `lumina-ft bench tune --arch`"
        )
    return name


@cache
def tiles_of(name: str) -> dict[str, dict[str, Tile]]:
    """Tiles of an architecture: kernel -> variant -> tile."""
    text = (CONFIGS / f"{name}.json").read_text(encoding="utf-8")
    return {
        kernel: {variant: _tile(entry) for variant, entry in variants.items()}
        for kernel, variants in json.loads(text).items()
    }


def _tile(entry: dict[str, int]) -> Tile:
    blocks = {key: size for key, size in entry.items() if key.startswith("BLOCK_")}
    return Tile(blocks, entry["num_warps"], entry["num_stages"])
