"""Which layers a configuration adapts, and how PEFT's short names are found (D5)."""

import pytest
from lora_fixtures import meta_model
from rich.console import Console

from lumina_ft.adapters.targets import plan_targets, short_names, summarise_targets, targets_table
from lumina_ft.config.lora_schema import LoraConfig
from lumina_ft.errors import ConfigError


def modules(**options) -> list[str]:
    return [target.module for target in plan_targets(meta_model(), LoraConfig(**options))]


def test_D5_groups_name_their_linear_layers_in_the_models_order():
    found = modules(targets=("shared_experts", "attention"))
    assert found[:3] == [
        "model.layers.0.attention.query_key_value",
        "model.layers.0.attention.dense",
        "model.layers.1.attention.query_key_value",
    ]
    assert found[-1] == "model.layers.1.mlp.shared_experts.down_proj"
    assert modules(targets=("image_heads",)) == ["lm_img_head.0", "lm_img_head.1", "lm_img_head.2"]
    assert modules(targets=("image_projection", "lm_head")) == ["model.img_embeddings_proj", "lm_head"]
    assert "multi_codebook_head.channel_blocks.0.adaLN_modulation.1" in modules(targets=("codebook_head",))


def test_names_are_dotted_suffixes_or_full_names():
    assert modules(targets=("attention.dense",)) == [f"model.layers.{i}.attention.dense" for i in range(2)]
    assert modules(targets=("model.layers.1.attention.dense",)) == ["model.layers.1.attention.dense"]
    # Not a part of a component: `dense` isn't `_dense` or `densely`.
    assert modules(targets=("mlp.gate_proj",)) == ["model.layers.0.mlp.gate_proj"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("attentoin", "'attentoin' — matches no module of the model; did you mean 'attention'"),
        ("attention.query_key_valeu", "did you mean 'attention.query_key_value'"),
        ("norms", "'norms' — this model has no linear layer in that group — use image_projection, "),
        ("heads", "an alias isn't taken here.*name lm_head, image_heads, codebook_head"),
        ("mlp.gate", "model.layers.1.mlp.gate is a Router; adapters go on linear layers"),
        ("lm_img_head", "lm_img_head is a ModuleList"),
        ("mlp.experts", r"is a PackedExperts; .* — name mlp.experts.gate_proj, mlp.experts.up_proj, mlp.experts.down"),
        ("experts.gate_prj", "did you mean 'experts.gate_proj'"),
    ],
)
def test_D5_a_target_that_matches_nothing_is_an_error(target, message):
    with pytest.raises(ConfigError, match=f"lora.targets — {message}" if message[0] == "'" else message):
        modules(targets=("attention", target))


def test_ranks_and_scales_per_target():
    cfg = LoraConfig(
        rank=4,
        alpha=8,
        targets=("attention", "shared_experts"),
        rank_pattern={"model.layers.1.attention.dense": 3, "attention.dense": 2},
        alpha_pattern={"shared_experts": 6},
    )
    found = {t.module: (t.rank, t.scale) for t in plan_targets(meta_model(), cfg)}
    assert found["model.layers.0.attention.query_key_value"] == (4, 2.0)
    assert found["model.layers.0.attention.dense"] == (2, 4.0)
    assert found["model.layers.1.attention.dense"] == (3, 8 / 3)
    assert found["model.layers.1.mlp.shared_experts.up_proj"] == (4, 1.5)
    stabilised = plan_targets(meta_model(), LoraConfig(rank=4, alpha=8, use_rslora=True))
    assert {target.scale for target in stabilised} == {4.0}


@pytest.mark.parametrize("pattern", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_for_nothing_is_an_error(pattern):
    with pytest.raises(ConfigError, match=rf"lora.{pattern} — 'atention.dense' — matches no module .*did you mean"):
        modules(targets=("attention",), **{pattern: {"atention.dense": 2}})
    with pytest.raises(ConfigError, match=f"lora.{pattern} — 'lm_head' — names none of the adapted layers"):
        modules(targets=("attention",), **{pattern: {"lm_head": 2}})


def test_a_target_inside_modules_to_save_is_an_error():
    with pytest.raises(ConfigError, match=r"lora.targets — 'lm_head' — lm_head: in lora.modules_to_save \('heads'\)"):
        modules(targets=("attention", "lm_head"), modules_to_save=("heads",))


def test_pissa_refuses_more_singular_vectors_than_there_are():
    assert modules(targets=("attention",), rank=16, init="pissa")
    with pytest.raises(ConfigError, match="lora.rank — 17 for model.layers.0.attention.query_key_value of 16 x 32"):
        modules(targets=("attention",), rank=17, init="pissa")


def test_table_counts_modules_and_parameters():
    targets = plan_targets(meta_model(), LoraConfig(rank=4, alpha=8, targets=("attention",), use_dora=True))
    rows = summarise_targets(targets)
    assert [tuple(row) for row in rows] == [
        ("attention", 2, 16, 32, 4, 2 * (4 * 48 + 32), 0),
        ("attention", 2, 16, 16, 4, 2 * (4 * 32 + 16), 0),
    ]
    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    console.print(targets_table(rows))
    text = console.export_text()
    assert "16 x 32" in text and f"{2 * (4 * 48 + 32) + 2 * (4 * 32 + 16)}" in text


def test_short_names_select_exactly_the_chosen():
    universe = ["a.x.up", "a.y.up", "a.y.gate", "b.x.up", "head"]
    assert short_names(["a.y.gate"], universe) == ["gate"]
    assert short_names(["a.x.up", "b.x.up"], universe) == ["x.up"]
    assert short_names(["a.x.up", "a.y.up"], universe) == ["a.x.up", "y.up"]
    assert short_names(["head"], [*universe, "b.head"]) == ["head"]
