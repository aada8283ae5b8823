"""Names of tensors in the split and packed layouts (spec §1)."""

import pytest

from lumina_ft.errors import CheckpointError
from lumina_ft.models.hf_keys import detect_layout, is_stacked_experts, parse_packed, parse_split, split_key

PACKED = "model.layers.1.mlp.experts.gate_proj"


def test_split_key_names_one_expert_and_parses_back():
    key = split_key(PACKED, 12)
    assert key == "model.layers.1.mlp.experts.12.gate_proj.weight"
    assert parse_split(key) == (PACKED, 12)


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.mlp.shared_experts.gate_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "multi_codebook_head.channel_blocks.0.mlp.fc1.weight",
    ],
)
def test_dense_and_shared_mlp_are_not_routed_experts(key: str):
    assert parse_split(key) is None and parse_packed(key) is None and not is_stacked_experts(key)


def test_packed_names_are_accepted_with_the_weight_suffix_of_other_tools():
    assert parse_packed(PACKED + ".weight") == parse_packed(PACKED) == PACKED
    assert is_stacked_experts(PACKED) and not is_stacked_experts(PACKED + ".weight")


def test_t12_layout_follows_from_the_keys():
    common = ["model.norm.weight", "lm_head.weight"]
    assert detect_layout([*common, split_key(PACKED, 0)], "here") == "split"
    assert detect_layout([*common, PACKED], "here") == "packed"
    assert detect_layout(common, "here") == "packed"


def test_mixed_layouts_are_refused_naming_both_keys():
    with pytest.raises(CheckpointError, match=r"DIR — .*experts\.3\.gate_proj\.weight.*experts\.gate_proj'"):
        detect_layout([split_key(PACKED, 3), PACKED], "DIR")
