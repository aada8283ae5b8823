"""Joining a process group: what the environment must say."""

import socket
import time

import pytest

from lumina_ft.errors import ConfigError, RunError
from lumina_ft.parallel.dist import init_distributed


def test_half_an_environment_is_refused_with_both_halves(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"RANK, WORLD_SIZE set, LOCAL_RANK, MASTER_ADDR, MASTER_PORT not"):
        init_distributed("stage-0", 1.0)


@pytest.fixture
def as_rank(monkeypatch, free_port):
    """Environment of one rank of two, on a port where nothing listens."""

    def become(rank: int) -> None:
        values = {
            "RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_RANK": rank,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port,
        }
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    return become


@pytest.fixture
def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_T14_a_rank_that_never_joins_is_named_within_the_limit(as_rank):
    as_rank(0)
    begin = time.monotonic()
    with pytest.raises(
        RunError, match=r"1 of 2 ranks joined within parallel\.timeout_minutes=0\.02 — missing: rank 1 —"
    ):
        init_distributed("stage-0", 0.02)
    assert time.monotonic() - begin < 5


def test_T14_a_rank_that_finds_no_rank_0_says_where_it_looked(as_rank, free_port):
    as_rank(1)
    with pytest.raises(RunError, match=rf"rank 1 of 2 .* 127\.0\.0\.1:{free_port} — rank 0 didn't open"):
        init_distributed("stage-0", 0.02)
