"""Ids of experts: said by the ranks before a save, written down, and checked before a load."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_states import state
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from lumina_ft.checkpoint.directory import Checkpoint, read_state
from lumina_ft.checkpoint.experts import Holding, agree_on_experts, check_experts, holdings, ids_text, read_ids
from lumina_ft.errors import CheckpointError, RunError
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config

LAYER = "model.layers.1.mlp.experts"


@given(st.lists(st.integers(0, 300), unique=True))
def test_ids_survive_being_written_down(ids):
    assert list(read_ids(ids_text(ids))) == ids


def test_ids_are_written_in_ranges():
    assert ids_text([*range(8), 12, 14, 15]) == "0-7,12,14-15"


def ranks(*held: tuple[tuple[int, ...], range]) -> Any:
    """A world whose ranks hold some of eight experts; this process is the first of them."""
    said = [[Holding(LAYER, members, tuple(ids), 8)] for members, ids in held]
    return SimpleNamespace(rank=0, gather_objects=lambda _: said)


def test_every_expert_once_is_agreed_upon_whatever_the_replicas():
    pairs = ranks(*(((r - r % 2, r - r % 2 + 1), range(4 * (r % 2), 4 * (r % 2) + 4)) for r in range(4)))
    assert agree_on_experts(torch.nn.Linear(1, 1), pairs) == "0-7"
    assert agree_on_experts(torch.nn.Linear(1, 1), ranks(((0,), range(8)), ((1,), range(8)))) == "0-7"


@pytest.mark.parametrize(
    ("second", "wrong"),
    [
        (range(4, 7), "experts 7 are on no rank"),
        (range(0), "experts 4-7 are on no rank (rank 0 has 0-3, rank 1 has none)"),
        (range(4), "experts 4-7 are on no rank; experts 0-3 are on two ranks (rank 0"),
        (range(7, 3, -1), "experts are out of order (rank 0 has 0-3, rank 1 has 7,6,5,4)"),
    ],
)
def test_a_rank_that_holds_others_than_its_own_is_found_and_the_experts_are_named(second, wrong):
    with pytest.raises(RunError) as caught:
        agree_on_experts(torch.nn.Linear(1, 1), ranks(((0, 1), range(4)), ((0, 1), second)))
    assert str(caught.value).startswith(f"{LAYER} — {wrong}")
    assert "nothing of it was written" in str(caught.value)


def test_the_other_pair_is_looked_at_too():
    """Replicas: the first pair is whole, the second one isn't."""
    held = [((0, 1), range(4)), ((0, 1), range(4, 8)), ((2, 3), range(4)), ((2, 3), range(4, 6))]
    with pytest.raises(RunError, match=r"experts 6-7 are on no rank \(rank 2 has 0-3, rank 3 has 4-5\)"):
        agree_on_experts(torch.nn.Linear(1, 1), ranks(*held))


@pytest.fixture
def config() -> U2Config:
    return U2Config.load("u2-tiny")


def test_a_model_says_what_its_tensors_really_hold(config):
    with torch.device("meta"):
        model = U2ForDiffusion(config)
    assert holdings(model, 3) == [
        Holding(f"model.layers.{i}.mlp.experts", (3,), tuple(range(16)), 16) for i in range(1, 4)
    ]
    layer: Any = model.model.layers[2]
    layer.mlp.experts.up_proj = torch.nn.Parameter(torch.empty(14, 64, 128))
    assert holdings(model, 3)[1].ids == tuple(range(14))


def stored(folder: Path, *, stated: str = "0-15", header: str | None = None, rows: int = 16) -> Checkpoint:
    """A checkpoint of `u2-tiny` in which only the experts count."""
    (folder / "model").mkdir()
    (folder / "optimizer").mkdir()
    name = f"{LAYER}.gate_proj"
    metadata = {"format": "pt", "experts": stated if header is None else header}
    save_file({name: torch.ones(16, 2, 2)}, folder / "model" / "model.safetensors", metadata={"experts": "0-15"})
    save_file({f"{name}::master": torch.ones(rows, 2, 2)}, folder / "optimizer" / "optimizer.safetensors", metadata)
    saved = replace(state(4, 4), experts=stated)
    (folder / "state.json").write_text(json.dumps(asdict(saved)))
    return Checkpoint(folder, read_state(folder))


def test_a_checkpoint_with_every_expert_passes(tmp_path, config):
    check_experts(config, stored(tmp_path), tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stated": "0-7"}, r"state\.json — it holds experts 0-7 — all 16 .*; missing: 8-15 — "),
        ({"stated": "0-3,8-15"}, r"state\.json — it holds experts 0-3,8-15 — .*missing: 4-7 — "),
        ({"header": "8-15", "rows": 8}, r"optimizer\.safetensors — it holds experts 8-15 — .*missing: 0-7 — "),
        ({"header": ""}, r"optimizer\.safetensors — it holds experts none — .*missing: 0-15 — "),
        ({"rows": 8}, r"optimizer\.safetensors — \S*experts\.gate_proj::master has 8 rows — .*missing: 8-15 — "),
        ({"stated": "0-31"}, r"state\.json — experts 0-31 — the model has 16 — .*another model"),
        ({"stated": "all"}, r"state\.json — experts 'all' — must be ids like 0-15"),
        ({"stated": ""}, r"state\.json — no `experts` — .*older version"),
    ],
    ids=str,
)
def test_experts_of_a_rank_that_are_missing_are_named_before_anything_is_loaded(tmp_path, config, changes, message):
    with pytest.raises(CheckpointError, match=message):
        check_experts(config, stored(tmp_path, **changes), tmp_path / "model")


def test_a_base_of_elsewhere_is_held_to_the_ids_that_it_states(tmp_path, config):
    """Of another run, or of an adapter's checkpoint; other tools state none, and single experts aren't stacked."""
    file = tmp_path / "model.safetensors"
    save_file({f"{LAYER}.3.gate_proj.weight": torch.ones(2, 2)}, file)
    check_experts(config, None, tmp_path)
    save_file({f"{LAYER}.gate_proj": torch.ones(8, 2, 2)}, file, {"experts": "0-7"})
    with pytest.raises(CheckpointError, match=r"model\.safetensors — it holds experts 0-7 — .*missing: 8-15 — "):
        check_experts(config, None, tmp_path)
    (tmp_path / "checkpoint-4").mkdir()
    with pytest.raises(CheckpointError, match=r"/model\.safetensors — it holds experts 0-7 — .*missing: 8-15 — "):
        check_experts(config, stored(tmp_path / "checkpoint-4"), tmp_path)


def test_a_file_that_is_cut_off_is_named(tmp_path, config):
    checkpoint = stored(tmp_path)
    file = tmp_path / "optimizer" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors — .*must be a complete safetensors file"):
        check_experts(config, checkpoint, None)
