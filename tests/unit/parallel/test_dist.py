"""Joining a process group: what the environment must say."""

import pytest

from lumina_ft.errors import ConfigError
from lumina_ft.parallel.dist import init_distributed


def test_half_an_environment_is_refused_with_both_halves(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"RANK, WORLD_SIZE set, LOCAL_RANK, MASTER_ADDR, MASTER_PORT not"):
        init_distributed("stage-0", 1.0)
