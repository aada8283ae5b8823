"""Merging adapters of routed experts: every layout, as PEFT merges them, and every planted fault is caught (D5)."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from merge_fixtures import (
    DENSE,
    EXPERTS,
    NUM_EXPERTS,
    PROJECTIONS,
    edit_adapter,
    expert_keys,
    plain_merge,
    tiny_model,
    write_adapter,
    write_base,
)
from safetensors.torch import load_file, save_file

from lumina_ft.adapters import combine as combine_module
from lumina_ft.adapters import merge as merge_module
from lumina_ft.adapters.combine import WeightedAdapter
from lumina_ft.adapters.delta import round_to
from lumina_ft.adapters.files import LoraFile, LoraPair, read_adapter
from lumina_ft.adapters.merge import MergeSummary, merge_adapters
from lumina_ft.adapters.verify import verify_merge
from lumina_ft.errors import CheckpointError, RunError
from lumina_ft.models.hf_keys import CHANNEL_MASK
from lumina_ft.models.u2 import U2ForDiffusion

Patch = pytest.MonkeyPatch
NAMES = tuple(f"{EXPERTS}.{projection}" for projection in PROJECTIONS)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base", torch.bfloat16)


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    return write_adapter(tmp_path / "adapter", base, targets=(DENSE,), experts=PROJECTIONS)


def merge(base: Path, *adapters: Path | tuple[Path, float], output: str = "out", **options) -> MergeSummary:
    chosen = [WeightedAdapter(*(a if isinstance(a, tuple) else (a, 1.0))) for a in adapters]
    return merge_adapters(base, chosen, base.parent / output, **options)


def state(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors in their stored dtypes, by native name."""
    dtype = getattr(torch, json.loads((directory / "config.json").read_text())["torch_dtype"])
    return U2ForDiffusion.from_pretrained(directory, dtype=dtype).state_dict()


def peft_adapter(directory: Path, **options) -> Path:
    """An adapter of attention and routed experts that PEFT made and wrote."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 10, "target_modules": ["attention.dense"], "target_parameters": [*PROJECTIONS]}
    model = get_peft_model(tiny_model(), LoraConfig(**{**settings, **options}))
    draw = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".lora_" in name:
                param.copy_(torch.randn(param.shape, generator=draw) * 0.2)
    model.save_pretrained(str(directory))
    return directory


@pytest.mark.parametrize("source", ["packed", "split"])
@pytest.mark.parametrize("layout", ["packed", "split"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_t12_experts_merge_from_every_layout_to_every_layout(
    tmp_path: Path, source: str, layout: str, dtype: torch.dtype
) -> None:
    base = write_base(tmp_path / "base", dtype, layout=source)
    adapter = write_adapter(tmp_path / "adapter", base, targets=(DENSE,), experts=PROJECTIONS)
    summary = merge(base, adapter, layout=layout, max_shard_bytes=6000)
    before, after = state(base), state(tmp_path / "out")
    for name, value in after.items():
        wanted = before[name]
        if name in (*NAMES, f"{DENSE}.weight"):
            wanted = round_to(plain_merge(before[name], adapter, name.removesuffix(".weight")), dtype)
        assert torch.equal(value, wanted), name
    assert summary.base_checked and summary.adapted == 4 and summary.check is not None and summary.check.adapted == 4
    assert {name: check.trained for name, check in summary.check.experts.items()} == dict.fromkeys(NAMES, NUM_EXPERTS)
    assert summary.logits is not None and summary.logits.effect > 10 * summary.logits.largest


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"target_parameters": ["experts.down_proj"]},
        {"target_parameters": ["mlp.experts.gate_proj", "experts.down_proj"]},
        {"target_parameters": ["experts.up_proj"], "target_modules": []},
        {"rank_pattern": {"experts.up_proj": 2}, "alpha_pattern": {"mlp.experts.down_proj": 3}},
        {"rank_pattern": {"experts.*": 1}, "use_rslora": True},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
def test_d5_peft_merges_its_own_expert_adapters_to_the_same_model(tmp_path: Path, options: dict) -> None:
    """`merge_and_unload` computes in float32: equal to 1e-6 of the largest weight."""
    from peft import PeftModel

    base = write_base(tmp_path / "base")
    adapter = peft_adapter(tmp_path / "adapter", **options)
    summary = merge(base, adapter)
    peft = PeftModel.from_pretrained(U2ForDiffusion.from_pretrained(base), adapter).merge_and_unload().state_dict()
    before, ours = state(base), state(tmp_path / "out")
    changed = set()
    for name, value in peft.items():
        if name != CHANNEL_MASK:
            assert float((ours[name] - value).abs().max()) <= 1e-6 * float(value.abs().max()), name
            changed |= set() if torch.equal(before[name], ours[name]) else {name}
    adapted = [p.rpartition(".")[2] for p in options.get("target_parameters", PROJECTIONS)]
    assert {name for name in changed if name in NAMES} == {f"{EXPERTS}.{projection}" for projection in adapted}
    assert summary.check is not None and set(summary.check.cosines) == changed


def test_several_expert_adapters_add_with_their_weights(base: Path, adapter: Path) -> None:
    other = write_adapter(base.parent / "other", base, targets=(), experts=("up_proj",), seed=1, rank=2, alpha=3.0)
    merge(base, (adapter, 0.5), (other, -2.0), dtype=torch.float32)
    before, after = state(base), state(base.parent / "out")
    for name in NAMES:
        w = before[name]
        wanted = w.double() + 0.5 * (plain_merge(w, adapter, name) - w.double())
        if name.endswith("up_proj"):
            wanted += -2.0 * (plain_merge(w, other, name) - w.double())
        torch.testing.assert_close(after[name], wanted.float(), rtol=1e-6, atol=1e-7)


def test_pairs_of_experts_stay_in_the_mapped_file(adapter: Path) -> None:
    """Copies would be in memory for all layers at once: 2 GB at published size."""
    file = read_adapter(adapter)
    for name in NAMES:
        one, two = file.pair(name), file.pair(name)
        assert one.a.data_ptr() == two.a.data_ptr() and one.b.data_ptr() == two.b.data_ptr()


def patch_pairs(patch: Patch, change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]):
    """Misread the adapters of experts: a [E, r, I], b [E, O, r]."""
    real = LoraFile.pair

    def pair(self: LoraFile, module: str) -> LoraPair:
        found = real(self, module)
        if found.a.dim() == 2:
            return found
        a, b = change(found.a, found.b)
        return found._replace(a=a, b=b)

    patch.setattr(LoraFile, "pair", pair)


def rank_major_a(patch: Patch) -> None:
    patch_pairs(patch, lambda a, b: (a.reshape(a.shape[1], a.shape[0], -1).transpose(0, 1), b))


def expert_major_b(patch: Patch) -> None:
    """Columns of B taken as [E, r] instead of [r, E]."""

    def change(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stored = b.permute(1, 2, 0).reshape(b.shape[1], -1)
        return a, stored.reshape(b.shape[1], b.shape[0], -1).transpose(0, 1)

    patch_pairs(patch, change)


def experts_moved_by_one(patch: Patch) -> None:
    patch_pairs(patch, lambda a, b: (a.roll(1, 0), b.roll(1, 0)))


def only_a_moved_by_one(patch: Patch) -> None:
    patch_pairs(patch, lambda a, b: (a.roll(1, 0), b))


def one_expert_left_out(patch: Patch) -> None:
    def change(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        b = b.clone()
        b[2] = 0
        return a, b

    patch_pairs(patch, change)


def scale_forgotten(patch: Patch) -> None:
    real = LoraFile.pair
    patch.setattr(LoraFile, "pair", lambda self, module: real(self, module)._replace(scale=1.0))


def scale_of_all_experts_ranks(patch: Patch) -> None:
    """alpha over the E r rows of A instead of over r."""
    real = LoraFile.pair

    def pair(self: LoraFile, module: str) -> LoraPair:
        found = real(self, module)
        return found._replace(scale=found.scale / found.a.shape[0]) if found.a.dim() == 3 else found

    patch.setattr(LoraFile, "pair", pair)


def first_expert_for_all(patch: Patch) -> None:
    patch_pairs(patch, lambda a, b: (a[:1].expand_as(a), b[:1].expand_as(b)))


def gate_and_up_swapped(patch: Patch) -> None:
    """Wrappers counted from the other end."""
    real = LoraFile.pair
    other: dict[str, str] = {NAMES[0]: NAMES[1], NAMES[1]: NAMES[0]}
    patch.setattr(LoraFile, "pair", lambda self, module: real(self, other.get(module, module)))


def one_projection_left_out(patch: Patch) -> None:
    def without_one(*arguments):
        updates = combine_module.combine(*arguments)
        del updates[NAMES[2]]
        return updates

    patch.setattr(merge_module, "combine", without_one)


FAULTS = [
    rank_major_a,
    expert_major_b,
    experts_moved_by_one,
    only_a_moved_by_one,
    one_expert_left_out,
    scale_forgotten,
    scale_of_all_experts_ranks,
    first_expert_for_all,
    gate_and_up_swapped,
    one_projection_left_out,
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("layout", ["packed", "split"])
def test_d5_a_planted_fault_in_experts_is_caught_and_the_expert_named(
    tmp_path: Path, monkeypatch: Patch, fault: Callable[[Patch], None], layout: str
) -> None:
    base = write_base(tmp_path / "base", torch.bfloat16, layout=layout)
    adapter = write_adapter(tmp_path / "adapter", base, targets=(), experts=PROJECTIONS)
    with monkeypatch.context() as patch:
        fault(patch)
        message = (
            rf"verification — {EXPERTS}\.(gate|up|down)_proj, expert \d, at \[\d+, \d+\] is .* instead of .* "
            r"\(W \+ scale \* B A, rounded\)"
        )
        with pytest.raises(RunError, match=message) as caught:
            merge(base, adapter, layout=layout)
        if fault is one_expert_left_out:
            assert ", expert 2," in str(caught.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"], "nothing is kept"
    assert merge(base, adapter, layout=layout).check is not None


@pytest.mark.parametrize("layout", ["packed", "split"])
def test_experts_that_changed_places_on_disk_are_found(tmp_path: Path, base: Path, adapter: Path, layout: str) -> None:
    out = merge(base, adapter, layout=layout).output
    path = out / "model.safetensors"
    tensors = load_file(path)
    if layout == "packed":
        tensors[NAMES[0]] = tensors[NAMES[0]][[0, 2, 1, 3]]
    else:
        one, two = (f"{EXPERTS}.{expert}.gate_proj.weight" for expert in (1, 2))
        tensors[one], tensors[two] = tensors[two], tensors[one]
    save_file(tensors, path)
    with pytest.raises(RunError, match=rf"{NAMES[0]}, expert 1, at \[0, 0\]"):
        verify_merge(base, [(adapter, 1.0)], out)


def test_one_wrong_bit_of_one_expert_is_found(base: Path, adapter: Path) -> None:
    out = merge(base, adapter).output
    tensors = load_file(out / "model.safetensors")
    tensors[NAMES[2]].view(torch.int16)[3, 15, 7] ^= 1
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(RunError, match=rf"{NAMES[2]}, expert 3, at \[15, 7\] .* 1 of 128 values in these rows differ"):
        verify_merge(base, [(adapter, 1.0)], out)


def zero_updates(adapter: Path, experts: slice) -> None:
    """Give some experts of each projection an update of zero, as those have that no token reached."""
    for projection in PROJECTIONS:
        key = expert_keys(PROJECTIONS, projection)[1]
        b = load_file(adapter / "adapter_model.safetensors")[key]
        b.view(b.shape[0], -1, NUM_EXPERTS)[:, :, experts] = 0
        edit_adapter(adapter, {key: b})


def test_d5_experts_that_no_token_reached_are_counted_and_a_tensor_without_any_is_refused(
    base: Path, adapter: Path
) -> None:
    zero_updates(adapter, slice(1, 3))
    check = merge(base, adapter).check
    assert check is not None
    assert all((found.trained, found.untrained) == (2, 2) for found in check.experts.values())
    zero_updates(adapter, slice(0, 4))
    with pytest.raises(CheckpointError, match=rf"{EXPERTS}\.\w+ is identical .* its update in the adapter is zero"):
        merge(base, adapter, overwrite=True)


def test_an_expert_whose_update_rounding_swallows_is_named(tmp_path: Path, base: Path) -> None:
    """The tensor as a whole keeps its direction, so that only a look at each expert shows it."""
    adapter = write_adapter(tmp_path / "adapter", base, targets=(), experts=("up_proj",))
    key = expert_keys(("up_proj",), "up_proj")[1]
    b = load_file(adapter / "adapter_model.safetensors")[key]
    b[:, 1::NUM_EXPERTS] *= 1e-7
    edit_adapter(adapter, {key: b})
    summary = merge(base, adapter)
    assert summary.check is not None and summary.check.lowest_cosine > 0.999
    found = summary.check.experts[NAMES[1]]
    assert (found.trained, found.low, found.lowest, found.lowest_cosine) == (4, 1, 1, 0.0)
    (warning,) = summary.warnings
    assert f"1 of 4 adapted matrices have a delta cosine under 0.99 (worst: {NAMES[1]} expert 1 0.0000)" in warning


def test_an_adapter_of_another_number_of_experts_is_refused(base: Path, adapter: Path) -> None:
    for projection in PROJECTIONS:
        a, b = expert_keys(PROJECTIONS, projection)
        tensors = load_file(adapter / "adapter_model.safetensors")
        edit_adapter(adapter, {a: tensors[a][:12].contiguous(), b: tensors[b][:, :12].contiguous()})
    with pytest.raises(CheckpointError, match=rf"{EXPERTS}\.\w+_proj \[3, \d+, \d+\] — must be a tensor of the base"):
        merge(base, adapter)


def test_verification_refuses_wrappers_that_target_parameters_do_not_name(base: Path, adapter: Path) -> None:
    out = merge(base, adapter).output
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["target_parameters"] = [NAMES[0], NAMES[1]]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match=rf"{EXPERTS} has tensors of 3 wrappers, and target_parameters name 2 of its"):
        verify_merge(base, [(adapter, 1.0)], out)
    with pytest.raises(CheckpointError):
        merge(base, adapter, output="again")
