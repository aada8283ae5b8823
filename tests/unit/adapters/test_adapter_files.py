"""Adapter directories: what is written, and what is refused on reading (D5, T12)."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from lora_fixtures import trained
from safetensors.torch import load_file, save_file

from lumina_ft.adapters.files import read_adapter, write_adapter
from lumina_ft.adapters.lora import attach_adapter
from lumina_ft.config.lora_schema import LoraConfig
from lumina_ft.errors import CheckpointError
from lumina_ft.models.identity import BaseIdentity
from lumina_ft.models.tensor_files import ShardWriter
from lumina_ft.models.u2 import U2ForDiffusion

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DENSE = "model.layers.0.attention.dense"


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    trained(base, tmp_path / "adapter", LoraConfig(rank=4, alpha=8, modules_to_save=("image_heads",)))
    return tmp_path / "adapter"


def written(base: Path, folder: Path, **options) -> dict:
    trained(base, folder, LoraConfig(**{"rank": 4, "alpha": 8, **options}))
    return json.loads((folder / CONFIG).read_text())


def test_D5_targets_are_short_names_where_these_select_the_same(base, tmp_path):
    config = written(base, tmp_path / "a", targets=("attention", "dense_mlp"))
    # `gate_proj` alone would also mean the shared experts, and the routed ones of the split layout.
    assert config["target_modules"] == ["query_key_value", "dense", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    config = written(base, tmp_path / "b", targets=("model.layers.1.attention.dense", "shared_experts"))
    assert config["target_modules"][0] == "1.attention.dense"
    assert config["target_modules"][1:] == [f"shared_experts.{part}_proj" for part in ("gate", "up", "down")]


def test_patterns_name_the_exceptions(base, tmp_path):
    ranks = {"model.layers.0.attention.dense": 2}
    config = written(base, tmp_path / "a", targets=("attention",), rank_pattern=ranks, alpha_pattern={"dense": 2})
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert config["rank_pattern"] == {"0.attention.dense": 2}
    assert config["alpha_pattern"] == {"dense": 2}
    assert config["lora_dropout"] == 0.0 and config["bias"] == "none"
    assert config["base_model_name_or_path"] == str(base)


def test_D5_items_of_module_lists_are_listed_singly(base, tmp_path):
    config = written(base, tmp_path / "a", modules_to_save=("heads", "image_embeddings"))
    assert config["modules_to_save"] == [
        *(f"model.img_embeddings.{i}" for i in range(3)),
        "lm_head",
        *(f"lm_img_head.{i}" for i in range(3)),
        "multi_codebook_head",
    ]


def test_T12_the_base_is_recorded_in_the_tensor_file(base, tmp_path):
    model = U2ForDiffusion.from_pretrained(base)
    adapter = attach_adapter(model, LoraConfig(rank=4), seed=1)
    identity = BaseIdentity("ab" * 16, {"lm_head.weight": "cd" * 16})
    write_adapter(tmp_path / "a", model, adapter, base=identity, base_name="base", changed=())
    assert read_adapter(tmp_path / "a").base == identity
    write_adapter(tmp_path / "b", model, adapter, base=None, base_name="base", changed=())
    assert read_adapter(tmp_path / "b").base is None


def test_reading_gives_tensors_by_module_name(adapter):
    file = read_adapter(adapter)
    pair, stored = file.pair(DENSE), load_file(adapter / WEIGHTS)
    assert torch.equal(pair.a, stored[f"base_model.model.{DENSE}.lora_A.weight"])
    assert torch.equal(pair.b, stored[f"base_model.model.{DENSE}.lora_B.weight"])
    assert pair.scale == 2.0 and pair.magnitude is None
    assert file.targets[DENSE][:2] == (4, 8.0)
    assert dict(file.modules) == {f"lm_img_head.{i}.weight": (8, 16) for i in range(3)}
    assert file.base_name is not None


def test_a_failing_disk_is_told_after_the_last_tensor(base, tmp_path, monkeypatch):
    """So that a rank that can't write goes on taking part in the gathering."""
    model = U2ForDiffusion.from_pretrained(base)
    adapter = attach_adapter(model, LoraConfig(rank=4), seed=1)
    gathered = []
    monkeypatch.setattr("lumina_ft.adapters.files.whole", lambda params: gathered.extend(params) or nullcontext(params))
    monkeypatch.setattr(ShardWriter, "_put", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_adapter(tmp_path / "a", model, adapter, base=None, base_name="base", changed=())
    assert len(gathered) == 2 * len(adapter.targets)
    assert not (tmp_path / "a" / CONFIG).exists() and not list((tmp_path / "a").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type: 'IA3' — only LORA"),
        (
            {"target_parameters": ["mlp.experts.gate_proj"]},
            "target_parameters: 'mlp.experts.gate_proj' — has no tensor",
        ),
        ({"target_parameters": "experts.gate_proj"}, "target_parameters: .* — must be a list of parameter names"),
        ({"target_parameters": ["w"], "use_dora": True}, "target_parameters: .* PEFT knows no use_dora"),
        ({"target_parameters": ["w"], "lora_dropout": 0.1}, "target_parameters: .* PEFT knows no lora_dropout"),
        ({"bias": "all"}, "bias: 'all' — trained biases"),
        ({"lora_bias": True}, "lora_bias: True — a kind of LoRA that isn't read"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa' — such an adapter belongs to a changed base"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"some_new_variant": {"a": 1}}, "some_new_variant: .* isn't read here"),
        ({"use_dora": True}, "holds lora_A, lora_B — with use_dora=True a layer has lora_A, lora_B, lora_magnitude"),
        ({"r": 8}, r"lora_A \[4, 16\], lora_B \[16, 4\] — must be \[8, inputs\]"),
        ({"r": "4"}, "r and lora_alpha must be numbers"),
        ({"lora_alpha": float("nan")}, "r and lora_alpha must be numbers"),
        ({"lora_dropout": "x"}, "lora_dropout: 'x' — must be a number"),
        ({"lora_dropout": 5}, "lora_dropout: 5 — must be a number from 0 to 1"),
        ({"lora_dropout": -0.1}, "lora_dropout: -0.1 — must be a number from 0 to 1"),
        ({"rank_pattern": ["dense"]}, "rank_pattern: .* — must map regular expressions to numbers"),
        ({"alpha_pattern": {"dense": "x"}}, "alpha_pattern: .* — must map regular expressions to numbers"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern: .* — must map regular expressions to numbers"),
        ({"modules_to_save": "lm_head"}, "modules_to_save: 'lm_head' — must be a list"),
        ({"modules_to_save": None}, "lm_img_head.0.weight — is neither lora_A.*nor in modules_to_save"),
        ({"modules_to_save": ["lm_img_head.0", "lm_img_head.1", "lm_img_head.2", "lm_head"]}, "'lm_head' — has no"),
    ],
)
def test_unknown_layouts_are_refused_by_name(adapter, change, message):
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=message):
        read_adapter(adapter)


def test_keys_that_peft_writes_by_default_are_accepted(adapter):
    from peft import LoraConfig as PeftLoraConfig

    theirs = {key: value for key, value in PeftLoraConfig(r=4).to_dict().items() if not isinstance(value, set)}
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(theirs | config, default=str))
    assert read_adapter(adapter).targets


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"base_model.model.{DENSE}.lora_A.weight"), f"{DENSE}: holds lora_B — with use_dora=False"),
        (lambda t: t.update(stray=torch.zeros(1)), "stray — keys start with 'base_model.model.'"),
        (
            lambda t: t.update({"base_model.model.lm_head.lora_embedding_A": torch.zeros(1)}),
            "lora_embedding_A — is neither lora_A",
        ),
        (
            lambda t: t.update({"base_model.model.x.experts.base_layer.lora_A.weight": torch.zeros(4, 4)}),
            "base_layer.lora_A.weight — keys start with",
        ),
        (
            lambda t: t.update({f"base_model.model.{DENSE}.lora_A.weight": torch.zeros(16, 4)}),
            r"lora_A \[16, 4\]",
        ),
        (
            lambda t: t.update({f"base_model.model.{DENSE}.lora_A.weight": torch.zeros(4, 0)}),
            r"lora_A \[4, 0\]",
        ),
        (
            lambda t: t.update({f"base_model.model.{DENSE}.lora_A.weight": torch.zeros(4, 16, dtype=torch.int32)}),
            "I32 — adapter tensors are floats",
        ),
    ],
)
def test_tensors_that_make_no_adapter_are_refused(adapter, edit, message):
    tensors = load_file(adapter / WEIGHTS)
    edit(tensors)
    save_file(tensors, adapter / WEIGHTS)
    with pytest.raises(CheckpointError, match=message):
        read_adapter(adapter)


def test_missing_and_damaged_files_are_named(adapter, tmp_path):
    with pytest.raises(CheckpointError, match=f"nowhere/{CONFIG} — not found"):
        read_adapter(tmp_path / "nowhere")
    whole = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(whole[:-8])
    with pytest.raises(CheckpointError, match=f"{WEIGHTS} — .*must be a complete safetensors file"):
        read_adapter(adapter)
    (adapter / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=f"{WEIGHTS} — not found"):
        read_adapter(adapter)
    (adapter / CONFIG).write_text("{")
    with pytest.raises(CheckpointError, match=f"{CONFIG} — .*must be a JSON object"):
        read_adapter(adapter)
