"""Bytes that ZeRO keeps on one rank, by arithmetic: no engine, no process group, nothing allocated.

Follows what DeepSpeed 0.19's optimizer wrappers allocate; `tests/dist/test_memory.py` compares every case with engines.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lumina_ft.errors import ConfigError

FP32_BYTES = 4
_MOMENTS = 2
_STEP_BYTES = 4
"""AdamW counts its steps in one fp32 scalar for each tensor that it updates."""
_FLAT_ALIGNMENT = 2
"""ZeRO-1/2 pad a flat group to a multiple of this times the ranks that divide it."""
_SUB_GROUP_NUMEL = 1_000_000_000
_PERSISTENCE_NUMEL = 100_000
"""DeepSpeed's defaults of sub_group_size and stage3_param_persistence_threshold."""

_UNCOUNTED: Mapping[str, tuple[Any, ...]] = {
    "offload_optimizer": (None,),
    "offload_param": (None,),
    "round_robin_gradients": (False,),
    "parameter_alignment": (False,),
    "contiguous_gradients": (True,),
    "zero_hpz_partition_size": (1,),
    "zero_quantized_weights": (False,),
    "zero_quantized_nontrainable_weights": (False,),
    "stage3_model_persistence_threshold": (),
    "mics_shard_size": (-1,),
    "zenflow": (None,),
}
"""Keys of `zero_optimization` that change what is allocated, with the values that don't."""


class StateBytes(NamedTuple):
    """What one rank holds between the last backward pass of a step and the update, from the second step on.

    Each byte counts once, in the first field that names it. Buffers of the model (expert biases: some KiB), reduction
    buckets and everything that lives for one operation are not in it.

    Attributes:
        parameters: weights in the compute dtype. ZeRO-0…2: all of them; trained ones lie in flat groups with their
            padding. ZeRO-3: this rank's partition of each with its padding, and whole copies, padded alike, of the
            parameters below the persistence threshold; none of a parameter that no other rank has a part of.
        gradients: the accumulated gradient in its own dtype. ZeRO-0: of the parameters, in the compute dtype. ZeRO-1
            in bfloat16: whole flat groups in fp32. ZeRO-2 in bfloat16: this rank's part of them in fp32. ZeRO-1/2 in
            fp32: whole gradients of the parameters that reach into this rank's part, and padding. ZeRO-3: this rank's
            partitions in fp32.
        optimizer: fp32 master weights, AdamW's two moments and its step counters. ZeRO-0 in fp32 has no masters: it
            updates the weights themselves.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three."""
        return sum(self)


@dataclass(frozen=True)
class StoredParam:
    """A parameter as ZeRO sees it on one rank.

    Attributes:
        numel: elements before ZeRO divides it; of experts that ranks share, those of this rank's experts.
        ranks: among which ZeRO divides it or its state.
        place: of this rank among those.
        group: number of its optimizer group; None: frozen. A group's parameters have the same ranks, except at ZeRO-3.
    """

    numel: int
    ranks: int
    place: int
    group: int | None

    @property
    def partition_numel(self) -> int:
        """Elements of each rank's partition at ZeRO-3, padding included."""
        return -(-self.numel // self.ranks)

    @property
    def padded_numel(self) -> int:
        """Elements of the whole parameter as ZeRO-3 gathers it."""
        return self.partition_numel * self.ranks

    def persists(self, threshold: int) -> bool:
        """Whether ZeRO-3 keeps it whole between steps; alone on its rank, it is whole without a copy."""
        return self.numel <= threshold and self.ranks > 1


def state_bytes(params: Sequence[StoredParam], ds_config: Mapping[str, Any], width: int) -> StateBytes:
    """Bytes of one rank.

    Args:
        params: every parameter, in the model's order.
        ds_config: resolved configuration.
        width: bytes of an element in the compute dtype: 4, or 2 for bfloat16.

    Raises:
        ConfigError: the configuration has a key that changes what is allocated and has no arithmetic here.
    """
    check_counted(ds_config)
    stage = ds_config["zero_optimization"]["stage"]
    if stage == 3:
        return _partitioned(params, ds_config, width)
    if stage == 0:
        return _replicated(params, width)
    return _flat(params, stage, width)


def check_counted(ds_config: Mapping[str, Any]) -> None:
    """Refuse what the arithmetic doesn't cover.

    Raises:
        ConfigError: one line per key.
    """
    block = ds_config["zero_optimization"]
    odd = [
        f"zero_optimization.{key} — {block[key]!r}"
        for key, plain in _UNCOUNTED.items()
        if key in block and block[key] not in plain
    ]
    dtype = ds_config.get("data_types", {}).get("grad_accum_dtype", "fp32")
    if dtype not in ("fp32", "float32"):
        odd.append(f"data_types.grad_accum_dtype — {dtype!r}")
    if odd:
        raise ConfigError(
            "\n".join(f"parallel.zero: {key} — has no memory arithmetic — plan without this key" for key in odd)
        )


def persistence_threshold(ds_config: Mapping[str, Any]) -> int:
    """Largest parameter that ZeRO-3 keeps whole."""
    return int(ds_config["zero_optimization"].get("stage3_param_persistence_threshold", _PERSISTENCE_NUMEL))


def _replicated(params: Iterable[StoredParam], width: int) -> StateBytes:
    """ZeRO-0: every tensor is updated on its own."""
    params = list(params)
    trained = [p.numel for p in params if p.group is not None]
    masters = 0 if width == FP32_BYTES else 1
    return StateBytes(
        sum(p.numel for p in params) * width,
        sum(trained) * width,
        sum(trained) * FP32_BYTES * (masters + _MOMENTS) + len(trained) * _STEP_BYTES,
    )


def _flat(params: Iterable[StoredParam], stage: int, width: int) -> StateBytes:
    """ZeRO-1/2: the trained parameters of a group lie in one flat tensor, whose update is divided."""
    params = list(params)
    groups = _by_group(params)
    flat = {number: _aligned(members) for number, members in groups.items()}
    own = {number: flat[number] // members[0].ranks for number, members in groups.items()}
    frozen = sum(p.numel for p in params if p.group is None)
    if width == FP32_BYTES:
        gradients = sum(_reaching(members, own[number]) for number, members in groups.items())
    else:
        gradients = sum((flat if stage == 1 else own).values())
    return StateBytes(
        (frozen + sum(flat.values())) * width,
        gradients * FP32_BYTES,
        sum(own.values()) * FP32_BYTES * (1 + _MOMENTS) + len(groups) * _STEP_BYTES,
    )


def _aligned(members: Sequence[StoredParam]) -> int:
    unit = _FLAT_ALIGNMENT * members[0].ranks
    return -(-sum(p.numel for p in members) // unit) * unit


def _reaching(members: Sequence[StoredParam], own: int) -> int:
    """Elements of the gradients that reach into this rank's part of a flat group, and of the zeros that fill it up."""
    start = own * members[0].place
    offset, covered, whole = 0, 0, 0
    for param in members:
        inside = min(offset + param.numel, start + own) - max(offset, start)
        if inside > 0:
            covered += inside
            whole += param.numel
        offset += param.numel
    return whole + own - covered


def _partitioned(params: Iterable[StoredParam], ds_config: Mapping[str, Any], width: int) -> StateBytes:
    """ZeRO-3: every parameter is divided by itself."""
    params = list(params)
    threshold = persistence_threshold(ds_config)
    whole = sum(p.padded_numel for p in params if p.persists(threshold))
    trained = sum(p.partition_numel for p in params if p.group is not None)
    limit = int(ds_config["zero_optimization"].get("sub_group_size", _SUB_GROUP_NUMEL))
    updated = sum(len(sizes) for sizes in sub_groups(params, limit))
    return StateBytes(
        (sum(p.partition_numel for p in params) + whole) * width,
        trained * FP32_BYTES,
        trained * FP32_BYTES * (1 + _MOMENTS) + updated * _STEP_BYTES,
    )


def sub_groups(params: Iterable[StoredParam], limit: int) -> list[list[int]]:
    """Elements of the tensors that ZeRO-3 updates one by one, for each group and number of ranks."""
    split: dict[tuple[int, int], list[StoredParam]] = {}
    for param in params:
        if param.group is not None:
            split.setdefault((param.group, param.ranks), []).append(param)
    out: list[list[int]] = []
    for members in split.values():
        sizes, size = [], 0
        for param in members:
            size += param.partition_numel
            if size >= limit:
                sizes.append(size)
                size = 0
        out.append([*sizes, size] if size else sizes)
    return out


def _by_group(params: Iterable[StoredParam]) -> dict[int, list[StoredParam]]:
    groups: dict[int, list[StoredParam]] = {}
    for param in params:
        if param.group is not None:
            groups.setdefault(param.group, []).append(param)
    return groups
