"""The one way in which Triton kernels are started: on a device, or onto a record for ahead-of-time compilation.

This module doesn't import Triton: that costs time and reads `TRITON_INTERPRET` once, so only the kernels do.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lumina_ft.kernels.tiles import Tile, architecture, device_architecture, tiles_of


class Launch(NamedTuple):
    """One start of a kernel.

    Attributes:
        name, variant: of its tile, see `tiles`.
        kernel: the `triton.jit` function.
        args: tensors, numbers and None in the order of its parameters.
        constants: constexpr parameters, tile sizes included.
        tile: what it was started with.
    """

    name: str
    variant: str
    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]
    tile: Tile


class _Recording(NamedTuple):
    architecture: str
    override: dict[tuple[str, str], Tile]
    launches: list[Launch]


_recording: ContextVar[_Recording | None] = ContextVar("recording", default=None)


@contextmanager
def record_launches(
    architecture_name: str, override: dict[tuple[str, str], Tile] | None = None
) -> Iterator[list[Launch]]:
    """Collect launches instead of running them; tensors may be on the meta device.

    Args:
        architecture_name: whose tiles are used.
        override: (kernel, variant) -> tile to use instead.
    """
    token = _recording.set(_Recording(architecture_name, override or {}, []))
    try:
        recording = _recording.get()
        assert recording is not None
        yield recording.launches
    finally:
        _recording.reset(token)


_replaced: dict[tuple[str, str], Tile] = {}
"""Not a context variable: autograd runs backward passes of a GPU in a thread of its own."""


@contextmanager
def use_tiles(tiles: dict[tuple[str, str], Tile]) -> Iterator[None]:
    """Launch with these tiles, (kernel, variant) -> tile, instead of those of the device's file: to compare them."""
    assert not _replaced, "tiles are replaced already"
    _replaced.update(tiles)
    try:
        yield
    finally:
        _replaced.clear()


def tile_for(name: str, variant: str, device: torch.device) -> Tile:
    """Tile of a kernel on the device that the tensors are on.

    Raises:
        ConfigError: see `tiles.device_architecture`.
    """
    recording = _recording.get()
    if recording is None:
        replaced = _replaced.get((name, variant))
        if replaced is not None:
            return replaced
        return tiles_of(device_architecture(device))[name][variant]
    own = recording.override.get((name, variant))
    return tiles_of(recording.architecture)[name][variant] if own is None else own


def compile_options(num_warps: int, num_stages: int) -> dict[str, Any]:
    """What kernels are compiled with beside their constants.

    Products are fused into sums whatever the default of the Triton version is.
    """
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}


def launch(
    name: str,
    variant: str,
    kernel: Any,
    grid: tuple[int, ...],
    tile: Tile,
    args: tuple[Any, ...],
    constants: dict[str, Any],
) -> None:
    """Start a kernel on the device of its tensors. An empty grid starts nothing.

    Args:
        name, variant: as given to `tile_for`.
        grid: programs per dimension.
        args, constants: see `Launch`; the tile's block sizes are added.
    """
    constants = {**constants, **tile.blocks}
    recording = _recording.get()
    if recording is not None:
        recording.launches.append(Launch(name, variant, kernel, args, constants, tile))
        return
    if 0 in grid:
        return
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    with torch.cuda.device(device if device.type == "cuda" else -1):
        kernel[grid](*args, **constants, **compile_options(tile.num_warps, tile.num_stages))


def unavailable_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton kernels can't run on a device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if architecture(capability) is None:
            return f"no tile sizes for compute capability {capability[0]}.{capability[1]}"
        return None
    if os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton kernels need a CUDA device, this is {device.type}"
    if dtype != torch.float32:
        return f"Triton's interpreter computes {dtype} wrongly"
    return None
