"""Merging adapters into model directories: layouts, sums, refusals, and nothing half-written (D5, T12)."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from merge_fixtures import (
    BIAS,
    DENSE,
    HEAD,
    QKV,
    SHARED,
    TARGETS,
    edit_adapter,
    plain_merge,
    tiny_model,
    write_adapter,
    write_base,
)
from safetensors.torch import load_file, save_file

from lumina_ft.adapters import merge as merge_module
from lumina_ft.adapters.combine import WeightedAdapter
from lumina_ft.adapters.delta import round_to
from lumina_ft.adapters.merge import MergeSummary, merge_adapters
from lumina_ft.adapters.output import written_aside
from lumina_ft.errors import CheckpointError, ConfigError, RunError
from lumina_ft.models.hf_keys import CHANNEL_MASK
from lumina_ft.models.identity import model_identity
from lumina_ft.models.u2 import U2ForDiffusion


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    return write_adapter(tmp_path / "adapter", base)


def merge(base: Path, output: Path, *adapters: Path | tuple[Path, float], **options) -> MergeSummary:
    chosen = [WeightedAdapter(*(a if isinstance(a, tuple) else (a, 1.0))) for a in adapters]
    return merge_adapters(base, chosen, output, **options)


def state(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors in their stored dtypes, by native name."""
    config = json.loads((directory / "config.json").read_text())
    dtype = getattr(torch, config["torch_dtype"])
    return U2ForDiffusion.from_pretrained(directory, dtype=dtype).state_dict()


@pytest.mark.parametrize("source", ["packed", "split"])
@pytest.mark.parametrize("layout", ["packed", "split", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_t12_every_layout_to_every_layout(tmp_path: Path, source: str, layout: str | None, dtype: torch.dtype):
    base = write_base(tmp_path / "base", dtype, layout=source)
    adapter = write_adapter(tmp_path / "adapter", base)
    summary = merge(base, tmp_path / "out", adapter, layout=layout, max_shard_bytes=6000)
    assert (summary.source_layout, summary.layout) == (source, layout or source)
    assert summary.base_checked and not summary.warnings and summary.shards > 1 and summary.adapted == len(TARGETS)
    before, after = state(base), state(tmp_path / "out")
    for name, value in after.items():
        wanted = before[name]
        if name.removesuffix(".weight") in TARGETS:
            wanted = round_to(plain_merge(before[name], adapter, name.removesuffix(".weight")), dtype)
            assert not torch.equal(value, before[name])
        assert value.dtype == before[name].dtype and torch.equal(value, wanted), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == {"packed": "llada2_moe_veomni", "split": "llada2_moe"}[layout or source]


def test_t12_code_tokenizer_and_config_keys_come_along(tmp_path: Path, base: Path, adapter: Path):
    (adapter / "README.md").write_text("not carried")
    merge(base, tmp_path / "out", adapter)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["auto_map"] == {"AutoModel": "modeling_x.Model"}
    for name in ("modeling_x.py", "tokenizer.json", "tokenizer_config.json", "LICENSE"):
        assert (tmp_path / "out" / name).read_text() == f"base {name}"
    assert not {"README.md", "adapter_config.json"} & {path.name for path in (tmp_path / "out").iterdir()}


def test_companions_of_the_adapter_replace_those_of_the_base(tmp_path: Path, base: Path, adapter: Path):
    for place, word in ((base, "old"), (adapter, "new")):
        (place / "codec").mkdir()
        (place / "codec" / "codec.json").write_text(word)
        (place / "sampling.json").write_text(word)
    (base / "codec" / "stale.json").write_text("old")
    (adapter / "tokenizer.json").write_text("adapter's")
    merge(base, tmp_path / "out", adapter)
    assert [path.read_text() for path in (tmp_path / "out" / "codec").iterdir()] == ["new"]
    assert (tmp_path / "out" / "sampling.json").read_text() == "new"
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "base tokenizer.json"


def test_a_base_without_tokenizer_gets_the_adapters(tmp_path: Path, base: Path, adapter: Path):
    (base / "tokenizer.json").unlink()
    (adapter / "tokenizer.json").write_text("adapter's")
    merge(base, tmp_path / "out", adapter)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "adapter's"


def test_companions_of_several_adapters(tmp_path: Path, base: Path, adapter: Path):
    other = write_adapter(tmp_path / "other", base, seed=1)
    for place in (adapter, other):
        (place / "codec").mkdir()
        (place / "codec" / "codec.json").write_text("same")
        (place / "sampling.json").write_text(place.name)
    summary = merge(base, tmp_path / "out", adapter, other)
    assert "system prompts of the adapters differ" in summary.warnings[0] and str(other) in summary.warnings[0]
    assert (tmp_path / "out" / "sampling.json").read_text() == "other"
    (other / "codec" / "codec.json").write_text("different")
    with pytest.raises(CheckpointError, match="image codes of one model have one meaning"):
        merge(base, tmp_path / "again", adapter, other)


@pytest.mark.parametrize("options", [{}, {"rslora": True}, {"dora": True}, {"rank": 1}])
def test_d5_peft_merges_to_the_same_model(tmp_path: Path, base: Path, options: dict):
    """`merge_and_unload` computes in float32: equal to 1e-6 of the largest weight."""
    from peft import PeftModel

    adapter = write_adapter(tmp_path / "adapter", base, **options)
    merge(base, tmp_path / "out", adapter)
    peft = PeftModel.from_pretrained(U2ForDiffusion.from_pretrained(base), adapter).merge_and_unload()
    ours = state(tmp_path / "out")
    for name, value in peft.state_dict().items():
        if name != CHANNEL_MASK:
            assert float((ours[name] - value).abs().max()) <= 1e-6 * float(value.abs().max()), name


def test_patterns_give_layers_their_own_rank_and_alpha(tmp_path: Path, base: Path):
    from peft import PeftModel

    adapter = write_adapter(tmp_path / "adapter", base, rank=4)
    config = json.loads((adapter / "adapter_config.json").read_text())
    config |= {"alpha_pattern": {"attention.dense": 3.0, r"model\.layers\.1\..*value": 7}, "rank_pattern": {"dense": 2}}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    short = {
        f"base_model.model.{DENSE}.lora_A.weight": torch.randn(2, 16),
        f"base_model.model.{DENSE}.lora_B.weight": torch.randn(16, 2),
    }
    edit_adapter(adapter, short)
    merge(base, tmp_path / "out", adapter)
    peft = PeftModel.from_pretrained(U2ForDiffusion.from_pretrained(base), adapter).merge_and_unload().state_dict()
    ours = state(tmp_path / "out")
    for module in TARGETS:
        torch.testing.assert_close(ours[f"{module}.weight"], peft[f"{module}.weight"], rtol=1e-6, atol=1e-6)


def test_several_adapters_add_with_their_weights(tmp_path: Path, base: Path, adapter: Path):
    other = write_adapter(tmp_path / "other", base, seed=1, rank=2, alpha=3.0, targets=(DENSE, QKV))
    summary = merge(base, tmp_path / "out", (adapter, 0.5), (other, -2.0))
    before, after = state(base), state(tmp_path / "out")
    for module in TARGETS:
        w = before[f"{module}.weight"]
        wanted = w.double() + 0.5 * (plain_merge(w, adapter, module) - w.double())
        if module != SHARED:
            wanted += -2.0 * (plain_merge(w, other, module) - w.double())
        torch.testing.assert_close(after[f"{module}.weight"], wanted.float(), rtol=1e-6, atol=1e-7)
    assert summary.adapted == 3 and summary.logits is None


@pytest.mark.parametrize("stores_mask", [True, False])
def test_whole_modules_replace_the_bases(tmp_path: Path, base: Path, stores_mask: bool):
    whole = {f"{HEAD}.weight": torch.randn(8, 16), "lm_head.weight": torch.randn(40, 16)}
    head = "multi_codebook_head"
    whole |= {n: torch.randn_like(t) for n, t in tiny_model().named_parameters() if n.startswith(head)}
    # PEFT stores the buffers of such modules too.
    whole[CHANNEL_MASK] = tiny_model().state_dict()[CHANNEL_MASK]
    if not stores_mask:
        drop_channel_mask(base)
    adapter = write_adapter(tmp_path / "adapter", base, whole=whole)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(
        json.dumps(config | {"modules_to_save": ["lm_head", "lm_img_head.0", head]})
    )
    summary = merge(base, tmp_path / "out", adapter)
    after = state(tmp_path / "out")
    assert summary.replaced == len(whole) - 1 and summary.check is not None
    assert summary.check.replaced == len(whole) - 1
    assert all(torch.equal(after[name], value) for name, value in whole.items())
    edit_adapter(adapter, {f"base_model.model.{CHANNEL_MASK}": torch.zeros(3, 3)})
    with pytest.raises(CheckpointError, match="channel_mask — must be 0 on and below the diagonal"):
        merge(base, tmp_path / "again", adapter)


def drop_channel_mask(base: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    del tensors[CHANNEL_MASK]
    save_file(tensors, base / "model.safetensors")


@pytest.mark.parametrize("init", ["default", "pissa"])
def test_adapters_of_our_own_runs_merge_as_they_are_attached(tmp_path: Path, init: str):
    """A PiSSA adapter is stored against the original base: its two halves cancel down to the update."""
    from lumina_ft.adapters.files import write_adapter as write_attached
    from lumina_ft.adapters.lora import attach_adapter
    from lumina_ft.config.lora_schema import LoraConfig

    base = write_base(tmp_path / "base", torch.bfloat16, layout="split")
    model = U2ForDiffusion.from_pretrained(base)
    attached = attach_adapter(model, LoraConfig(rank=4, alpha=8.0, init=init, rank_pattern={"dense": 2}), seed=0)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    options = {"base": model_identity(base), "base_name": str(base), "changed": ()}
    write_attached(tmp_path / "adapter", model, attached, **options)
    summary = merge(base, tmp_path / "out", tmp_path / "adapter", layout="packed")
    assert summary.base_checked and summary.adapted == len(attached.targets) and summary.logits is not None
    assert summary.logits.effect > 10 * summary.logits.largest


@pytest.mark.parametrize("source", ["float32", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_dtype_is_that_of_all_weights_and_of_no_buffer(tmp_path: Path, source: str, wanted: str):
    base = write_base(tmp_path / "base", getattr(torch, source), layout="split")
    adapter = write_adapter(tmp_path / "adapter", base)
    merge(base, tmp_path / "out", adapter, dtype=getattr(torch, wanted), layout="packed")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == wanted
    buffers = {BIAS: torch.float32, CHANNEL_MASK: tiny_model().state_dict()[CHANNEL_MASK].dtype}
    for name, value in stored.items():
        assert value.dtype == buffers.get(name, getattr(torch, wanted)), name
    name = f"{DENSE}.weight"
    exact = plain_merge(state(base)[name], adapter, DENSE)
    assert torch.equal(stored[name], round_to(exact, getattr(torch, wanted)))
    assert torch.equal(stored[BIAS], state(base)[BIAS]), "near ties between experts are in its low bits"


def test_a_float64_base_is_rounded_once(tmp_path: Path):
    base = write_base(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    # Just above the middle between two bfloat16 numbers; rounded to float32 first it would be on it, and go down.
    tensors[f"{HEAD}.weight"] = torch.full_like(tensors[f"{HEAD}.weight"], 1.0).double() + 2.0**-8 + 2.0**-40
    save_file(tensors, base / "model.safetensors")
    merge(base, tmp_path / "out", write_adapter(tmp_path / "adapter", base), dtype=torch.bfloat16)
    assert (load_file(tmp_path / "out" / "model.safetensors")[f"{HEAD}.weight"] == 1.0 + 2.0**-7).all()


def test_a_small_update_in_bfloat16_warns_and_float32_keeps_it(tmp_path: Path):
    base = write_base(tmp_path / "base", torch.bfloat16)
    adapter = write_adapter(tmp_path / "adapter", base, b_std=5e-6)
    summary = merge(base, tmp_path / "out", adapter)
    assert summary.check is not None and summary.check.lowest_cosine < 0.99
    (warning,) = summary.warnings
    assert "3 of 3 adapted matrices have a delta cosine under 0.99 (worst: model.layers" in warning
    assert "--dtype float32 keeps it" in warning
    precise = merge(base, tmp_path / "precise", adapter, dtype=torch.float32)
    assert precise.check is not None and precise.check.lowest_cosine > 0.9999 and not precise.warnings


def test_an_adapter_without_hashes_merges_with_a_warning(tmp_path: Path, base: Path):
    summary = merge(base, tmp_path / "out", write_adapter(tmp_path / "plain", None))
    assert not summary.base_checked
    assert "doesn't record the hashes of its base (plain PEFT)" in summary.warnings[0]


def test_d5_an_adapter_of_another_base_is_refused_by_the_first_tensor_that_differs(tmp_path: Path, adapter: Path):
    other = write_base(tmp_path / "other", seed=4)
    with pytest.raises(CheckpointError, match=r"model\.word_embeddings\.weight has hash [0-9a-f]{32}, the base of"):
        merge(other, tmp_path / "out", adapter)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "other"]


def test_one_bit_of_one_expert_makes_another_base(tmp_path: Path, adapter: Path):
    model = tiny_model()
    weight = model.get_parameter("model.layers.1.mlp.experts.up_proj").data
    weight.view(torch.int32)[3, 7, 15] ^= 1
    model.save_pretrained(tmp_path / "other", layout="split")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.up_proj has hash"):
        merge(tmp_path / "other", tmp_path / "out", adapter)


def test_the_base_in_another_layout_is_the_same_base(tmp_path: Path, adapter: Path):
    other = write_base(tmp_path / "other", layout="split")
    assert merge(other, tmp_path / "out", adapter).base_checked


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda base, a: write_adapter(a, base, dora=True), "is a DoRA adapter, which rescales whole rows"),
        (
            lambda base, a: write_adapter(a, base, whole={f"{HEAD}.weight": torch.ones(8, 16)}),
            "holds whole modules .*, which replace the base's and so have no weight",
        ),
    ],
)
def test_sums_that_mean_nothing_are_refused(tmp_path: Path, base: Path, adapter: Path, change: Callable, message: str):
    other = change(base, tmp_path / "second")
    with pytest.raises(ConfigError, match=message):
        merge(base, tmp_path / "out", (other, 0.5))
    if "DoRA" in message:
        with pytest.raises(ConfigError, match=message):
            merge(base, tmp_path / "out", adapter, other)
    assert merge(base, tmp_path / "out", other).output.is_dir()


@pytest.mark.parametrize("targets", [(DENSE,), (HEAD,)])
def test_two_adapters_that_exclude_each_other_are_refused(tmp_path: Path, base: Path, targets: tuple[str, ...]):
    whole = write_adapter(tmp_path / "whole", base, targets=(DENSE,), whole={f"{HEAD}.weight": torch.ones(8, 16)})
    value = None if targets == (HEAD,) else {f"{HEAD}.weight": torch.zeros(8, 16)}
    other = write_adapter(tmp_path / "other", base, targets=targets, whole=value)
    for pair in ((whole, other), (other, whole)):
        with pytest.raises(CheckpointError, match=r"lm_img_head\.0\.weight — .* one of the two replaces it whole"):
            merge(base, tmp_path / "out", *pair)


@pytest.mark.parametrize("weight", [0.0, math.nan, math.inf])
def test_a_weight_is_a_number_other_than_zero(tmp_path: Path, base: Path, adapter: Path, weight: float):
    with pytest.raises(ConfigError, match="a weight is a number other than 0"):
        merge(base, tmp_path / "out", (adapter, weight))


def test_an_adapter_of_other_layers_or_sizes_is_refused(tmp_path: Path, base: Path, adapter: Path):
    edit_adapter(adapter, {f"base_model.model.{DENSE}.lora_A.weight": torch.zeros(4, 15)})
    with pytest.raises(CheckpointError, match=rf"{DENSE}\.weight \[16, 15\] — .* is \[16, 16\] there"):
        merge(base, tmp_path / "out", adapter)
    beyond = DENSE.replace(".0.", ".7.")
    edit_adapter(
        adapter,
        {
            f"base_model.model.{DENSE}.lora_A.weight": torch.zeros(4, 16),
            f"base_model.model.{beyond}.lora_A.weight": torch.zeros(4, 16),
            f"base_model.model.{beyond}.lora_B.weight": torch.zeros(16, 4),
        },
    )
    with pytest.raises(CheckpointError, match=rf"{beyond}\.weight \[16, 16\] — .* is not in it"):
        merge(base, tmp_path / "out", adapter)


def test_unknown_adapter_layouts_are_refused(tmp_path: Path, base: Path, adapter: Path):
    edit_adapter(adapter, {f"base_model.model.{DENSE}.lora_embedding_A": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match="an unknown layout"):
        merge(base, tmp_path / "out", adapter)
    for key, value in (("peft_type", "LOHA"), ("target_parameters", ["gate_proj"]), ("bias", "all")):
        other = write_adapter(tmp_path / key, base)
        config = json.loads((other / "adapter_config.json").read_text())
        (other / "adapter_config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(CheckpointError, match=key):
            merge(base, tmp_path / "out", other)


def test_existing_outputs_are_refused_and_overwrite_replaces_models_only(tmp_path: Path, base: Path, adapter: Path):
    merge(base, tmp_path / "out", adapter)
    with pytest.raises(CheckpointError, match="exists — a merge writes a new directory"):
        merge(base, tmp_path / "out", adapter)
    other = write_adapter(tmp_path / "other", base, seed=5)
    (tmp_path / "out" / "stale.txt").write_text("")
    merge(base, tmp_path / "out", other, overwrite=True)
    assert not (tmp_path / "out" / "stale.txt").exists()
    assert torch.equal(state(tmp_path / "out")[f"{DENSE}.weight"], plain_merge(tiny_weight(), other, DENSE).float())
    (tmp_path / "notes").mkdir()
    with pytest.raises(CheckpointError, match="is not a model directory"):
        merge(base, tmp_path / "notes", adapter, overwrite=True)
    (tmp_path / "out" / "run").mkdir()
    with pytest.raises(CheckpointError, match="holds run beside the model — --overwrite would delete that too"):
        merge(base, tmp_path / "out", adapter, overwrite=True)
    assert (tmp_path / "out" / "run").is_dir()
    for output in (base, adapter, tmp_path):
        with pytest.raises(ConfigError, match="which is merged — choose another"):
            merge(base, output, adapter, overwrite=True)


def tiny_weight() -> torch.Tensor:
    return tiny_model().state_dict()[f"{DENSE}.weight"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), SystemExit])
def test_an_interrupted_merge_leaves_nothing_and_an_old_output_in_place(
    tmp_path: Path, base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch, error
):
    merge(base, tmp_path / "out", adapter)
    identity, before = model_identity(tmp_path / "out"), sorted(path.name for path in tmp_path.iterdir())

    def stop(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(merge_module, "verify_merge", stop)
    expected = RunError if isinstance(error, OSError) else error
    with pytest.raises(expected, match="No space left on device" if isinstance(error, OSError) else None):
        merge(base, tmp_path / "out", adapter, overwrite=True)
    with pytest.raises(expected):
        merge(base, tmp_path / "new", adapter)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert model_identity(tmp_path / "out") == identity


def test_a_full_disk_is_noticed_before_the_first_byte(tmp_path: Path):
    with pytest.raises(RunError, match=r"GB free — the merged model takes 1000000000\.0 GB — make room"):
        with written_aside(tmp_path / "out", 10**18):
            raise AssertionError("not reached")
    assert not list(tmp_path.iterdir())


def test_what_a_killed_overwrite_left_behind_is_put_right(tmp_path: Path, base: Path, adapter: Path):
    merge(base, tmp_path / "out", adapter)
    (tmp_path / "out" / "old").write_text("")
    (tmp_path / "out").rename(tmp_path / ".out.replaced")
    (tmp_path / ".out.partial").mkdir()
    with pytest.raises(CheckpointError, match="exists — a merge writes a new directory"):
        merge(base, tmp_path / "out", adapter)
    assert (tmp_path / "out" / "old").exists()
    merge(base, tmp_path / "out", adapter, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]
    assert not (tmp_path / "out" / "old").exists()


def test_an_output_that_appears_meanwhile_stays(tmp_path: Path):
    with pytest.raises(CheckpointError, match="out — appeared while the merge was running"):
        with written_aside(tmp_path / "out", 0):
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "other").write_text("")
    assert (tmp_path / "out" / "other").exists() and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_working_directory_can_be_overwritten(
    tmp_path: Path, base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
):
    merge(base, tmp_path / "out", adapter)
    (tmp_path / "out" / "old").write_text("")
    monkeypatch.chdir(tmp_path / "out")
    merge(base, Path(), adapter, overwrite=True)
    assert (tmp_path / "out" / "config.json").exists() and not (tmp_path / "out" / "old").exists()


def test_progress_reaches_its_total(tmp_path: Path, base: Path, adapter: Path):
    seen: list[tuple[int, int]] = []
    merge(base, tmp_path / "out", adapter, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] and seen == sorted(seen)
