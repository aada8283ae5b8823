"""Which tiles of queries and keys meet, decided on the host once per batch for all layers and both directions (T7).

Shape legend: T tokens of all rows, n tiles, m live tile pairs.

The rule becomes data, so that one kernel serves every mask. Four int32 per token say it all:

    turn, block    as given
    rule           as a query: 18 bits, three for each of the six kinds of keys in `ref.SAME_TURN_RULE`
    shift          as a key: 3 * kind, where its bits start in a query's rule

    allowed = (clean key and turn_k < turn_q) or (turn_k == turn_q and rule_q >> (shift_k + order) & 1)
    order   = 0, 1, 2 for a key whose block lies before, at, after the query's
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lumina_ft.kernels.attention.ref import AFTER, BEFORE, CLEAN_KEYS, SAME, SAME_TURN_RULE, token_kinds
from lumina_ft.kernels.attention.tile_pairs import (
    CLEAN_SHIFT,
    Bools,
    Ints,
    TilePairs,
    TokenRule,
    cut,
    live_tiles,
    tile_list,
)
from lumina_ft.kernels.launch import tile_for

_ALL = BEFORE | SAME | AFTER
MAX_PACK = 4
"""A tile of 128 rows then has 32 tokens, the block length of the published model."""

_ALIGNMENT = 4
"""Parts of the uploaded buffer start at multiples of so many numbers: 16 bytes, as memory of their own would."""


@dataclass(frozen=True)
class TileList:
    """The tile pairs of one kernel, grouped by the tile that a program owns.

    Attributes:
        programs: [n, 5] int32, busiest first: first token and end of the tile, and where in `entries` its full tiles
            begin, its partial tiles begin, and both end.
        entries: [m, 2] int32, first token and end of the other side's tiles.
        block_m, block_n: tokens of a tile as queries, and as keys.
    """

    programs: Tensor
    entries: Tensor
    block_m: int
    block_n: int


@dataclass(frozen=True)
class TilePlan:
    """Everything that the attention kernels need beside q, k and v.

    Attributes:
        meta: [4, T] int32: turn, block, rule, shift.
        forward, dq: tiles of queries with the keys that they meet. dkv: tiles of keys with their queries.
        variant: the kernel variant whose tile sizes were used.
        pack: query heads of one key head that share a tile of `forward` and `dq`.
    """

    meta: Tensor
    forward: TileList
    dq: TileList
    dkv: TileList
    variant: str
    pack: int

    @property
    def name(self) -> str:
        return "tiled"


def padded_dim(head_dim: int) -> int:
    """Head dim as the kernels compute it: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def variant_of(dtype: torch.dtype, head_dim: int) -> str:
    """Kernel variant of q, k and v."""
    return f"{str(dtype).removeprefix('torch.')}-{padded_dim(head_dim)}"


def pack_of(heads_per_key: int) -> int:
    """How many query heads of a key head share a tile: the largest power of two in it, up to MAX_PACK."""
    return min(heads_per_key & -heads_per_key, MAX_PACK)


def live_pairs(tiles: TileList) -> int:
    """Query-key pairs of all tiles that are computed, masked ones included."""
    return tiles.entries.shape[0] * tiles.block_m * tiles.block_n


def plan_tiles(
    starts: list[int],
    lengths: list[int],
    *,
    type_ids: Tensor,
    turn_ids: Tensor,
    block_ids: Tensor,
    is_clean: Tensor,
    valid: Tensor,
    has_metadata: bool,
    head_dim: int,
    dtype: torch.dtype,
    heads_per_key: int = 1,
    device: torch.device | None = None,
) -> TilePlan:
    """Plan of the block-diffusion rule (spec §3).

    Args:
        starts, lengths: samples in token order, on the host; lengths >= 1, without overlap. Tokens outside samples
            get 0, like invalid ones.
        type_ids, turn_ids, block_ids: [T] int64. is_clean, valid: [T] bool.
        has_metadata: False allows every valid pair of a sample.
        head_dim, dtype: of q, k and v.
        heads_per_key: Hq / Hk. Heads of one key share tiles, as far as it is a power of two.
        device: where attention runs; None: that of `type_ids`.
    """
    target = type_ids.device if device is None else device
    if not has_metadata:
        return plan_bidirectional(
            starts, lengths, valid=valid, head_dim=head_dim, dtype=dtype, heads_per_key=heads_per_key, device=target
        )
    # One transfer to the host for all of it.
    columns = torch.stack([x.long() for x in (type_ids, turn_ids, block_ids, is_clean, valid)]).cpu()
    types, clean = columns[0], columns[3].bool()
    query_kind, key_kind = (kind.numpy() for kind in token_kinds(types, clean))
    turn, block, usable = (columns[i].numpy() for i in (1, 2, 4))
    edges = _edges(starts, lengths, types.numel())
    detailed = _any_of_segment(block >= 0, edges)
    bits = np.array([sum(rule << 3 * kind for kind, rule in enumerate(row)) for row in SAME_TURN_RULE])
    # Without block ids in a sample: noisy sees noisy, clean sees clean of its own turn.
    noisy_keys = sum(_ALL << 3 * kind for kind in range(CLEAN_KEYS))
    coarse = np.where(clean.numpy(), noisy_keys << CLEAN_SHIFT, noisy_keys)
    rule = TokenRule(
        turn=_compact(turn),
        block=_compact(block),
        rule=np.where(detailed, bits[query_kind], coarse),
        shift=3 * key_kind,
        valid=usable.astype(bool) & _inside(starts, lengths, types.numel()),
    )
    return _plan(rule, edges, variant_of(dtype, head_dim), pack_of(heads_per_key), target)


def plan_causal(
    starts: list[int],
    lengths: list[int],
    *,
    valid: Tensor,
    head_dim: int,
    dtype: torch.dtype,
    heads_per_key: int = 1,
    device: torch.device | None = None,
) -> TilePlan:
    """Plan in which a token sees itself and what came before it in its sample. Args: see `plan_tiles`."""
    order = np.arange(valid.numel(), dtype=np.int64)
    return _plan_uniform(
        starts, lengths, order, BEFORE | SAME, valid, variant_of(dtype, head_dim), pack_of(heads_per_key), device
    )


def plan_bidirectional(
    starts: list[int],
    lengths: list[int],
    *,
    valid: Tensor,
    head_dim: int,
    dtype: torch.dtype,
    heads_per_key: int = 1,
    device: torch.device | None = None,
) -> TilePlan:
    """Plan in which a token sees all of its sample. Args: see `plan_tiles`."""
    order = np.zeros(valid.numel(), dtype=np.int64)
    return _plan_uniform(
        starts, lengths, order, _ALL, valid, variant_of(dtype, head_dim), pack_of(heads_per_key), device
    )


def _plan_uniform(
    starts: list[int],
    lengths: list[int],
    order: Ints,
    allowed: int,
    valid: Tensor,
    variant: str,
    pack: int,
    device: torch.device | None,
) -> TilePlan:
    """Plan of one turn with one kind of tokens. `order`: [T] block of each; `allowed`: bits for its only kind."""
    zeros = np.zeros_like(order)
    usable = valid.cpu().numpy().astype(bool) & _inside(starts, lengths, order.size)
    rule = TokenRule(zeros, order, np.full_like(order, allowed), zeros, usable)
    target = valid.device if device is None else device
    return _plan(rule, _edges(starts, lengths, order.size), variant, pack, target)


def _plan(rule: TokenRule, edges: Ints, variant: str, pack: int, device: torch.device) -> TilePlan:
    """Tile lists of the three kernels, and one upload."""
    pairs: dict[tuple[int, int], TilePairs] = {}
    parts: list[Ints] = [np.stack((rule.turn, rule.block, rule.rule, rule.shift))]
    sizes: list[tuple[int, int]] = []
    for kernel in ("attention_forward", "attention_dq", "attention_dkv"):
        blocks = tile_for(kernel, variant, device).blocks
        size = (blocks["BLOCK_M"] // (1 if kernel == "attention_dkv" else pack), blocks["BLOCK_N"])
        queries, keys = (cut(rule.valid, edges, block) for block in size)
        if size not in pairs:
            pairs[size] = live_tiles(rule, queries, keys)
        query, key, full = pairs[size]
        if kernel == "attention_dkv":
            parts += tile_list(key, query, full & queries.complete[query], keys, queries)
        else:
            parts += tile_list(query, key, full & keys.complete[key], queries, keys)
        sizes.append(size)
    meta_on_device, *lists = _upload(parts, device)
    forward, dq, dkv = (TileList(lists[2 * i], lists[2 * i + 1], *size) for i, size in enumerate(sizes))
    return TilePlan(meta_on_device, forward, dq, dkv, variant, pack)


def _upload(parts: list[Ints], device: torch.device) -> list[Tensor]:
    """The arrays as int32 on a device, through one buffer."""
    padded = [-(-part.size // _ALIGNMENT) * _ALIGNMENT for part in parts]
    buffer = np.zeros(sum(padded), dtype=np.int32)
    begins = np.cumsum([0, *padded])
    for part, begin in zip(parts, begins, strict=False):
        buffer[begin : begin + part.size] = part.reshape(-1)
    uploaded = torch.from_numpy(buffer).to(device)
    return [
        uploaded[begin : begin + part.size].view(part.shape)
        for part, begin in zip(parts, begins.tolist(), strict=False)
    ]


def _edges(starts: list[int], lengths: list[int], tokens: int) -> Ints:
    """Bounds of segments: samples, and the gaps around them."""
    first = np.array(starts, dtype=np.int64)
    return np.unique(np.concatenate((np.array([0, tokens]), first, first + np.array(lengths, dtype=np.int64))))


def _inside(starts: list[int], lengths: list[int], tokens: int) -> Bools:
    """[T], which tokens belong to a sample."""
    step = np.zeros(tokens + 1, dtype=np.int64)
    first = np.array(starts, dtype=np.int64)
    np.add.at(step, first, 1)
    np.add.at(step, first + np.array(lengths, dtype=np.int64), -1)
    return np.cumsum(step)[:tokens] > 0


def _any_of_segment(flags: Bools, edges: Ints) -> Bools:
    """[T], whether any token of the same segment is flagged."""
    if flags.size == 0:
        return flags
    return np.repeat(np.logical_or.reduceat(flags, edges[:-1]), np.diff(edges))


def _compact(values: Ints) -> Ints:
    """Numbers of the same order that fit int32, above its lowest."""
    if values.size == 0 or max(-values.min(), values.max()) < 2**31:
        return values
    return np.unique(values, return_inverse=True)[1]
