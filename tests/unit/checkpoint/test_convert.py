"""Conversion between the layouts without building the model (T12)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_u2 import small_config

from lumina_ft.checkpoint.export import convert
from lumina_ft.errors import CheckpointError, ConfigError
from lumina_ft.models.hf_keys import CHANNEL_MASK
from lumina_ft.models.tensor_files import SINGLE_FILE, CheckpointReader
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.weights import save_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A split bf16 checkpoint with fp32 biases, code and tokenizer files."""
    config = small_config()
    model = U2ForDiffusion(config)
    model.init_weights_(seed=1)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    directory = tmp_path_factory.mktemp("convert") / "source"
    save_model(model, directory, layout="split")
    raw = json.loads((directory / "config.json").read_text())
    raw["auto_map"] = {"AutoModel": "modeling_x.Model"}
    (directory / "config.json").write_text(json.dumps(raw))
    (directory / "modeling_x.py").write_text("code")
    (directory / "tokenizer.json").write_text("{}")
    return directory


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    with CheckpointReader(directory) as reader:
        return {key: reader.read(key).clone() for key in reader.tensors}


def copy_of(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_t12_there_and_back_is_bit_identical(source: Path, tmp_path: Path):
    packed = convert(source, tmp_path / "packed", "packed", max_shard_bytes=5000)
    assert (packed.source_layout, packed.layout) == ("split", "packed") and packed.shards > 1
    assert packed.tensors == len(tensors(packed.output))
    back = convert(packed.output, tmp_path / "back", "split")
    assert (back.source_layout, back.shards) == ("packed", 1)
    before, after = tensors(source), tensors(back.output)
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value.dtype == after[key].dtype and torch.equal(value, after[key]), key
    assert after["model.layers.1.mlp.gate.expert_bias"].dtype == torch.float32


def test_t12_config_differs_in_model_type_only_and_files_are_carried(source: Path, tmp_path: Path):
    convert(source, tmp_path / "packed", "packed")
    before = json.loads((source / "config.json").read_text())
    after = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert after.pop("model_type") == "llada2_moe_veomni" and before.pop("model_type") == "llada2_moe"
    assert after == before
    assert (tmp_path / "packed" / "modeling_x.py").read_text() == "code"
    assert (tmp_path / "packed" / "tokenizer.json").read_text() == "{}"


def test_an_absent_channel_mask_is_written(source: Path, tmp_path: Path):
    damaged = copy_of(source, tmp_path / "in")
    content = load_file(damaged / SINGLE_FILE)
    mask = content.pop(CHANNEL_MASK)
    save_file(content, damaged / SINGLE_FILE)
    convert(damaged, tmp_path / "out", "packed")
    written = tensors(tmp_path / "out")[CHANNEL_MASK]
    assert written.dtype == torch.bfloat16 and torch.equal(written, mask)


def test_existing_output_is_refused_and_untouched(source: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="out — exists — a conversion writes a new directory"):
        convert(source, tmp_path / "out", "packed")
    assert list((tmp_path / "out").iterdir()) == []


def test_unwritable_output_is_a_config_error(source: Path, tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="output — .*out — Not a directory — must be writable"):
        convert(source, tmp_path / "file" / "out", "packed")


def test_a_damaged_source_leaves_nothing_behind(source: Path, tmp_path: Path):
    damaged = copy_of(source, tmp_path / "in")
    content = load_file(damaged / SINGLE_FILE)
    del content["model.layers.2.mlp.experts.0.down_proj.weight"]
    save_file(content, damaged / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.0\.down_proj\.weight \[16, 8\] is missing"):
        convert(damaged, tmp_path / "out", "packed")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
