"""Resuming: what must agree, and damaged optimizer files."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import Parameter

from lumina_ft.checkpoint.directory import Checkpoint, TrainState
from lumina_ft.checkpoint.resume import check_base, check_fingerprint, load_optimizer
from lumina_ft.config.schema import RunConfig
from lumina_ft.errors import CheckpointError
from lumina_ft.models.identity import BaseIdentity
from lumina_ft.train.run import find_start

NOT_REACHED: Any = None
"""In place of an engine: every case fails before it is touched."""


def state(stage_index: int = 0, stage_step: int = 4, stage_steps: int = 10) -> TrainState:
    return TrainState(
        14, stage_index, f"s{stage_index}", stage_step, stage_steps, 4, 1.0, 100, {"seed": 3, "dtype": "a"}
    )


def write(path: Path, saved: TrainState) -> Path:
    path.mkdir()
    (path / "state.json").write_text(json.dumps(asdict(saved)))
    return path


def config() -> RunConfig:
    stages = [{"name": f"s{i}", "steps": 10} for i in range(3)]
    model = {"config": "u2-tiny", "random_init": True}
    return RunConfig.model_validate({"output_dir": "x", "model": model, "data": {"path": "d"}, "stages": stages})


def test_equal_fingerprints_pass_and_a_difference_is_named_with_both_values():
    checkpoint = Checkpoint(Path("checkpoint-14"), state())
    check_fingerprint(checkpoint, {"seed": 3, "dtype": "a"})
    with pytest.raises(CheckpointError, match=r"checkpoint-14 — seed was 3, is 4 — .*same packs"):
        check_fingerprint(checkpoint, {"seed": 4, "dtype": "a"})


def test_T14_ranks_ask_after_the_one_that_reads_a_large_base(tmp_path, monkeypatch):
    """Long silence in one collective would be taken for a hang."""
    asked: list[int] = []

    def gather(done: int) -> list[int]:
        asked.append(done)
        return [done, 1]

    def read(_: Path) -> BaseIdentity:
        time.sleep(0.3)
        return BaseIdentity("aa", {})

    monkeypatch.setattr("lumina_ft.checkpoint.resume.base_identity", read)
    world: Any = SimpleNamespace(size=2, is_main=True, gather_ints=gather, from_main=lambda value: value)
    saved = replace(state(), base=str(tmp_path), base_identity="aa", adapter="kept")
    check_base(Checkpoint(tmp_path / "checkpoint-14", saved), world)
    assert len(asked) > 2 and asked[-1] == 1
    with pytest.raises(CheckpointError, match=r"hash aa — .* was trained on bb — bring that base back"):
        check_base(Checkpoint(tmp_path / "checkpoint-14", replace(saved, base_identity="bb")), world)


def store(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    (folder / "optimizer").mkdir()
    path = folder / "optimizer" / "optimizer.safetensors"
    save_file(tensors, path)
    return path


def test_truncated_optimizer_file_is_named(tmp_path):
    path = store(tmp_path, {"w::master": torch.ones(2)})
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors — .*must be a complete safetensors file"):
        load_optimizer(Checkpoint(tmp_path, state()), NOT_REACHED, {"w": Parameter(torch.ones(2))})


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"w::master": (2,), "w::exp_avg": (2,)}, r"w::exp_avg_sq: absent in the file, \(2,\) in the stage"),
        ({f"w::{k}": (3,) for k in ("master", "exp_avg", "exp_avg_sq")}, r"w::exp_avg: \(3,\) in the file, \(2,\) in"),
        ({f"{n}::{k}": (2,) for n in "vw" for k in ("master", "exp_avg", "exp_avg_sq")}, r"v::exp_avg: .* absent in"),
    ],
)
def test_state_of_other_parameters_is_refused(tmp_path, stored, message):
    store(tmp_path, {name: torch.ones(shape) for name, shape in stored.items()})
    with pytest.raises(CheckpointError, match=message):
        load_optimizer(Checkpoint(tmp_path, state()), NOT_REACHED, {"w": Parameter(torch.ones(2))})


def test_start_inside_a_stage_continues_it(tmp_path):
    start = find_start(config(), 1, write(tmp_path / "c", state(1, 4)))
    assert start.inside is not None and start.inside.state.stage_step == 4
    assert start.global_step == 10
    assert start.weights == tmp_path / "c" / "model"


def test_start_from_the_end_of_the_previous_stage_is_fresh(tmp_path):
    start = find_start(config(), 2, write(tmp_path / "c", state(1, 10)))
    assert (start.inside, start.global_step) == (None, 14)


@pytest.mark.parametrize(("stage", "saved"), [(0, state(1, 4)), (2, state(1, 4)), (1, state(1, 10)), (2, state(0, 10))])
def test_a_checkpoint_that_does_not_lead_into_the_stage_is_refused(tmp_path, stage, saved):
    with pytest.raises(
        CheckpointError, match=rf"stage 's{saved.stage_index}', step .*doesn't lead into stage 's{stage}'"
    ):
        find_start(config(), stage, write(tmp_path / "c", saved))


def test_a_later_stage_needs_a_checkpoint():
    with pytest.raises(CheckpointError, match="stage 2 — started without a checkpoint"):
        find_start(config(), 1, None)
