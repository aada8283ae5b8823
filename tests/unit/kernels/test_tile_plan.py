"""The host's plan of attention tiles: what it covers, how exact it is, what it costs (T6, T7)."""

import time
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lumina_ft.kernels.attention import tile_pairs
from lumina_ft.kernels.attention.ref import allowed_mask
from lumina_ft.kernels.attention.tile_plan import live_pairs, pack_of, plan_bidirectional, plan_causal, plan_tiles
from lumina_ft.kernels.launch import record_launches

BLOCK = 32
# Prompt length, then (tokens, turn, type, clean) of the other parts: the packs of the published model's recipes.
SAMPLES = {
    "text": [(256, 0, 1, True), (896, 1, 3, False), (896, 1, 3, True)],
    "noisy and clean": [(1024, 1, 3, False), (1024, 1, 3, True)],
    "two turns": [
        (128, 0, 1, True),
        (384, 1, 3, False),
        (128, 2, 1, True),
        (512, 3, 3, False),
        (384, 1, 3, True),
        (512, 3, 3, True),
    ],
    "image": [(256, 0, 1, True), (1792, 1, 4, False)],
}


def sample(parts):
    """Metadata of one sample; text answers have blocks of 32."""
    columns = [
        torch.stack(
            (
                torch.full((n,), kind),
                torch.full((n,), turn),
                torch.arange(n) // BLOCK if kind == 3 else torch.full((n,), -1),
                torch.full((n,), int(clean)),
            )
        )
        for n, turn, kind, clean in parts
    ]
    types, turns, blocks, clean = torch.cat(columns, dim=1)
    valid = torch.ones_like(types, dtype=torch.bool)
    return {"type_ids": types, "turn_ids": turns, "block_ids": blocks, "is_clean": clean.bool(), "valid": valid}


def pack(meta, count):
    return [len(meta["valid"])] * count, {name: column.repeat(count) for name, column in meta.items()}


def plan_of(lengths, meta, *, has_metadata=True, head_dim=16, dtype=torch.float32, heads_per_key=1):
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    sizes: dict[str, Any] = {"head_dim": head_dim, "dtype": dtype, "heads_per_key": heads_per_key}
    return plan_tiles(starts, lengths, **meta, has_metadata=has_metadata, **sizes)


def gpu_plan(lengths, meta):
    """As on a Hopper GPU, for the heads of the published model."""
    with record_launches("sm_90"):
        return plan_of(lengths, meta, head_dim=128, dtype=torch.bfloat16, heads_per_key=4)


def mask_of(plan):
    """The rule as the kernels evaluate it, for all pairs."""
    turn, block, rule, shift = plan.meta.long()
    order = (block >= block[:, None]).long() + (block > block[:, None]).long()
    by_rule = (rule[:, None] >> (shift + order)) & 1 != 0
    return ((shift >= 9) & (turn < turn[:, None])) | ((turn == turn[:, None]) & by_rule)


def cover(tiles, tokens, by_key):
    """(how often each pair is computed, how often without a mask), both [T, T]."""
    live, full = torch.zeros(2, tokens, tokens, dtype=torch.int64)
    own = torch.zeros(tokens, dtype=torch.int64)
    for first, end, begin, partial, stop in tiles.programs.tolist():
        own[first:end] += 1
        for i, (other, other_end) in enumerate(tiles.entries[begin:stop].tolist()):
            rows, columns = slice(first, end), slice(other, other_end)
            area = (columns, rows) if by_key else (rows, columns)
            live[area] += 1
            full[area] += begin + i < partial
    assert (own == 1).all(), "every token has one program"
    return live, full


def assert_covers(plan, allowed):
    tokens = allowed.shape[0]
    for tiles, by_key in ((plan.forward, False), (plan.dq, False), (plan.dkv, True)):
        live, full = cover(tiles, tokens, by_key)
        assert live.max() <= 1
        assert torch.equal((full > 0) | ((live > 0) & mask_of(plan)), allowed)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    tail=st.integers(0, 20),
    invalid=st.integers(0, 5),
    has_metadata=st.booleans(),
    heads_per_key=st.sampled_from((1, 2, 4, 6)),
    seed=st.integers(0, 10_000),
)
def test_each_allowed_pair_is_computed_once_and_no_other(lengths, tail, invalid, has_metadata, heads_per_key, seed):
    gen = torch.Generator().manual_seed(seed)
    tokens = sum(lengths) + tail
    valid = torch.arange(tokens) < sum(lengths)
    valid[torch.randint(0, tokens, (invalid,), generator=gen)] = False
    meta = {
        "type_ids": torch.randint(0, 5, (tokens,), generator=gen),
        "turn_ids": torch.randint(0, 3, (tokens,), generator=gen) * 2**33,
        "block_ids": torch.randint(-1, 3, (tokens,), generator=gen) * int(torch.randint(0, 2, (1,), generator=gen)),
        "is_clean": torch.rand(tokens, generator=gen) < 0.5,
        "valid": valid,
    }
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    kept = meta if has_metadata else {"type_ids": meta["type_ids"], "valid": valid}
    plan = plan_of(lengths, meta, has_metadata=has_metadata, heads_per_key=heads_per_key)
    assert_covers(plan, allowed_mask(**kept, cu_seqlens=bounds))


@pytest.mark.parametrize("causal", [True, False])
def test_uniform_masks(causal):
    valid = torch.ones(90, dtype=torch.bool)
    valid[[3, 40, 41, 89]] = False
    plan = (plan_causal if causal else plan_bidirectional)(
        [0, 33], [33, 57], valid=valid, head_dim=8, dtype=torch.float32
    )
    allowed = allowed_mask(torch.ones(90, dtype=torch.int64), cu_seqlens=torch.tensor([0, 33, 90]), valid=valid)
    assert_covers(plan, allowed.tril() if causal else allowed)


@pytest.mark.parametrize("name", SAMPLES)
def test_tiles_are_exact_where_blocks_are_contiguous(name):
    meta = sample([(n // 4 + 3, *rest) for n, *rest in SAMPLES[name]])
    lengths, meta = pack(meta, 1)
    plan = plan_of(lengths, meta)
    allowed = allowed_mask(**meta, cu_seqlens=torch.tensor([0, *lengths]))
    for tiles, by_key in ((plan.forward, False), (plan.dkv, True)):
        for first, end, begin, partial, stop in tiles.programs.tolist():
            for i, (other, other_end) in enumerate(tiles.entries[begin:stop].tolist()):
                area = (
                    (slice(other, other_end), slice(first, end))
                    if by_key
                    else (slice(first, end), slice(other, other_end))
                )
                assert allowed[area].any()
                complete = other_end - other == (tiles.block_m if by_key else tiles.block_n)
                assert (begin + i < partial) == (bool(allowed[area].all()) and complete)


def test_busy_programs_come_first_and_full_tiles_before_partial_ones():
    lengths, meta = pack(sample(SAMPLES["text"]), 2)
    programs = plan_of(lengths, meta).forward.programs
    begin, partial, stop = programs[:, 2:].unbind(1)
    assert (begin <= partial).all() and (partial <= stop).all()
    assert ((stop - begin).diff() <= 0).all()


def test_comparing_in_small_portions_changes_nothing(monkeypatch):
    lengths, meta = pack(sample([(n // 4 + 3, *rest) for n, *rest in SAMPLES["two turns"]]), 2)
    want = plan_of(lengths, meta)
    monkeypatch.setattr(tile_pairs, "_COMPARISONS_AT_ONCE", 7)
    got = plan_of(lengths, meta)
    assert torch.equal(got.forward.entries, want.forward.entries)
    assert torch.equal(got.dkv.programs, want.dkv.programs)


@pytest.mark.parametrize("name", SAMPLES)
def test_t7_live_share_is_near_the_exact_share(name):
    lengths, meta = pack(sample(SAMPLES[name]), 8)
    plan = gpu_plan(lengths, meta)
    one = {key: column[: lengths[0]] for key, column in meta.items()}
    exact = 8 * int(allowed_mask(**one, cu_seqlens=torch.tensor([0, lengths[0]])).sum())
    for tiles in (plan.forward, plan.dq, plan.dkv):
        assert exact <= live_pairs(tiles) <= 1.2 * exact


class _LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any torch operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


def cost(count):
    """(plan, peak bytes, elements of its largest torch tensor, seconds) for `count` text samples of 2,048 tokens."""
    lengths, meta = pack(sample(SAMPLES["text"]), count)
    # What the first call imports is not the plan's memory.
    with _LargestTensor():
        gpu_plan(lengths, meta)
    tracemalloc.start()
    try:
        start = time.process_time()
        with _LargestTensor() as largest:
            plan = gpu_plan(lengths, meta)
        seconds = time.process_time() - start
        return plan, tracemalloc.get_traced_memory()[1], largest.elements, seconds
    finally:
        tracemalloc.stop()


def test_t7_cost_is_linear_up_to_65536_tokens():
    small, large = cost(4), cost(32)
    tokens = 32 * 2048
    assert large[0].forward.entries.shape[0] == 8 * small[0].forward.entries.shape[0]
    # Portions of a bounded size come on top of what grows with the tokens.
    assert large[1] <= 8 * small[1] + 1e6
    # An S x S table would take 4 GB as bytes.
    assert large[1] <= 200e6
    assert large[2] <= 32 * tokens
    assert large[3] <= 5.0


def test_one_sample_of_65536_tokens_stays_within_memory():
    parts = [(4096, 0, 1, True), (30720, 1, 3, False), (30720, 1, 3, True)]
    lengths, meta = pack(sample(parts), 1)
    tracemalloc.start()
    try:
        gpu_plan(lengths, meta)
        assert tracemalloc.get_traced_memory()[1] <= 200e6
    finally:
        tracemalloc.stop()


def test_a_plan_for_another_device_leaves_the_metadata_where_it_is():
    lengths, meta = pack(sample(SAMPLES["image"]), 1)
    with record_launches("sm_80"):
        plan = plan_tiles(
            [0], lengths, **meta, has_metadata=True, head_dim=64, dtype=torch.bfloat16, device=torch.device("meta")
        )
    parts = (plan.meta, *(x for tiles in (plan.forward, plan.dq, plan.dkv) for x in (tiles.programs, tiles.entries)))
    assert all(x.device.type == "meta" and x.dtype == torch.int32 for x in parts)
    # Kernels load these with the alignment of memory of their own.
    assert all(x.storage_offset() % 4 == 0 for x in parts)


@pytest.mark.parametrize(("heads", "pack"), [(1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (7, 1), (8, 4), (12, 4)])
def test_heads_in_a_tile(heads, pack):
    assert pack_of(heads) == pack
