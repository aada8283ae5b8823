"""Verification of merges: every planted fault is caught and named, and a failed merge leaves nothing (D5)."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from merge_fixtures import DENSE, HEAD, QKV, SHARED, TARGETS, edit_adapter, write_adapter, write_base
from safetensors.torch import load_file, save_file

from lumina_ft.adapters import combine as combine_module
from lumina_ft.adapters import delta as delta_module
from lumina_ft.adapters import logits as logits_module
from lumina_ft.adapters import merge as merge_module
from lumina_ft.adapters.combine import Update, WeightedAdapter
from lumina_ft.adapters.merge import MergeSummary, merge_adapters
from lumina_ft.adapters.verify import verify_merge
from lumina_ft.errors import CheckpointError, RunError
from lumina_ft.models.hf_keys import CHANNEL_MASK

Patch = pytest.MonkeyPatch
real_delta = delta_module.lora_delta


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base", torch.bfloat16)


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    return write_adapter(tmp_path / "adapter", base)


def merge(base: Path, adapter: Path, **options) -> MergeSummary:
    return merge_adapters(base, [WeightedAdapter(adapter)], base.parent / "out", **options)


def edit(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, value in changes.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, path)


def forget_scale(patch: Patch) -> None:
    patch.setattr(combine_module, "lora_delta", lambda a, b, scale: real_delta(a, b, 1.0))


def swap_a_and_b(patch: Patch) -> None:
    patch.setattr(combine_module, "lora_delta", lambda a, b, scale: real_delta(b.T, a.T, scale))


def drop_one(patch: Patch) -> None:
    def without_one(*arguments):
        updates = combine_module.combine(*arguments)
        del updates[f"{DENSE}.weight"]
        return updates

    patch.setattr(merge_module, "combine", without_one)


def other_rows(patch: Patch) -> None:
    """A merge that slices the adapter differently from the layer."""
    patch.setattr(combine_module, "lora_delta", lambda a, b, scale: real_delta(a, b.flip(0), scale))


def subtract(patch: Patch) -> None:
    patch.setattr(combine_module, "lora_delta", lambda a, b, scale: real_delta(a, b, -scale))


def merge_in_bfloat16(patch: Patch) -> None:
    patch.setattr(combine_module, "lora_delta", lambda a, b, scale: real_delta(a, b, scale).bfloat16().double())


@pytest.mark.parametrize("fault", [forget_scale, swap_a_and_b, drop_one, other_rows, subtract, merge_in_bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_d5_a_planted_fault_is_caught_and_the_tensor_named(
    tmp_path: Path, monkeypatch: Patch, fault: Callable[[Patch], None], dtype: torch.dtype
) -> None:
    base = write_base(tmp_path / "base", dtype)
    adapter = write_adapter(tmp_path / "adapter", base, targets=(DENSE,))
    with monkeypatch.context() as patch:
        fault(patch)
        message = rf"verification — {DENSE}\.weight at \[\d+, \d+\] is .* instead of .* \(W \+ scale \* B A, rounded\)"
        with pytest.raises(RunError, match=message):
            merge(base, adapter)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"], "nothing is kept"
    assert merge(base, adapter).check is not None


def test_d5_tensors_of_the_adapter_that_are_swapped_or_empty_are_refused(base: Path, adapter: Path) -> None:
    a, b = f"base_model.model.{DENSE}.lora_A.weight", f"base_model.model.{DENSE}.lora_B.weight"
    tensors = load_file(adapter / "adapter_model.safetensors")
    edit_adapter(adapter, {a: tensors[b], b: tensors[a]})
    with pytest.raises(CheckpointError, match=rf"{DENSE}: lora_A \[16, 4\], lora_B \[4, 16\] — must be \[4, inputs\]"):
        merge(base, adapter)
    edit_adapter(adapter, {a: torch.empty(0), b: torch.empty(0)})
    with pytest.raises(CheckpointError, match=rf"{DENSE}: lora_A \[0\], lora_B \[0\]"):
        merge(base, adapter)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_d5_values_that_are_not_finite_are_caught(base: Path, adapter: Path, bad: float) -> None:
    name = f"base_model.model.{QKV}.lora_B.weight"
    value = load_file(adapter / "adapter_model.safetensors")[name]
    value[3, 1] = bad
    edit_adapter(adapter, {name: value})
    with pytest.raises(CheckpointError, match=rf"verification — {QKV}\.weight holds infinite or NaN .* the adapter's"):
        merge(base, adapter)


def test_values_of_the_base_that_are_not_finite_are_caught(tmp_path: Path, base: Path) -> None:
    weight = load_file(base / "model.safetensors")["model.norm.weight"]
    weight[0] = float("nan")
    edit(base, {"model.norm.weight": weight})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds infinite or NaN .* the base's tensor isn't"):
        merge(base, write_adapter(tmp_path / "adapter", base))


@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.up_proj", "lm_head.weight", f"{HEAD}.weight"])
def test_one_wrong_bit_anywhere_on_disk_is_found(tmp_path: Path, base: Path, name: str) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, whole={f"{HEAD}.weight": torch.randn(8, 16)})
    out = merge(base, adapter).output
    value = load_file(out / "model.safetensors")[name]
    value.view(torch.int16).view(-1)[-1] ^= 1
    edit(out, {name: value})
    with pytest.raises(RunError, match=rf"{name} at \[.*\] is .* \(the (base|adapter)'s\); 1 of"):
        verify_merge(base, [(adapter, 1.0)], out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, r"model\.norm\.weight is missing"),
        (
            {"model.norm.weight": torch.empty(0, dtype=torch.bfloat16)},
            r"norm\.weight has shape \[0\], the base has \[16\]",
        ),
        ({"model.norm.weight": torch.ones(16)}, r"norm\.weight is torch\.float32, not torch\.bfloat16"),
        ({"extra.weight": torch.ones(16)}, r"extra\.weight isn't in the base"),
    ],
)
def test_missing_empty_and_extra_tensors_are_found(base: Path, adapter: Path, change: dict, message: str) -> None:
    out = merge(base, adapter).output
    edit(out, change)
    with pytest.raises(RunError, match=message):
        verify_merge(base, [(adapter, 1.0)], out)


def test_a_channel_mask_that_the_base_leaves_out_must_be_causal(tmp_path: Path, base: Path) -> None:
    edit(base, {CHANNEL_MASK: None})
    adapter = write_adapter(tmp_path / "adapter", base)
    out = merge(base, adapter).output
    assert CHANNEL_MASK in load_file(out / "model.safetensors")
    edit(out, {CHANNEL_MASK: torch.zeros(3, 3)})
    with pytest.raises(RunError, match="channel_mask isn't in the base"):
        verify_merge(base, [(adapter, 1.0)], out)


def test_a_tensor_of_the_adapter_that_the_merge_passed_over_is_found(base: Path, adapter: Path) -> None:
    out = merge(base, adapter).output
    beyond = DENSE.replace(".0.", ".7.")
    extra = {f"base_model.model.{beyond}.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}
    edit_adapter(adapter, extra)
    with pytest.raises(RunError, match=rf"{beyond}\.weight is in the adapter and not in the merged model"):
        verify_merge(base, [(adapter, 1.0)], out)


def test_d5_no_adapted_tensor_stays_identical_to_the_base(tmp_path: Path, base: Path) -> None:
    tiny = write_adapter(tmp_path / "tiny", base, b_std=1e-8)
    with pytest.raises(CheckpointError, match=r"is identical to the base's .* smaller than the rounding of bfloat16"):
        merge(base, tiny)
    assert merge(base, tiny, dtype=torch.float32, layout="split").check is not None
    untrained = write_adapter(tmp_path / "untrained", base, b_std=0.0)
    with pytest.raises(CheckpointError, match=r"its update in the adapter is zero .* accept it with --no-verify"):
        merge(base, untrained, overwrite=True)
    assert merge(base, untrained, overwrite=True, verify=False).check is None


@pytest.mark.parametrize("delta", [2**-8, 2**-8 - 2**-40])
def test_values_around_a_tie_are_right_only_as_far_as_float64_tells(
    tmp_path: Path, delta: float, monkeypatch: Patch
) -> None:
    """1 + 2^-7 + 2^-8 lies in the middle of two bfloat16 numbers; 2^-40 below it, one of them is wrong."""
    base = write_base(tmp_path / "base", torch.bfloat16)
    name, below, above = f"{DENSE}.weight", 1 + 2**-7, 1 + 2**-6
    weight = load_file(base / "model.safetensors")[name]
    weight[0, 0] = below
    edit(base, {name: weight})
    adapter = write_adapter(tmp_path / "adapter", base, targets=(DENSE,), rank=2, alpha=2.0)
    tensors = load_file(adapter / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.{DENSE}.lora_{part}.weight"] for part in "AB")
    a[:, 0], b[0] = 1.0, torch.tensor([2**-8, delta - 2**-8])
    edit_adapter(adapter, {f"base_model.model.{DENSE}.lora_{k}.weight": v for k, v in (("A", a), ("B", b))})
    on_tie = delta == 2**-8
    out = merge(base, adapter).output
    merged = load_file(out / "model.safetensors")[name]
    assert merged[0, 0] == (above if on_tie else below), "ties go to the even neighbour"
    for value, right in ((below, True), (above, on_tie), (1.0, False), (1 + 3 * 2**-7, False)):
        merged[0, 0] = value
        edit(out, {name: merged})
        if right:
            assert verify_merge(base, [(adapter, 1.0)], out).boundary_values == int(on_tie and value == below)
        else:
            with pytest.raises(RunError, match=rf"{DENSE}\.weight at \[0, 0\] is {value}"):
                verify_merge(base, [(adapter, 1.0)], out)
    if not on_tie:
        # The usual cast rounds twice: to float32, which is the tie, and from there away from the value.
        monkeypatch.setattr(delta_module, "round_to", lambda x, dtype: x.to(dtype))
        with pytest.raises(RunError, match=rf"{DENSE}\.weight at \[0, 0\] is {above} instead of {below}"):
            merge(base, adapter, overwrite=True)


@pytest.mark.parametrize("name", [f"{DENSE}.weight", "lm_head.weight"])
def test_a_tensor_that_kept_the_dtype_of_the_base_is_caught(base: Path, adapter: Path, monkeypatch: Patch, name: str):
    real = merge_module._output_specs

    def forget_dtype(stored, *arguments):
        return real(stored, *arguments) | {name: stored[name]}

    monkeypatch.setattr(merge_module, "_output_specs", forget_dtype)
    with pytest.raises(RunError, match=rf"{name} is torch\.bfloat16, not torch\.float32"):
        merge(base, adapter, dtype=torch.float32)


def test_dora_faults_are_caught(tmp_path: Path, base: Path, monkeypatch: Patch) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, dora=True)
    real = combine_module.merge_weight
    monkeypatch.setattr(combine_module, "merge_weight", lambda w, d, magnitude, dtype: real(w, d, dtype=dtype))
    with pytest.raises(RunError, match=r"attention.*weight at .*rounded"):
        merge(base, adapter)


def test_a_module_that_was_not_replaced_is_caught(tmp_path: Path, base: Path, monkeypatch: Patch) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, whole={f"{HEAD}.weight": torch.randn(8, 16)})
    monkeypatch.setattr(Update, "new_rows", lambda self, w, rows, dtype: w)
    with pytest.raises(RunError):
        merge(base, adapter)


def test_cosines_are_of_every_adapted_tensor_lowest_first(base: Path, adapter: Path) -> None:
    check = merge(base, adapter).check
    assert check is not None and set(check.cosines) == {f"{module}.weight" for module in TARGETS}
    assert list(check.cosines.values()) == sorted(check.cosines.values()) and check.lowest_cosine < 1
    assert (check.adapted, check.replaced, check.copied) == (3, 0, check.tensors - 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_small_models_agree_with_the_attached_adapter(tmp_path: Path, dtype: torch.dtype) -> None:
    base = write_base(tmp_path / "base", dtype)
    logits = merge(base, write_adapter(tmp_path / "adapter", base)).logits
    assert logits is not None and logits.tokens + logits.rerouted == 160
    assert logits.largest < logits.bound / 5 and logits.effect > 0.1


def test_an_adapter_that_means_something_else_when_attached_is_caught(
    base: Path, adapter: Path, monkeypatch: Patch
) -> None:
    """What merge and verification misread alike still shows in the logits."""
    real = logits_module.load_adapter

    def other_scale(model, directory: Path) -> None:
        real(model, directory)
        model.get_submodule(SHARED).scaling["default"] *= 3

    monkeypatch.setattr(logits_module, "load_adapter", other_scale)
    with pytest.raises(RunError, match=r"logits of the merged model differ by .* must be at most 0\.15 with bfloat16"):
        merge(base, adapter)
    assert not (base.parent / "out").exists()


def test_verification_reads_scales_from_the_configuration_itself(tmp_path: Path, base: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base)
    out = merge(base, adapter).output
    config = json.loads((adapter / "adapter_config.json").read_text())
    for change in ({"lora_alpha": 11}, {"use_rslora": True}, {"alpha_pattern": {"attention.dense": 1}}):
        (adapter / "adapter_config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(RunError, match="rounded"):
            verify_merge(base, [(adapter, 1.0)], out)
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match="rounded"):
        verify_merge(base, [(adapter, 0.5)], out)
