"""Input checks that golden data doesn't reach: dtypes, shapes, ids, types (T2, T7, T8)."""

import pytest
import torch

from lumina_ft.errors import DataError


def test_t2_half_precision_ids_are_refused_by_name(tiny_model, mixed_pack):
    for name in ("input_ids", "position_ids", "turn_ids", "block_ids", "type_ids", "cu_seqlens", "valid"):
        for dtype in (torch.bfloat16, torch.float16):
            with pytest.raises(DataError, match=f"{name} — {dtype} — cannot hold ids"):
                tiny_model(**mixed_pack | {name: mixed_pack[name].to(dtype)})


def test_t2_exact_floats_equal_integers_and_others_are_refused(tiny_model, mixed_pack):
    want = tiny_model(**mixed_pack).hidden
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(tiny_model(**mixed_pack | {"input_ids": mixed_pack["input_ids"].to(dtype)}).hidden, want)
    with pytest.raises(DataError, match="position_ids — torch.float32 — holds values that are not exact"):
        tiny_model(**mixed_pack | {"position_ids": mixed_pack["position_ids"] + 0.5})
    with pytest.raises(DataError, match="input_ids — torch.float32 — holds values that are not exact"):
        tiny_model(**mixed_pack | {"input_ids": mixed_pack["input_ids"].float() + 2.0**24})


def test_masks_hold_only_zero_and_one(tiny_model, mixed_pack):
    with pytest.raises(DataError, match="valid — values other than 0 and 1"):
        tiny_model(**mixed_pack | {"valid": mixed_pack["valid"].long() * 2})


@pytest.mark.parametrize(
    ("row", "ids", "message"),
    [
        (0, 64, r"input_ids — .* at sample 0, position 0 — text ids must be 0 to 63"),
        (6, 14, r"input_ids — .* at sample 0, position 6 — media ids must be 0 to 13"),
        (12, -1, r"input_ids — .* at sample 1, position 1 — text ids"),
    ],
)
def test_ids_out_of_range_name_sample_and_position(tiny_model, mixed_pack, row, ids, message):
    changed = mixed_pack["input_ids"].clone()
    changed[row] = ids
    with pytest.raises(DataError, match=message):
        tiny_model(**mixed_pack | {"input_ids": changed})


def test_unknown_types_are_refused(tiny_model, mixed_pack):
    changed = mixed_pack["type_ids"].clone()
    changed[3] = 5
    with pytest.raises(DataError, match="type_ids — 5 at sample 0, position 3 — must be 0 to 4"):
        tiny_model(**mixed_pack | {"type_ids": changed})


def test_media_in_a_text_only_model_is_refused(text_model, text_only_pack):
    changed = text_only_pack["type_ids"].clone()
    changed[2] = 2
    with pytest.raises(DataError, match="input_ids .* at sample 0, position 2 — media ids"):
        text_model(**text_only_pack | {"type_ids": changed})


def test_shapes_that_fit_nothing_are_refused(tiny_model, mixed_pack):
    with pytest.raises(DataError, match=r"input_ids — shape \[26, 3\]"):
        tiny_model(**mixed_pack | {"input_ids": mixed_pack["input_ids"][:, :3]})
    with pytest.raises(DataError, match=r"turn_ids — shape \[25\] — must be \[1, 26\] or \[26\]"):
        tiny_model(**mixed_pack | {"turn_ids": mixed_pack["turn_ids"][:-1]})


def test_surprise_5_metadata_without_bounds_is_refused(tiny_model, mixed_pack):
    without = {k: v for k, v in mixed_pack.items() if k != "cu_seqlens"}
    with pytest.raises(DataError, match="cu_seqlens — missing — turn_ids, is_clean, block_ids mean nothing"):
        tiny_model(**without)


def test_an_explicit_mask_contradicts_bounds(tiny_model, mixed_pack):
    mask = torch.ones(26, 26, dtype=torch.bool)
    with pytest.raises(DataError, match="allowed — given with cu_seqlens"):
        tiny_model(**mixed_pack, allowed=mask)
    bare = {k: mixed_pack[k] for k in ("input_ids", "type_ids")}
    with pytest.raises(DataError, match=r"allowed — shape \[5, 5\]"):
        tiny_model(**bare, allowed=mask[:5, :5])


def test_a_sequence_equal_to_the_codebooks_is_read_by_its_types(tiny_model):
    """S == C: the shape of type_ids says whether ids are [S, C] or [B, S]."""
    ids = torch.randint(0, 60, (4, 1)).repeat(1, 4)
    columns = tiny_model(ids, type_ids=torch.ones(4, dtype=torch.int64)).hidden
    single = tiny_model(ids[:, 0].unsqueeze(0), type_ids=torch.ones(1, 4, dtype=torch.int64)).hidden
    assert torch.equal(columns, single)


def test_t3_label_shapes(tiny_model, mixed_pack):
    want = tiny_model(**mixed_pack).losses
    got = tiny_model(**mixed_pack | {"labels": mixed_pack["labels"].unsqueeze(0)}).losses
    assert all(torch.equal(got[name].total, want[name].total) for name in want)
    for labels in (mixed_pack["labels"][:-1], mixed_pack["labels"][:, :3], mixed_pack["labels"][:-1, 0]):
        with pytest.raises(DataError, match=r"labels — shape .* must be \[1, 26, 4\], \[26, 4\] or \[1, 26\]"):
            tiny_model(**mixed_pack | {"labels": labels})


def test_t3_labels_without_codebooks_serve_text_only(tiny_model, packs):
    pack = packs["text"]
    want = tiny_model(**pack).losses["text"]
    for labels in (pack["labels"][:, 0], pack["labels"][:, 0].unsqueeze(0)):
        got = tiny_model(**pack | {"labels": labels}).losses["text"]
        assert torch.equal(got.total, want.total) and int(got.count) == int(want.count)


@pytest.mark.parametrize(
    ("row", "value", "message"),
    [
        (6, -5, r"labels — \[-5, .*\] at sample 0, position 6 — code out of range — must be 0 to 7"),
        (6, 8, r"at sample 0, position 6 — code out of range"),
        (16, 64, r"at sample 1, position 5 — id out of range — must be -100 or 0 to 63"),
        (16, -1, r"at sample 1, position 5 — id out of range"),
    ],
)
def test_t3_labels_out_of_range_name_sample_and_position(tiny_model, mixed_pack, row, value, message):
    labels = mixed_pack["labels"].clone()
    labels[row] = value
    with pytest.raises(DataError, match=message):
        tiny_model(**mixed_pack | {"labels": labels})


def test_two_rows_share_bounds_and_report_the_right_sample(tiny_model, mixed_pack):
    rows = {k: v if k == "cu_seqlens" else torch.stack((v, v)) for k, v in mixed_pack.items()}
    one, two = tiny_model(**mixed_pack), tiny_model(**rows)
    torch.testing.assert_close(two.hidden[26:], one.hidden, rtol=0, atol=1e-6)
    torch.testing.assert_close(two.losses["image"].total, 2 * one.losses["image"].total)
    rows["labels"][1, 6] = 9
    with pytest.raises(DataError, match="at sample 2, position 6"):
        tiny_model(**rows)
