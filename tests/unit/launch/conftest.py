"""Fixtures of this folder."""

from pathlib import Path

import pytest

from lumina_ft.data.shards import make_meta, write_meta
from lumina_ft.tokens import PUBLISHED_MEDIA_IDS, PUBLISHED_TEXT_IDS, TokenSpec


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """What the checks read of a built dataset: its description."""
    folder = tmp_path / "data"
    folder.mkdir()
    meta = make_meta(
        counts={"text": 1},
        shards=(),
        spec=TokenSpec(PUBLISHED_TEXT_IDS, PUBLISHED_MEDIA_IDS, 8),
        tokenizer_identity="sha256:0",
        codec=None,
        system_prompts={},
        block_tokens=32,
    )
    write_meta(folder, meta)
    return folder
