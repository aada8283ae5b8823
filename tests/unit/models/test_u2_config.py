"""Configurations: published, shipped, refused (M9)."""

import json

import pytest
import torch

from lumina_ft.errors import ConfigError
from lumina_ft.models.u2_config import U2Config
from lumina_ft.tokens import PUBLISHED_MEDIA_IDS, PUBLISHED_TEXT_IDS

PUBLISHED = {
    "model_type": "llada2_moe",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.3",
    "rotary_dim": 64,
    "rope_scaling": None,
    "num_codebooks": 8,
    "use_rmsnorm": True,
    "auto_map": {"AutoConfig": "configuration_internluminau2.X"},
}


def write(tmp_path, **changes):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED | changes))
    return path


def test_m9_published_values_are_the_defaults(tmp_path):
    config = U2Config.load(write(tmp_path))
    assert (config.hidden_size, config.num_experts, config.head_dim, config.rotary_dim) == (2048, 256, 128, 64)
    assert (config.image_embedding_rows, config.image_head_classes, config.ar_head_depth) == (5010, 4096, 6)
    assert config.dtype == torch.bfloat16
    assert (config.id_columns, config.num_moe_layers, config.codebook_size) == (8, 19, 4096)


def test_a_directory_and_a_shipped_name_load(tmp_path):
    write(tmp_path)
    assert U2Config.load(tmp_path).num_codebooks == 8
    assert U2Config.load("u2-tiny").token_spec().num_codebooks == 8


def test_null_codebooks_mean_text_only(tmp_path):
    config = U2Config.load(write(tmp_path, num_codebooks=None))
    assert not config.has_image and config.id_columns == 1
    content = {k: v for k, v in PUBLISHED.items() if k != "num_codebooks"}
    assert not U2Config(**content).has_image


def test_unknown_keys_survive_a_round_trip(tmp_path):
    config = U2Config.load(write(tmp_path, num_experts=128, n_group=4))
    config.save_pretrained(tmp_path / "again")
    again = U2Config.load(tmp_path / "again")
    assert again.auto_map == PUBLISHED["auto_map"] and again.use_rmsnorm is True
    assert (again.num_experts, again.n_group, again.num_codebooks) == (128, 4, 8)
    assert again.to_dict() == config.to_dict()


def test_ids_are_published_for_the_published_vocabulary_only(tmp_path):
    spec = U2Config.load(write(tmp_path)).token_spec()
    assert (spec.text, spec.media, spec.num_codebooks) == (PUBLISHED_TEXT_IDS, PUBLISHED_MEDIA_IDS, 8)
    with pytest.raises(ConfigError, match="text_ids — missing"):
        U2Config.load(write(tmp_path, vocab_size=512, pad_token_id=508)).token_spec()


def test_older_and_newer_rotary_keys_are_read(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1234.0}
    assert U2Config.load(write(tmp_path, rope_parameters=rope)).rope_theta == 1234.0
    with pytest.raises(ConfigError, match="rope_scaling .* only plain rotary"):
        U2Config.load(write(tmp_path, rope_scaling={"rope_type": "yarn", "factor": 4.0}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score_function": "softmax"}, "score_function — 'softmax' — only 'sigmoid'"),
        ({"router_dtype": "bf16"}, "router_dtype — 'bf16' — only 'fp32'"),
        ({"norm_topk_prob": False}, "norm_topk_prob — False"),
        ({"hidden_act": "gelu"}, "hidden_act — 'gelu'"),
        ({"use_qkv_bias": True}, "use_qkv_bias — True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings — True"),
        ({"attention_dropout": 0.1}, "attention_dropout — 0.1"),
        ({"num_shared_experts": 0}, "num_shared_experts — 0 — must be null"),
        ({"hidden_size": "2048"}, "hidden_size — '2048' — must be an integer"),
        ({"num_experts": 0}, "num_experts — 0 — must be an integer of at least 1"),
        ({"num_codebooks": 8.5}, "num_codebooks — 8.5"),
        ({"n_group": 7}, "n_group — 7 — must divide num_experts=256"),
        ({"topk_group": 9}, "topk_group — 9 — must be at most 8"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok — 129 — must be at most 128"),
        ({"n_group": 256, "topk_group": 8}, "n_group — 256 — a group is scored by its two best"),
        ({"num_key_value_heads": 5}, "num_key_value_heads — 5 — must divide num_attention_heads=16"),
        ({"first_k_dense_replace": 21}, "first_k_dense_replace — 21"),
        ({"partial_rotary_factor": 1.5, "rotary_dim": 192}, "partial_rotary_factor — 1.5"),
        ({"rotary_dim": 32}, "rotary_dim — 32 — must be head_dim"),
        ({"pad_token_id": 157184}, "pad_token_id — 157184"),
        ({"ar_head_heads": 7}, "ar_head_heads — 7 — must divide hidden_size=2048"),
        ({"codebook_size": 64}, "codebook_size — 64 — must equal image_head_classes=4096"),
        ({"image_embedding_rows": 4000}, "image_head_classes — 4096 — must be at most 4000"),
        ({"model_type": "llama"}, "model_type — 'llama' — must be one of llada2_moe"),
    ],
)
def test_unsupported_values_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        U2Config.load(write(tmp_path, **changes))


def test_missing_and_broken_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="u2-tinny — no such file or shipped name; did you mean 'u2-tiny'"):
        U2Config.load("u2-tinny")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json — Expecting"):
        U2Config.load(tmp_path)
