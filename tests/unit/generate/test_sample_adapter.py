"""Sampling with an adapter: which one is on, what comes from its directory, and that a merged model draws the same."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lumina_ft.adapters.combine import WeightedAdapter
from lumina_ft.adapters.files import write_adapter
from lumina_ft.adapters.lora import Adapter, attach_adapter
from lumina_ft.adapters.merge import merge_adapters
from lumina_ft.checkpoint.commit import new_checkpoint
from lumina_ft.checkpoint.companions import write_companions
from lumina_ft.checkpoint.directory import TrainState
from lumina_ft.config.data_schema import BuildConfig
from lumina_ft.config.lora_schema import LoraConfig
from lumina_ft.data.build import build
from lumina_ft.data.tokenizer import copy_tokenizer
from lumina_ft.errors import CheckpointError, ConfigError
from lumina_ft.generate.load import ModelSource, load_sampler, locate_model
from lumina_ft.generate.sampler import Sampler
from lumina_ft.models.groups import is_adapter_b
from lumina_ft.models.identity import BaseIdentity, model_identity
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.weights import save_model
from lumina_ft.sample import run_sample

PROMPTS = [f"draw {name}" for name in "abcdefgh"]
LORA = LoraConfig(rank=4, alpha=8, dropout=0.5)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight drawings and a codec; its system prompt is not the published one."""
    raw = tmp_path_factory.mktemp("raw")
    rng = np.random.default_rng(0)
    for name in "abcdefgh":
        Image.fromarray(rng.integers(0, 256, (8, 8)).astype(np.uint8)).save(raw / f"{name}.png")
    rows = [{"prompt": f"draw {name}", "image": f"{name}.png"} for name in "abcdefgh"]
    (raw / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "input": raw / "rows.jsonl",
        "output": raw / "out",
        "codec": {"kind": "pq", "channels": "gray"},
        "system_prompts": {"t2i": "Adapted."},
    }
    build(BuildConfig.model_validate(config))
    return raw / "out"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny, dataset: Path) -> Path:
    """A model directory with a tokenizer and nothing else, as a published one."""
    directory = tmp_path_factory.mktemp("base") / "model"
    save_model(tiny.model, directory)
    copy_tokenizer(dataset / "tokenizer", directory)
    return directory


def trained(base: Path) -> tuple[U2ForDiffusion, Adapter]:
    """The base with an adapter that changes what it draws, and a changed head beside it."""
    model = U2ForDiffusion.from_pretrained(base)
    adapter = attach_adapter(model, LORA, seed=1)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name or name.startswith("lm_img_head."):
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return model, adapter


def write(folder: Path, base: Path, identity: BaseIdentity | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    model, adapter = trained(base)
    write_adapter(folder, model, adapter, base=identity, base_name=str(base), changed=("image_heads",))
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, base: Path, dataset: Path) -> Path:
    """An adapter directory as training leaves it, companions included."""
    folder = write(tmp_path_factory.mktemp("adapter") / "adapter", base, model_identity(base))
    write_companions(folder, dataset, block_tokens=4)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, base: Path, adapter: Path) -> Path:
    """A run whose newest checkpoint is an adapter on `base`."""
    directory = tmp_path_factory.mktemp("run")
    state = TrainState(5, 0, "only", 5, 100, 5, 0.0, 0, {}, base=str(base), adapter="kept")
    with new_checkpoint(directory, state) as folder:
        shutil.copytree(adapter, folder / "adapter", dirs_exist_ok=True)
    return directory


def drawn(sampler: Sampler) -> list[bytes]:
    pictures = sampler.images(PROMPTS * 4, seed=3, temperature=1.0, guidance=1.0, rounds=3)
    return [picture.tobytes() for picture in pictures]


def test_a_run_is_sampled_with_its_adapter_and_prompted_as_it_was_trained(run: Path, base: Path):
    stored = run / "checkpoints" / "checkpoint-5" / "adapter"
    assert locate_model(run) == locate_model(stored.parent) == ModelSource(base, stored, (stored, base))
    sampler = load_sampler(run, device="cpu")
    assert sampler.codec is not None and sampler.block_tokens == 4
    assert sampler.system_prompts["t2i"] == "Adapted."
    assert not sampler.model.training, "dropout is off"


def test_the_adapter_and_the_heads_beside_it_change_the_pictures_and_no_adapter_leaves_out_both(
    run: Path, base: Path, dataset: Path
):
    on, off = (load_sampler(run, with_adapter=wanted, device="cpu") for wanted in (True, False))
    assert off.system_prompts == on.system_prompts and off.codec is not None
    bare = load_sampler(base, data=dataset, device="cpu")
    without = drawn(off)
    assert without == drawn(bare)
    assert sum(a != b for a, b in zip(drawn(on), without, strict=True)) > 16


def test_a_given_adapter_equals_that_of_the_run(run: Path, base: Path, adapter: Path):
    given = load_sampler(base, adapter=adapter, device="cpu")
    assert drawn(given) == drawn(load_sampler(run, device="cpu"))


def test_t12_a_merged_model_draws_what_its_base_draws_with_the_adapter(run: Path, base: Path, adapter: Path, tmp_path):
    merge_adapters(base, [WeightedAdapter(adapter, 1.0)], tmp_path / "merged")
    merged = load_sampler(tmp_path / "merged", device="cpu")
    assert merged.system_prompts["t2i"] == "Adapted."
    assert drawn(merged) == drawn(load_sampler(run, device="cpu"))


@pytest.mark.parametrize("layout", ["packed", "split"])
def test_an_adapter_of_routed_experts_is_sampled_and_merged_alike(base: Path, dataset: Path, tmp_path: Path, layout):
    """Trained with dropout; its base may be stored either way."""
    model = U2ForDiffusion.from_pretrained(base)
    save_model(model, tmp_path / "base", layout=layout)
    copy_tokenizer(base, tmp_path / "base")
    attached = attach_adapter(model, LORA.model_copy(update={"targets": ("experts",)}), seed=1)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter_b(name):
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.3)
    identity = model_identity(tmp_path / "base")
    write_adapter(tmp_path / "adapter", model, attached, base=identity, base_name=str(base), changed=())
    options = {"data": dataset, "device": "cpu"}
    on = drawn(load_sampler(tmp_path / "base", adapter=tmp_path / "adapter", **options))
    off = drawn(load_sampler(tmp_path / "base", **options))
    assert sum(a != b for a, b in zip(on, off, strict=True)) > 16
    merge_adapters(tmp_path / "base", [WeightedAdapter(tmp_path / "adapter")], tmp_path / "merged")
    assert drawn(load_sampler(tmp_path / "merged", **options)) == on


def test_a_plain_peft_directory_takes_companions_from_its_base(base: Path, dataset: Path, tmp_path: Path):
    whole = tmp_path / "base"
    shutil.copytree(base, whole)
    write_companions(whole, dataset, block_tokens=8)
    sampler = load_sampler(whole, adapter=write(tmp_path / "plain", whole, None), device="cpu")
    assert sampler.codec is not None and sampler.block_tokens == 8


def test_an_adapter_of_other_weights_is_refused_by_name(base: Path, adapter: Path, tmp_path: Path):
    model = U2ForDiffusion.from_pretrained(base)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.experts.up_proj")[3, 0, 0] += 1e-3
    save_model(model, tmp_path / "other")
    copy_tokenizer(base, tmp_path / "other")
    with pytest.raises(
        CheckpointError, match=r"1 of \d+ tensors of .*other .* the first model\.layers\.1\.mlp\.experts"
    ):
        load_sampler(tmp_path / "other", adapter=adapter, device="cpu")


def test_a_run_whose_base_is_gone_is_refused(run: Path, tmp_path: Path):
    shutil.copytree(run, tmp_path / "run")
    state_file = tmp_path / "run" / "checkpoints" / "checkpoint-5" / "state.json"
    state = json.loads(state_file.read_text())
    # The same length: sizes are in the manifest.
    state["base"] = state["base"][:-5] + "gone!"
    state_file.write_text(json.dumps(state, indent=2) + "\n")
    with pytest.raises(CheckpointError, match="gone!' — no such directory"):
        locate_model(tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adapter": Path("x"), "with_adapter": False}, "--no-adapter — and --adapter x — contradict"),
        ({"adapter": Path("x")}, "--adapter — x — model=.* has an adapter of its own, .*one can be on"),
    ],
)
def test_adapter_options_that_contradict_the_run(run: Path, options, message):
    with pytest.raises(ConfigError, match=message):
        locate_model(run, **options)


def test_leaving_out_an_adapter_that_is_not_there(base: Path):
    with pytest.raises(ConfigError, match="there is no adapter to leave out"):
        locate_model(base, with_adapter=False)


def test_an_adapter_given_as_the_model_is_explained(adapter: Path):
    with pytest.raises(CheckpointError, match=r"is an adapter, .* and --adapter "):
        locate_model(adapter)


def test_an_adapter_that_is_none_is_refused(base: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"adapter_config\.json — not found"):
        load_sampler(base, adapter=tmp_path, device="cpu")


def test_the_result_names_base_and_adapter(run: Path, base: Path, tmp_path: Path):
    options = {"task": "t2i", "prompt": "draw a", "steps": 1, "output": tmp_path / "a.png"}
    result = run_sample(run, **options)
    assert (result["model"], result["adapter"]) == (str(base), str(run / "checkpoints" / "checkpoint-5" / "adapter"))
    assert run_sample(run, with_adapter=False, **options)["adapter"] is None
