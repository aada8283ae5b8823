"""Identity of a base model: what it depends on and what it doesn't."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_u2 import small_config

from lumina_ft.errors import CheckpointError
from lumina_ft.models.hf_keys import CHANNEL_MASK
from lumina_ft.models.identity import BaseIdentity, identity_of, model_identity
from lumina_ft.models.tensor_files import SINGLE_FILE
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.weights import load_pretrained, save_model

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
STACKED = "model.layers.1.mlp.experts.up_proj"
DENSE = "model.layers.0.attention.dense.weight"
BIAS = "model.layers.1.mlp.gate.expert_bias"


@pytest.fixture(scope="module")
def model() -> U2ForDiffusion:
    config = small_config(num_hidden_layers=2)
    built = U2ForDiffusion(config)
    built.init_weights_(seed=3)
    built.get_buffer(BIAS).copy_(torch.arange(4.0) / 3)
    return built


def identity_with(model: U2ForDiffusion, folder: Path, **changes: torch.Tensor | None) -> BaseIdentity:
    """Identity of a split export in which tensors are replaced or (None) removed."""
    save_model(model, folder, layout="split")
    tensors = load_file(folder / SINGLE_FILE)
    for key, value in changes.items():
        tensors.pop(key)
        if value is not None:
            tensors[key] = value
    save_file(tensors, folder / SINGLE_FILE)
    return model_identity(folder)


@pytest.fixture(scope="module")
def whole(model: U2ForDiffusion, tmp_path_factory: pytest.TempPathFactory) -> BaseIdentity:
    return identity_with(model, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("layout", ["packed", "split"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 3000])
def test_layout_and_sharding_leave_the_identity_alone(model, whole, tmp_path: Path, layout, max_shard_bytes: int):
    save_model(model, tmp_path, layout=layout, max_shard_bytes=max_shard_bytes)
    assert model_identity(tmp_path) == whole
    assert whole.tensors.keys() == {name for name in model.state_dict() if name != CHANNEL_MASK}


def test_every_bit_of_one_expert_counts_and_only_its_tensor_changes(model, whole, tmp_path: Path):
    weight = model.state_dict()[STACKED][2].clone()
    weight.view(torch.int32)[-1, -1] ^= 1
    changed = identity_with(model, tmp_path, **{EXPERT: weight})
    assert {name for name in whole.tensors if whole.tensors[name] != changed.tensors[name]} == {STACKED}
    assert changed.digest != whole.digest


def test_order_of_experts_shape_and_dtype_count(model, whole, tmp_path: Path):
    state = model.state_dict()
    other = EXPERT.replace(".2.", ".3.")
    swapped = {EXPERT: state[STACKED][3].clone(), other: state[STACKED][2].clone()}
    flat = {DENSE: state[DENSE].reshape(8, 32).clone()}
    wider = {DENSE: state[DENSE].double()}
    for i, (change, name) in enumerate([(swapped, STACKED), (flat, DENSE), (wider, DENSE)]):
        assert identity_with(model, tmp_path / str(i), **change).tensors[name] != whole.tensors[name]


def test_the_name_counts_so_equal_values_at_two_places_differ():
    assert identity_of({"a": "1", "b": "2"}).digest != identity_of({"a": "2", "b": "1"}).digest
    assert identity_of({"b": "2", "a": "1"}) == identity_of({"a": "1", "b": "2"})


def test_m4_tensors_that_may_be_absent_do_not_count(model, whole, tmp_path: Path):
    assert identity_with(model, tmp_path / "mask", **{CHANNEL_MASK: None}) == whole
    zero = identity_with(model, tmp_path / "zero", **{BIAS: torch.zeros(4)})
    assert zero == identity_with(model, tmp_path / "none", **{BIAS: None})
    assert set(whole.tensors) - set(zero.tensors) == {BIAS}


def test_bf16_weights_are_hashed_by_their_bytes(model, tmp_path: Path):
    save_model(model, tmp_path / "fp32")
    half = load_pretrained(U2ForDiffusion, tmp_path / "fp32", dtype=torch.bfloat16)
    save_model(half, tmp_path / "bf16", layout="split")
    save_model(half, tmp_path / "again", layout="packed", max_shard_bytes=2000)
    assert model_identity(tmp_path / "bf16") == model_identity(tmp_path / "again")


def test_missing_expert_and_mixed_dtypes_are_refused(model, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"experts\.up_proj: expert 2 is missing, expert 3 is there"):
        identity_with(model, tmp_path / "a", **{EXPERT: None})
    half = {EXPERT: torch.zeros(8, 16, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj\.weight is BF16 .*, expert 0 is F32"):
        identity_with(model, tmp_path / "b", **half)
