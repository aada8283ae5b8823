"""`lumina-ft bench step`: the same training under each choice of kernels."""

import pytest
import torch

from lumina_ft.bench import step
from lumina_ft.errors import RunError


@pytest.fixture(scope="module")
def result():
    return step.bench_step(cases=["tiny"], steps=3)


def test_the_choices_train_alike(result):
    sides = result["cases"]["tiny"]["sides"]
    assert sides.keys() == {"torch", "eager"}
    assert (sides["torch"]["attention"], sides["eager"]["attention"]) == ("segmented", "dense")
    losses = [side["losses"] for side in sides.values()]
    assert [len(values) for values in losses] == [3, 3] and losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][0] > losses[0][1] > losses[0][2]


def test_figures_are_of_the_parts_and_ratios_of_whole_steps(result):
    case = result["cases"]["tiny"]
    for side in case["sides"].values():
        parts = side["forward_ms"] + side["backward_ms"] + side["optimizer_ms"]
        assert side["step_ms"] == pytest.approx(parts, rel=0.5) and side["peak_bytes"] > 0
    assert case["ratios"] == {"eager / torch": case["sides"]["eager"]["step_ms"] / case["sides"]["torch"]["step_ms"]}
    assert case["unavailable"]["triton"].startswith("Triton kernels need a CUDA device")
    assert case["tokens"] == 128 and case["dtype"] == "float32" and result["steps"] == 3


def test_choices_that_train_differently_are_an_error(monkeypatch):
    monkeypatch.setattr(step, "_TOLERANCES", {torch.float32: -1.0})
    with pytest.raises(RunError, match="bench step: tiny, .* — loss of step 0 differs by"):
        step.bench_step(cases=["tiny"], steps=2)


def test_the_demo_batch_supervises_text_and_images():
    """Every loss of the demo model counts, as in its training."""
    case = step.CASES["demo"]
    pack = step.join([step.build_pack(layout, sample_tokens=64, samples=1) for layout, _, _ in case.packs])
    config = case.config()
    batch = step.draw_batch(pack, config, torch.device("cpu"))
    labelled = batch["labels"][:, 0] != step.IGNORE
    assert {3, 4} == set(pack.type_ids[labelled].tolist()) and not (labelled & pack.is_clean).any()
    media = pack.type_ids == 4
    assert int(batch["input_ids"][media].max()) < config.image_head_classes
    assert int(batch["input_ids"][~media].max()) < config.pad_token_id


def test_results_are_shown_as_a_table(run):
    code, out, err = run("bench", "step", "--case", "tiny", "--steps", 2)
    assert code == 0 and out == "" and "128 tokens, float32" in err and "eager" in err
