"""The table in docs/surprises.md, and the behaviours in it that no other test shows."""

import inspect
import json
import re
from pathlib import Path

import pytest
import torch

from lumina_ft.kernels.attention.ref import allowed_mask
from lumina_ft.models.u2_config import U2Config
from lumina_ft.tokens import TYPE_ANSWER_TEXT, TYPE_TEXT

ROOT = Path(__file__).resolve().parents[3]


def table_rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "surprises.md").read_text(encoding="utf-8").split("\n")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| \d+ \|", line)]


def test_the_table_has_all_31_items_and_names_tests_that_exist():
    rows = table_rows()
    assert [row[0] for row in rows] == [str(i) for i in range(1, 32)]
    defined = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        defined.update(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row[3])
        assert named, f"item {row[0]} names no test"
        assert set(named) <= defined, f"item {row[0]}: {set(named) - defined}"


def test_surprise_10_boa_is_noisy_and_unseen_by_clean_blocks():
    # BOA, one noisy block, its clean copy: the noisy block sees BOA, the copy doesn't.
    types = torch.tensor([TYPE_TEXT, TYPE_ANSWER_TEXT, TYPE_ANSWER_TEXT])
    allowed = allowed_mask(
        types,
        cu_seqlens=torch.tensor([0, 3]),
        turn_ids=torch.ones(3, dtype=torch.int64),
        block_ids=torch.zeros(3, dtype=torch.int64),
        is_clean=torch.tensor([False, False, True]),
    )
    assert allowed[1].tolist() == [True, True, False]
    assert allowed[2].tolist() == [False, False, True]


@pytest.mark.parametrize("argument", [{"return_dict": False}, {"use_cache": True}, {"output_hidden_states": True}])
def test_surprise_24_unsupported_arguments_are_refused(tiny_model, argument):
    parameters = inspect.signature(tiny_model.forward).parameters.values()
    assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    ids = torch.zeros(1, 2, 4, dtype=torch.int64)
    with pytest.raises(TypeError, match=next(iter(argument))):
        tiny_model(ids, type_ids=torch.ones(1, 2, dtype=torch.int64), **argument)


@pytest.mark.parametrize("version", ["4.52.3", "99.0"])
def test_surprise_26_configs_of_other_transformers_versions_load(tiny_config, tmp_path, version):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config.to_dict() | {"transformers_version": version}))
    assert U2Config.load(path).hidden_size == tiny_config.hidden_size


def test_surprise_31_there_is_no_built_in_generate(tiny_model):
    assert not hasattr(tiny_model, "generate")
