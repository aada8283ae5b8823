"""Ids of a model, read from its config.json."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lumina_ft.data.token_spec import demo_spec, demo_table, model_table, read_model_table
from lumina_ft.errors import ConfigError
from lumina_ft.tokens import PUBLISHED_MEDIA_IDS, PUBLISHED_TEXT_IDS

SHIPPED = Path(__file__).parents[3] / "lumina_ft" / "models" / "configs" / "u2-tiny.json"


def small_config(**changes: Any) -> dict[str, Any]:
    spec = demo_spec()
    base = {"vocab_size": 512, "num_codebooks": 8, "text_ids": asdict(spec.text), "media_ids": asdict(spec.media)}
    return base | changes


def test_published_vocabulary_has_the_published_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 157184, "num_codebooks": 8}))
    table = read_model_table(tmp_path)
    assert (table.spec.text, table.spec.media, table.vocab_rows) == (PUBLISHED_TEXT_IDS, PUBLISHED_MEDIA_IDS, 157184)


def test_own_tables_are_read_and_win_over_the_published_ones() -> None:
    assert model_table(small_config(), "c").spec == demo_spec()
    assert model_table(small_config(vocab_size=157184), "c").spec == demo_spec()
    assert model_table(small_config(vocab_size=600, text_rows=512), "c").vocab_rows == 512


def test_shipped_tiny_model_agrees_with_the_demo() -> None:
    assert read_model_table(SHIPPED).spec == demo_table().spec
    assert read_model_table(SHIPPED).vocab_rows == demo_table().vocab_rows


def test_demo_media_ids_follow_the_codes() -> None:
    media = demo_spec(codes=16, codebooks=4).media
    assert list(asdict(media).values()) == [16, 16, 17, 18, 19, 20, 21]
    assert demo_spec(codes=16, codebooks=4).num_codebooks == 4


def test_text_only_config_has_one_column_and_needs_no_media_ids() -> None:
    config = small_config(num_codebooks=None, media_ids=None)
    assert model_table(config, "c").spec.num_codebooks == 1
    assert model_table(config, "c").spec.text == demo_spec().text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_ids": None}, "text_ids — missing — only a vocabulary of 157184 has published ids"),
        ({"media_ids": [1]}, "media_ids — \\[1\\] — must be an object"),
        ({"text_ids": {"maks": 1}}, "text_ids.maks — unknown field; did you mean 'mask'"),
        ({"text_ids": {"mask": "1"}}, "text_ids.mask — '1' — must be an integer"),
        ({"text_ids": {"mask": True}}, "text_ids.mask — True — must be an integer"),
        ({"text_ids": {"mask": 1}}, "text_ids — lacks system, end_system"),
        ({"vocab_size": 500}, "must be below the 500 text rows"),
        ({"vocab_size": None}, "vocab_size — None — must be an integer"),
        ({"num_codebooks": 0}, "num_codebooks — 0 — must be an integer of at least 1"),
        ({"text_ids": asdict(demo_spec().text) | {"eoa": 504}}, "text_ids.eoa — 504 — is text_ids.boa too"),
        ({"media_ids": asdict(demo_spec().media) | {"newline": 32}}, "media_ids.newline — 32 — is media_ids.mask too"),
        ({"image_head_classes": 16}, "codebook_size — 32 — must be at most image_head_classes=16"),
        ({"image_embedding_rows": 35}, "media_ids.layer_3d — 35 — must follow the 32 codes and be below"),
    ],
)
def test_wrong_tables_name_key_value_and_rule(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_table(small_config(**changes), "config.json")


def test_unreadable_config_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_model_table(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_model_table(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="a JSON list — must be an object"):
        read_model_table(tmp_path)
