"""Adapters of experts that two ranks share: the same files as one process writes, and PEFT reads them (T1, D5)."""

from pathlib import Path

import dist_tiny
import pytest
import torch
from dist_engines import WEIGHTS, packs
from dist_launch import launch_ranks, read_json

from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.train.objective import TERMS, supervised_counts


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("expert_lora")
    dist_tiny.prepare(work, samples=60)
    launch_ranks("ranks_expert_lora.py", work)
    return work


@pytest.fixture(scope="module")
def records(work: Path) -> dict[int, dict]:
    return {record["zero"]: record for record in read_json(work / "expert_lora.json")}


@pytest.mark.parametrize("zero", (2, 3))
def test_T1_shared_experts_get_and_store_the_values_of_one_process(records, zero):
    """A new adapter, and one with other values, byte for byte."""
    assert records[zero]["new"] and records[zero]["moved"]


@pytest.mark.parametrize("zero", (2, 3))
def test_a_trained_adapter_is_continued_bit_for_bit(records, zero):
    assert records[zero]["trained_moved"] and records[zero]["again"]


@pytest.mark.parametrize("zero", (2, 3))
def test_merged_experts_are_those_of_one_process(records, zero):
    record = records[zero]
    assert record["same_names"] and record["merged"] == 3 * 2 + 2 * 3
    assert record["worst_merged"] == 0.0 and record["worst_cosine"] <= 1e-12


@pytest.mark.parametrize("zero", (2, 3))
@pytest.mark.filterwarnings("ignore:The following")
def test_D5_peft_answers_as_the_ranks_did(work, records, zero):
    from peft import PeftModel

    peft = PeftModel.from_pretrained(U2ForDiffusion.from_pretrained(work / "base"), str(work / f"zero{zero}/trained"))
    peft.eval()
    batches = packs(work / "data", count=4)
    counts = dict(zip(TERMS, supervised_counts(batches).tolist(), strict=True))
    loss = 0.0
    with torch.no_grad():
        for batch in batches:
            losses = peft(**batch.model_inputs()).losses
            loss += sum(getattr(WEIGHTS, n) * float(losses[n].total) / counts[n] for n in TERMS if counts[n])
    assert loss == pytest.approx(records[zero]["loss"], rel=1e-6)
