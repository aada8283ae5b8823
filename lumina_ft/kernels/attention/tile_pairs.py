"""Compares queries with keys tile by tile, on the host (T7).

Shape legend: T tokens of all rows, n tiles, m live tile pairs.

Tiles begin anew with every sample and wherever valid tokens meet invalid ones: no tile pair mixes samples, so a
sample's result doesn't depend on its neighbours, and invalid tokens are in tiles of their own that meet none.
Inside a tile, tokens that differ in their blocks only form a group, known by its lowest and highest block. Groups are
compared instead of tokens, so no S x S table exists, and work follows the number of tile pairs. The comparison is exact
where blocks are contiguous, and otherwise at worst calls a dead tile live or a full one partial.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lumina_ft.kernels.attention.ref import AFTER, BEFORE, CLEAN_KEYS, SAME

CLEAN_SHIFT = 3 * CLEAN_KEYS
"""Shifts from here on belong to clean keys."""

_COMPARISONS_AT_ONCE = 1 << 18

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class TokenRule(NamedTuple):
    """The mask as data, see the module; all [T], `valid` bool, else int64."""

    turn: Ints
    block: Ints
    rule: Ints
    shift: Ints
    valid: Bools


class Tiling(NamedTuple):
    """One side cut into tiles, of valid or of invalid tokens.

    Attributes:
        first, end: [n] tokens of each tile. sample: [n] its sample, where gaps between samples count as samples.
        base: [samples + 1] first tile of each sample.
        of_token: [T] tile of each token.
        complete: [n] whether the tile has all the tokens that it could have.
    """

    first: Ints
    end: Ints
    sample: Ints
    base: Ints
    of_token: Ints
    complete: Bools


class _Groups(NamedTuple):
    """Valid tokens of one tile with the same turn and code (a query's rule, a key's shift); sorted by tile."""

    tile: Ints
    turn: Ints
    code: Ints
    low: Ints
    high: Ints


class TilePairs(NamedTuple):
    """Live tile pairs [m]; `full`: every valid query of the tile sees every valid key of the other."""

    query: Ints
    key: Ints
    full: Bools


def cut(valid: Bools, edges: Ints, size: int) -> Tiling:
    """Tiles of up to `size` tokens, anew at each sample and each change between valid and invalid.

    Args:
        valid: [T]. edges: [samples + 1] bounds of samples and of the gaps between them.
    """
    bounds = np.unique(np.concatenate((edges, 1 + np.flatnonzero(valid[1:] != valid[:-1]))))
    lengths = np.diff(bounds)
    counts = -(-lengths // size)
    run = np.repeat(np.arange(lengths.size), counts)
    base = np.cumsum(counts) - counts
    first = bounds[run] + size * (np.arange(run.size) - base[run])
    end = np.minimum(first + size, bounds[run + 1])
    sample = np.searchsorted(edges, first, side="right") - 1
    of_token = np.repeat(np.arange(run.size), end - first)
    return Tiling(first, end, sample, np.searchsorted(sample, np.arange(edges.size)), of_token, end - first == size)


def _groups(rule: TokenRule, tiling: Tiling, code: Ints) -> _Groups:
    """Runs of tokens first, then equal runs of a tile: sorting sees few rows."""
    kept = np.flatnonzero(rule.valid)
    block = rule.block[kept]
    runs = _merge(_Groups(tiling.of_token[kept], rule.turn[kept], code[kept], block, block))
    order = np.lexsort((runs.code, runs.turn, runs.tile))
    return _merge(_Groups(*(column[order] for column in runs)))


def _merge(rows: _Groups) -> _Groups:
    """Neighbouring rows of one tile, turn and code become one."""
    if rows.tile.size == 0:
        return rows
    differs = np.zeros(rows.tile.size, dtype=bool)
    differs[0] = True
    for column in rows[:3]:
        differs[1:] |= column[1:] != column[:-1]
    at = np.flatnonzero(differs)
    low, high = np.minimum.reduceat(rows.low, at), np.maximum.reduceat(rows.high, at)
    return _Groups(rows.tile[at], rows.turn[at], rows.code[at], low, high)


def live_tiles(rule: TokenRule, queries: Tiling, keys: Tiling) -> TilePairs:
    """Compare the groups of every query tile with those of its sample's key tiles, a bounded number at a time."""
    query_groups, key_groups = _groups(rule, queries, rule.rule), _groups(rule, keys, rule.shift)
    # Key groups of a query group's sample, and cells: the key tiles that a query tile might meet.
    sample = queries.sample[query_groups.tile]
    begin, end = (np.searchsorted(keys.sample[key_groups.tile], sample, side=side) for side in ("left", "right"))
    width = end - begin
    group_at = np.searchsorted(query_groups.tile, np.arange(queries.first.size + 1))
    cells = np.diff(keys.base)[queries.sample] * (np.diff(group_at) > 0)
    cell_at = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(cells)))
    width_at = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(width)))
    found: list[tuple[Ints, Ints, Bools]] = []
    for a, b in _spans(width_at[group_at] + cell_at):
        rows = slice(group_at[a], group_at[b])
        each = width[rows]
        query = np.repeat(np.arange(rows.start, rows.stop), each)
        key = np.arange(query.size) + np.repeat(begin[rows] - (width_at[rows] - width_at[rows.start]), each)
        alive, whole = _compare(query_groups, key_groups, query, key)
        tile = query_groups.tile[query]
        cell = cell_at[tile] - cell_at[a] + key_groups.tile[key] - keys.base[queries.sample[tile]]
        live, partial = (np.zeros(cell_at[b] - cell_at[a], dtype=bool) for _ in range(2))
        live[cell[alive]] = True
        partial[cell[~whole]] = True
        cell = np.flatnonzero(live)
        tile = np.searchsorted(cell_at, cell + cell_at[a], side="right") - 1
        found.append((tile, cell + cell_at[a] - cell_at[tile] + keys.base[queries.sample[tile]], ~partial[cell]))
    if not found:
        none = np.zeros(0, dtype=np.int64)
        return TilePairs(none, none, none.astype(bool))
    return TilePairs(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def _spans(work_at: Ints) -> list[tuple[int, int]]:
    """Ranges of tiles of at most `_COMPARISONS_AT_ONCE` each, or of one tile. work_at: [n + 1] cumulative."""
    spans = []
    start, last = 0, work_at.size - 1
    while start < last:
        end = int(np.searchsorted(work_at, work_at[start] + _COMPARISONS_AT_ONCE, side="right")) - 1
        end = min(max(end, start + 1), last)
        spans.append((start, end))
        start = end
    return spans


def _compare(queries: _Groups, keys: _Groups, query: Ints, key: Ints) -> tuple[Bools, Bools]:
    """Of pairs of groups: whether any of their pairs may be allowed, and whether all are."""
    low_q, high_q, low_k, high_k = queries.low[query], queries.high[query], keys.low[key], keys.high[key]
    possible = (
        BEFORE * (low_k < high_q).astype(np.int64)
        + SAME * ((low_k <= high_q) & (low_q <= high_k))
        + AFTER * (high_k > low_q)
    )
    shift = keys.code[key]
    allowed = queries.code[query] >> shift
    turn_q, turn_k = queries.turn[query], keys.turn[key]
    same = turn_q == turn_k
    earlier = (shift >= CLEAN_SHIFT) & (turn_k < turn_q)
    return earlier | (same & (possible & allowed != 0)), earlier | (same & (possible & ~allowed == 0))


def tile_list(own: Ints, other: Ints, full: Bools, own_tiles: Tiling, other_tiles: Tiling) -> list[Ints]:
    """`programs` [n, 5] and `entries` [m, 2] of a TileList from tile pairs [m]."""
    count = own_tiles.first.size
    order = np.lexsort((other, ~full, own))
    live = np.bincount(own, minlength=count)
    ends = np.cumsum(live)
    begins = ends - live
    partial = begins + np.bincount(own[full], minlength=count)
    # Long programs start first, so that none of them is left over at the end.
    busiest = np.argsort(-live, kind="stable")
    programs = np.stack((own_tiles.first, own_tiles.end, begins, partial, ends), axis=1)[busiest]
    return [programs, np.stack((other_tiles.first, other_tiles.end), axis=1)[other[order]]]
