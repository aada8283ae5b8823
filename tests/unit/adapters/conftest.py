"""Fixtures of this folder, whose tests may import the modules beside them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from lora_fixtures import save_base  # noqa: E402


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a small model."""
    return save_base(tmp_path_factory.mktemp("model") / "base")
