"""Parity of the attention rule: masks are exact (T6, T7)."""

import pytest
import torch
from torch import Tensor

from lumina_ft.errors import DataError
from lumina_ft.kernels import SegmentedPlan, allowed_mask, plan_segments

LAYOUTS = (
    "text_multi_turn",
    "t2i",
    "understand",
    "edit",
    "edit_multi_turn",
    "mixed_pack_tail",
    "legacy_no_block_ids",
    "block_ids_all_negative",
    "segments_only",
    "turn_ids_without_is_clean",
    "is_clean_without_turn_ids",
    "short_metadata",
    "long_metadata",
    "cu_shorter_but_valid_tail",
    "cu_longer_than_sequence",
    "inner_padding",
    "random_metadata_0",
    "random_metadata_1",
)
REFUSED = {
    "short_metadata": "is_clean . shape",
    "long_metadata": "is_clean . shape",
    "cu_shorter_but_valid_tail": "valid",
    "cu_longer_than_sequence": "cu_seqlens",
}
METADATA = ("turn_ids", "is_clean", "block_ids")


def layout(golden, name: str) -> dict[str, Tensor]:
    """Arguments of the rule. What the model refuses is spelled out as the published code reads it."""
    given = golden.inputs("attention_mask", f"{name}.")
    tokens = given["type_ids"].numel()
    out = {k: v.flatten() for k, v in given.items() if k not in METADATA}
    for key in METADATA:
        if key in given:
            padded = torch.zeros(tokens, dtype=torch.int64)
            cut = given[key].flatten()[:tokens]
            padded[: cut.numel()] = cut
            out[key] = padded
    bounds = out["cu_seqlens"].clone()
    if name in ("cu_shorter_but_valid_tail", "cu_longer_than_sequence"):
        bounds[-1] = tokens
    out["cu_seqlens"] = bounds
    out["valid"] = out["valid"].bool()
    return out


def dense_of(plan: SegmentedPlan, tokens: int) -> Tensor:
    """The mask that a segmented plan stands for."""
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    at = 0
    for bucket in plan.buckets:
        size = bucket.samples * bucket.length
        slots = plan.slot_token[at : at + size].view(bucket.samples, bucket.length)
        used = torch.ones_like(slots, dtype=torch.bool)
        if plan.unused_slots is not None:
            used = ~plan.unused_slots[at : at + size].view(used.shape)
        for sample in range(bucket.samples):
            rows = slots[sample][used[sample]]
            allowed = bucket.bias[sample, 0][used[sample]][:, used[sample]] == 0
            mask[rows.unsqueeze(1), rows.unsqueeze(0)] = allowed
        at += size
    return mask & ~plan.silent_tokens.view(-1, 1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_reference_mask_is_exact(golden, name):
    given = layout(golden, name)
    types = given.pop("type_ids")
    assert torch.equal(allowed_mask(types, **given), golden.tensors("attention_mask")[f"{name}.allowed"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_segmented_plan_is_exact(golden, name):
    given = layout(golden, name)
    tokens = given["type_ids"].numel()
    bounds = given["cu_seqlens"].tolist()
    zeros = torch.zeros(tokens, dtype=torch.int64)
    plan = plan_segments(
        bounds[:-1],
        [b - a for a, b in zip(bounds[:-1], bounds[1:], strict=True)],
        type_ids=given["type_ids"],
        turn_ids=given.get("turn_ids", zeros),
        block_ids=given.get("block_ids", zeros - 1),
        is_clean=given.get("is_clean", zeros).bool(),
        valid=given["valid"],
        has_metadata="turn_ids" in given or "is_clean" in given,
        dtype=torch.float32,
    )
    assert torch.equal(dense_of(plan, tokens), golden.tensors("attention_mask")[f"{name}.allowed"])


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_surprises_6_7_9_malformed_metadata_is_refused(golden, name):
    given = golden.inputs("attention_mask", f"{name}.")
    model = golden.model()
    ids = torch.zeros(1, given["type_ids"].numel(), model.config.id_columns, dtype=torch.int64)
    with pytest.raises(DataError, match=REFUSED[name]):
        model(ids, **given)


def test_surprise_4_zeros_in_the_mask_do_not_make_attention_causal(golden):
    """Without cu_seqlens the published code turns causal as soon as one key is masked; ours stays bidirectional."""
    stored = golden.tensors("attention_mask")
    valid = stored["no_cu_with_zeros.attention_mask"].flatten().bool()
    causal = stored["no_cu_with_zeros.allowed"]
    tokens = valid.numel()
    pairs = valid.unsqueeze(0) & valid.unsqueeze(1)
    assert torch.equal(causal & valid.unsqueeze(1), pairs.tril())
    bounds = torch.tensor([0, tokens])
    ours = allowed_mask(torch.ones(tokens, dtype=torch.int64), cu_seqlens=bounds, valid=valid)
    assert torch.equal(ours, pairs)


def test_surprise_9_a_sample_never_changes_the_rule_of_another(golden):
    """Block ids switch the published rule for the whole batch; here each sample decides for itself."""
    given = layout(golden, "mixed_pack_tail")
    types = given.pop("type_ids")
    bounds = given["cu_seqlens"].tolist()
    alone = allowed_mask(types, **{**given, "block_ids": torch.full_like(given["block_ids"], -1)})
    mixed = given["block_ids"].clone()
    mixed[bounds[1] :] = -1
    got = allowed_mask(types, **{**given, "block_ids": mixed})
    rest = slice(bounds[1], None)
    assert torch.equal(got[rest, rest], alone[rest, rest])
    first = slice(0, bounds[1])
    assert torch.equal(got[first, first], allowed_mask(types, **given)[first, first])
