"""Loading and saving of weights in both layouts; damaged checkpoints (T12, M4)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_u2 import small_config

from lumina_ft.errors import CheckpointError, ConfigError
from lumina_ft.models.hf_keys import CHANNEL_MASK
from lumina_ft.models.tensor_files import INDEX_FILE, SINGLE_FILE, CheckpointReader
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.weights import load_pretrained, load_weights, save_model
from lumina_ft.parallel.expert_parallel import ExpertParallel
from lumina_ft.parallel.zero3 import FlatReader, fill_tensor

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
BIAS = "model.layers.1.mlp.gate.expert_bias"


def tiny_model(**overrides: object) -> U2ForDiffusion:
    model = U2ForDiffusion(small_config(**overrides))
    model.init_weights_(seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def model() -> U2ForDiffusion:
    return tiny_model()


@pytest.fixture
def split(model: U2ForDiffusion, tmp_path: Path) -> Path:
    save_model(model, tmp_path / "split", layout="split")
    return tmp_path / "split"


def edit(directory: Path, changes: Mapping[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors."""
    tensors = load_file(directory / SINGLE_FILE)
    for key, value in changes.items():
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    save_file(tensors, directory / SINGLE_FILE)


def assert_same_state(a: U2ForDiffusion, b: U2ForDiffusion) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("layout", ["packed", "split"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 4000])
def test_t12_save_and_load_round_trip_in_both_layouts(model, tmp_path: Path, layout, max_shard_bytes: int):
    save_model(model, tmp_path, layout=layout, max_shard_bytes=max_shard_bytes)
    assert (tmp_path / INDEX_FILE).exists() == (max_shard_bytes == 4000)
    assert_same_state(load_pretrained(U2ForDiffusion, tmp_path), model)


@pytest.mark.parametrize("layout", ["packed", "split"])
def test_t12_from_pretrained_and_save_pretrained_use_this_path(model, tmp_path: Path, layout):
    model.save_pretrained(tmp_path, layout=layout)
    loaded = U2ForDiffusion.from_pretrained(tmp_path)
    assert not loaded.training
    assert_same_state(loaded, model)


def test_split_layout_holds_one_tensor_per_expert_and_packed_one_per_projection(model, tmp_path: Path):
    save_model(model, tmp_path / "s", layout="split")
    save_model(model, tmp_path / "p", layout="packed")
    split, packed = load_file(tmp_path / "s" / SINGLE_FILE), load_file(tmp_path / "p" / SINGLE_FILE)
    assert sum(".mlp.experts." in key for key in split) == 2 * 4 * 3
    assert sum(".mlp.experts." in key for key in packed) == 2 * 3
    assert torch.equal(split[EXPERT], packed["model.layers.1.mlp.experts.up_proj"][2])
    assert packed.keys() == model.state_dict().keys()


def test_t12_config_names_the_layout_and_keeps_what_the_source_said(model, tmp_path: Path):
    source = tmp_path / "source"
    save_model(model, source, layout="split")
    raw = json.loads((source / "config.json").read_text())
    raw |= {
        "auto_map": {"AutoConfig": "configuration_x.Config"},
        "architectures": ["Published"],
        "max_window_layers": 28,
    }
    (source / "config.json").write_text(json.dumps(raw))
    for name in ("configuration_x.py", "tokenizer.json", "tokenizer_config.json", "LICENSE", "merges.txt"):
        (source / name).write_text(name)
    (source / "notes.md").write_text("not carried")
    for layout, model_type in (("packed", "llada2_moe_veomni"), ("split", "llada2_moe")):
        out = tmp_path / layout
        save_model(load_pretrained(U2ForDiffusion, source), out, layout=layout, source_dir=source)
        config = json.loads((out / "config.json").read_text())
        assert config["model_type"] == model_type
        assert config["auto_map"] == raw["auto_map"] and config["architectures"] == ["Published"]
        assert config["max_window_layers"] == 28 and config["torch_dtype"] == "float32"
        assert (out / "configuration_x.py").read_text() == "configuration_x.py"
        assert {"tokenizer.json", "tokenizer_config.json", "LICENSE", "merges.txt"} <= {p.name for p in out.iterdir()}
        assert not (out / "notes.md").exists()
        assert_same_state(load_pretrained(U2ForDiffusion, out), model)


def test_export_writes_no_null_where_the_published_code_has_a_default(model, tmp_path: Path):
    save_model(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert all(config.get(key, "absent") is not None for key in ("codebook_size", "text_ids", "media_ids"))
    assert config["architectures"] == ["LLaDA2MoeModelLM"] and config["use_cache"] is False


def test_packed_keys_with_weight_suffix_load(model, tmp_path: Path):
    save_model(model, tmp_path)
    tensors = load_file(tmp_path / SINGLE_FILE)
    renamed = {key + ".weight" if ".mlp.experts." in key else key: value for key, value in tensors.items()}
    save_file(renamed, tmp_path / SINGLE_FILE)
    assert_same_state(load_pretrained(U2ForDiffusion, tmp_path), model)


def test_text_only_model_round_trip(tmp_path: Path):
    model = tiny_model(num_codebooks=None, num_shared_experts=None)
    save_model(model, tmp_path, layout="split")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.get("num_codebooks") is None and config["num_shared_experts"] is None
    assert_same_state(load_pretrained(U2ForDiffusion, tmp_path), model)


def test_bf16_load_keeps_fp32_bias_bits_and_declared_buffer_dtypes(model, split: Path):
    loaded = load_pretrained(U2ForDiffusion, split, dtype=torch.bfloat16)
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    buffers, wanted = dict(loaded.named_buffers()), dict(model.named_buffers())
    assert buffers[BIAS].dtype == torch.float32 and torch.equal(buffers[BIAS], wanted[BIAS])
    assert not torch.equal(wanted[BIAS], wanted[BIAS].bfloat16().float()), "the fixture must have bits that bf16 lacks"
    for name, buffer in wanted.items():
        assert buffers[name].dtype == buffer.dtype and torch.equal(buffers[name], buffer), name


def test_config_dtype_decides_when_none_is_given(model, tmp_path: Path):
    save_model(load_pretrained(U2ForDiffusion, _saved(model, tmp_path / "a"), dtype=torch.bfloat16), tmp_path / "b")
    assert load_pretrained(U2ForDiffusion, tmp_path / "b").lm_head.weight.dtype == torch.bfloat16


def _saved(model: U2ForDiffusion, directory: Path) -> Path:
    save_model(model, directory)
    return directory


@pytest.mark.parametrize("value", [None, "fp32", "bf16"])
def test_channel_mask_may_be_absent_or_of_either_dtype(model, split: Path, value):
    mask = torch.full((3, 3), -torch.inf).triu(1)
    edit(split, {CHANNEL_MASK: {None: None, "fp32": mask, "bf16": mask.bfloat16()}[value]})
    assert_same_state(load_pretrained(U2ForDiffusion, split), model)


@pytest.mark.parametrize("bad", [torch.zeros(3, 3), torch.full((3, 3), -torch.inf).tril(-1)])
def test_channel_mask_that_is_not_causal_is_refused(split: Path, bad: torch.Tensor):
    edit(split, {CHANNEL_MASK: bad})
    with pytest.raises(CheckpointError, match="channel_mask — must be 0 on and below the diagonal"):
        load_pretrained(U2ForDiffusion, split)


def test_m4_stored_bias_must_be_zero_when_the_config_disables_it(model, split: Path):
    raw = json.loads((split / "config.json").read_text())
    (split / "config.json").write_text(json.dumps(raw | {"moe_router_enable_expert_bias": False}))
    with pytest.raises(CheckpointError, match=r"expert_bias is not zero — moe_router_enable_expert_bias is false"):
        load_pretrained(U2ForDiffusion, split)
    biases = {name: torch.zeros_like(b) for name, b in model.state_dict().items() if name.endswith("expert_bias")}
    edit(split, biases)
    load_pretrained(U2ForDiffusion, split)
    edit(split, dict.fromkeys(biases))
    load_pretrained(U2ForDiffusion, split)


def test_missing_expert_is_named_with_its_shape(split: Path):
    edit(split, {EXPERT: None})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.2\.up_proj\.weight \[8, 16\] is missing"):
        load_pretrained(U2ForDiffusion, split)


def test_one_expert_missing_and_one_too_many_is_not_a_shift(split: Path):
    moved = load_file(split / SINGLE_FILE)[EXPERT]
    edit(split, {EXPERT: None, EXPERT.replace(".2.", ".4."): moved})
    with pytest.raises(CheckpointError, match=r"experts\.4\.up_proj\.weight is extra.*experts\.2\.up_proj.*missing"):
        load_pretrained(U2ForDiffusion, split)


def test_misshapen_tensor_is_named_with_both_shapes_and_its_file(split: Path):
    edit(split, {"model.layers.0.attention.dense.weight": torch.zeros(16, 15)})
    message = r"model\.safetensors: .*\.0\.attention\.dense\.weight has shape \[16, 15\], the model needs \[16, 16\]"
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(U2ForDiffusion, split)


def test_misshapen_expert_is_named(split: Path):
    edit(split, {EXPERT: torch.zeros(8, 15)})
    with pytest.raises(
        CheckpointError, match=r"experts\.2\.up_proj\.weight has shape \[8, 15\], the model needs \[8, 16\]"
    ):
        load_pretrained(U2ForDiffusion, split)


@pytest.mark.parametrize("name", ["lm_head.weight", BIAS, "lm_img_head.1.weight"])
def test_missing_tensor_is_named(split: Path, name: str):
    edit(split, {name: None})
    with pytest.raises(CheckpointError, match=rf"{name} \[.*\] is missing"):
        load_pretrained(U2ForDiffusion, split)


def test_extra_tensor_is_named_with_its_file(split: Path):
    edit(split, {"model.layers.7.input_layernorm.weight": torch.ones(16)})
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: model\.layers\.7\.input_layernorm\.weight \[16\] is extra"
    ):
        load_pretrained(U2ForDiffusion, split)


def test_a_long_list_of_problems_is_cut(split: Path):
    edit(split, {f"x{i}": torch.ones(1) for i in range(9)})
    with pytest.raises(CheckpointError, match="; and 5 more — "):
        load_pretrained(U2ForDiffusion, split)


def test_integer_weights_are_refused(split: Path):
    edit(split, {"model.norm.weight": torch.ones(16, dtype=torch.int32)})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has dtype I32, weights are floats"):
        load_pretrained(U2ForDiffusion, split)


def test_experts_of_different_dtypes_are_refused(split: Path):
    edit(split, {EXPERT: torch.zeros(8, 16, dtype=torch.bfloat16)})
    with pytest.raises(
        CheckpointError, match=r"experts\.2\.up_proj\.weight is torch\.bfloat16, expert 0 is torch\.float32"
    ):
        load_pretrained(U2ForDiffusion, split)


def test_dtypes_of_experts_are_compared_before_anything_is_written(split: Path):
    edit(split, {"model.layers.2.mlp.experts.3.down_proj.weight": torch.zeros(16, 8, dtype=torch.bfloat16)})
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    with pytest.raises(CheckpointError, match="one dtype"):
        load_weights(model, split)
    assert not model.lm_head.weight.any()


def test_mixed_layouts_are_refused(model, split: Path):
    edit(split, {"model.layers.2.mlp.experts.up_proj": torch.zeros(4, 8, 16)})
    with pytest.raises(CheckpointError, match="one by one or stacked, never both"):
        load_pretrained(U2ForDiffusion, split)


def test_nothing_is_written_to_the_model_when_the_checkpoint_is_wrong(split: Path):
    edit(split, {"lm_head.weight": None})
    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError):
        load_weights(model, split)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_every_target_is_filled_once_in_model_order_with_its_whole_value(model, split: Path):
    target, seen = tiny_model(), []
    names = {id(tensor): name for name, tensor in target.state_dict(keep_vars=True).items()}

    def fill(tensor: torch.Tensor, read: FlatReader) -> None:
        seen.append((names[id(tensor)], torch.cat(list(read(0, tensor.numel()))).view(tensor.shape)))

    assert load_weights(target, split, fill=fill) == "split"
    assert [name for name, _ in seen] == list(model.state_dict())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in seen)


@pytest.mark.parametrize("layout", ["packed", "split"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_own_experts_only(model, tmp_path: Path, layout, rank: int, monkeypatch: pytest.MonkeyPatch):
    save_model(model, tmp_path, layout=layout)
    # No process group takes part in loading.
    place: Any = ExpertParallel(size=2, rank=rank, name="ep_size_2", group=None, replicas=None)
    target = U2ForDiffusion(model.config, expert_parallel=place)
    read, reads = CheckpointReader.read_elements, []

    def noted(self: CheckpointReader, key: str, start: int, stop: int) -> torch.Tensor:
        reads.append((key, start, stop))
        return read(self, key, start, stop)

    monkeypatch.setattr(CheckpointReader, "read_elements", noted)
    load_weights(target, tmp_path)
    row = 8 * 16
    experts = [r for r in reads if ".mlp.experts." in r[0] and r[0].startswith("model.layers.1.")]
    if layout == "packed":
        assert sorted(r[1:] for r in experts) == [(rank * 2 * row, (rank + 1) * 2 * row)] * 3
    else:
        assert {int(r[0].split(".")[5]) for r in experts} == {rank * 2, rank * 2 + 1}
        assert len(experts) == 2 * 3
    whole = model.state_dict()
    for name, tensor in target.state_dict().items():
        expected = whole[name][place.local(4)] if ".mlp.experts." in name else whole[name]
        assert torch.equal(tensor, expected), name


def test_missing_and_broken_config(split: Path):
    (split / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json — .* — must be a JSON object"):
        load_pretrained(U2ForDiffusion, split)
    (split / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json — not found"):
        load_pretrained(U2ForDiffusion, split)


def test_unknown_layout_is_refused(model, tmp_path: Path):
    with pytest.raises(ConfigError, match="layout — 'fused' — must be one of packed, split"):
        save_model(model, tmp_path, layout="fused")


def test_loading_holds_nothing_besides_the_model(tmp_path: Path):
    """From the mapped file straight to the weights: anonymous memory doesn't grow, whatever the layout."""
    sizes = dict(hidden_size=256, moe_intermediate_size=256, num_experts=32, num_hidden_layers=6)
    model = tiny_model(**sizes)
    save_model(model, tmp_path, layout="split")
    peak = 0

    def anonymous_bytes() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    def watch(target: torch.Tensor, read: FlatReader) -> None:
        nonlocal peak
        fill_tensor(target, read)
        peak = max(peak, anonymous_bytes())

    before = anonymous_bytes()
    load_weights(model, tmp_path, fill=watch)
    # The stacked experts of one projection have 8 MiB.
    assert peak - before < 6 << 20, f"{(peak - before) >> 20} MiB over the model"
