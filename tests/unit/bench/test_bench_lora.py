"""`lumina-ft bench lora`: agreement comes before figures, and each side is measured in a process of its own."""

from concurrent.futures.process import BrokenProcessPool

import pytest
import torch
from safetensors.torch import load_file, save_file

from lumina_ft.bench import lora
from lumina_ft.errors import RunError

SMALL = lora.LoraCase(tokens=24, hidden=64, width=32, experts=8, top_k=2, rank=4)
LIMIT = 2**29


@pytest.fixture
def in_this_process(monkeypatch):
    """Costs of both sides without new processes, which take seconds to start; memory is then meaningless."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(lora, "_in_process", lora.measure)
    yield
    torch.set_num_threads(threads)


def test_both_sides_agree_and_ratios_are_peft_over_grouped(in_this_process):
    result = lora.bench_lora(SMALL, repeats=2)
    for part in ("forward", "backward"):
        assert result[f"{part}_ratio"] == result[f"peft_{part}_ms"] / result[f"grouped_{part}_ms"]
    total = {side: result[f"{side}_forward_ms"] + result[f"{side}_backward_ms"] for side in ("peft", "grouped")}
    assert result["time_ratio"] == total["peft"] / total["grouped"]
    assert result["memory_ratio"] == result["peft_peak_gib"] / result["grouped_peak_gib"]
    assert result["rows"] == 48 and result["experts"] == 8 and result["repeats"] == 2


@pytest.mark.parametrize("planted", ["scale", "order of ranks"])
def test_a_wrong_result_is_never_reported(in_this_process, monkeypatch, planted):
    right = lora.PackedExperts.add_lora
    if planted == "scale":
        monkeypatch.setattr(
            lora.PackedExperts, "add_lora", lambda self, name, **kw: right(self, name, **{**kw, "scale": 1.9})
        )
    else:
        from lumina_ft.adapters import peft_reference

        monkeypatch.setattr(peft_reference, "stack_b", lambda b: b.permute(1, 0, 2).reshape(b.shape[1], -1))
    with pytest.raises(RunError, match="bench lora: .* — differs by"):
        lora.bench_lora(SMALL, repeats=1)


def test_every_tensor_is_compared(tmp_path, in_this_process):
    files = {side: tmp_path / side for side in ("grouped", "peft")}
    for side, file in files.items():
        lora.measure(side, SMALL, 1, file)
    names = {"output", "grad x"} | {f"grad {p} {part}" for p in ("gate_proj", "up_proj", "down_proj") for part in "AB"}
    stored = load_file(files["grouped"])
    assert stored.keys() == names
    for name in names:
        save_file({**stored, name: stored[name] * 1.05}, tmp_path / "changed")
        with pytest.raises(RunError, match=f"bench lora: {name} — differs by"):
            lora.check_agreement(tmp_path / "changed", files["grouped"])


def test_a_side_runs_in_a_process_of_its_own_whose_peak_counts(tmp_path):
    """The layer's weights and one pass; this process, which holds more than that, doesn't show."""
    ballast = torch.ones(LIMIT // 4)
    cost = lora._in_process("grouped", SMALL, 1, tmp_path / "tensors")
    assert ballast.sum() > 0
    assert cost.weights_bytes <= cost.peak_bytes < LIMIT
    assert cost.forward_ms > 0 and cost.backward_ms > 0


def test_a_process_that_memory_has_ended_is_explained(monkeypatch, tmp_path):
    def ended(*_):
        raise BrokenProcessPool

    monkeypatch.setattr(lora.ProcessPoolExecutor, "submit", ended)
    with pytest.raises(RunError, match="adapters of peft — ended — .* for memory: the weights are 1.5 GiB"):
        lora._in_process("peft", lora.LoraCase(), 1, tmp_path / "tensors")


@pytest.mark.slow
def test_one_layer_of_the_published_model_costs_a_fraction():
    """4 GiB of memory for PEFT's side. Measured: 7.6 times as fast, and half the memory."""
    result = lora.bench_lora(lora.LoraCase(), repeats=1)
    assert result["time_ratio"] >= 4
    assert result["memory_ratio"] >= 1.7
