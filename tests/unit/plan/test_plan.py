"""`lumina-ft plan` reproduces the published parameter arithmetic without allocating it (M9)."""

import json

import pytest
from rich.console import Console

from lumina_ft.plan.model import describe_model, print_plan

PUBLISHED_GROUPS = {
    "text_embeddings": 321912832,
    "image_embeddings": 82083840,
    "image_embeddings_proj": 33554432,
    "attention_qkv_and_dense": 209715200,
    "attention_qk_norm": 5120,
    "layer_norms_and_final_norm": 83968,
    "dense_mlp_layer0": 31457280,
    "router_gate_weight": 9961472,
    "shared_experts": 59768832,
    "routed_experts": 15300820992,
    "lm_head": 321912832,
    "lm_img_head": 67108864,
    "multi_codebook_head": 465850368,
}


@pytest.fixture
def published(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llada2_moe", "num_codebooks": 8, "rotary_dim": 64}))
    return path


def test_m9_published_size_table(published):
    plan = describe_model(published)
    assert plan["groups"] == PUBLISHED_GROUPS
    assert plan["total_parameters"] == 16_904_236_032
    assert plan["without_image_parts"] == 16_255_638_528
    assert plan["without_routed_experts"] == 1_603_415_040
    assert plan["decoder_layers"] == 15_611_810_816
    assert plan["active_per_token"] == {
        "layers": 789_142_528,
        "layers_and_lm_head": 1_111_055_360,
        "routed_experts": 478_150_656,
    }
    assert plan["per_layer"] == {
        "dense_layer": 41_947_392,
        "moe_layer": 819_466_496,
        "routed_experts_of_layer": 805_306_368,
        "one_expert": 3_145_728,
    }
    assert plan["persistent_buffers"] == 4864 + 64
    assert plan["tensors"] == {"packed_parameters": 392, "split_parameters": 14927, "buffers": 20}
    assert sum(plan["units"].values()) == plan["total_parameters"]


def test_text_only_plan_has_no_image_rows(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llada2_moe"}))
    plan = describe_model(tmp_path)
    assert plan["total_parameters"] == 16_255_638_528
    assert plan["image_parts"] == 0 and "lm_img_head" not in plan["groups"]


def test_table_prints_every_row_with_thousands(published):
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_plan(describe_model(published), console)
    text = console.export_text()
    for group, size in PUBLISHED_GROUPS.items():
        assert group in text and f"{size:,}" in text
    assert "16,904,236,032" in text and "33.81 GB" in text
