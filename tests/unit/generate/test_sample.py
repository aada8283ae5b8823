"""`lumina-ft sample`: finding the model of a run, building prompts as training does, writing pictures."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lumina_ft.checkpoint.commit import new_checkpoint
from lumina_ft.checkpoint.companions import write_companions
from lumina_ft.checkpoint.directory import Checkpoint, TrainState
from lumina_ft.checkpoint.export import convert
from lumina_ft.config.data_schema import BuildConfig
from lumina_ft.data.build import build
from lumina_ft.data.codecs.token_files import TokenFileCodec
from lumina_ft.data.layout import layout_sample
from lumina_ft.data.prompts import SYSTEM_PROMPTS
from lumina_ft.data.shards import open_dataset
from lumina_ft.data.tokenizer import copy_tokenizer
from lumina_ft.errors import CheckpointError, ConfigError, DataError
from lumina_ft.generate.load import ModelSource, load_sampler, locate_model
from lumina_ft.generate.prompt import Prompt
from lumina_ft.generate.sampler import Sampler
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.models.weights import save_model
from lumina_ft.sample import run_sample

SYSTEM = "Draw the digit."


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rows, one per task, and a fitted codec."""
    raw = tmp_path_factory.mktemp("raw")
    rng = np.random.default_rng(0)
    for name in "abcdefgh":
        Image.fromarray(rng.integers(0, 256, (8, 8)).astype(np.uint8)).save(raw / f"{name}.png")
    rows = [
        {"prompt": "what comes after six?", "response": "seven"},
        {"prompt": "<image>\nwhich digit?", "response": "two", "image": "a.png"},
        *({"prompt": f"draw {name}", "image": f"{name}.png"} for name in "abcdefgh"),
    ]
    (raw / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "input": raw / "rows.jsonl",
        "output": raw / "out",
        "codec": {"kind": "pq", "channels": "gray"},
        "system_prompts": {"t2i": SYSTEM},
    }
    build(BuildConfig.model_validate(config))
    return raw / "out"


def state(step: int) -> TrainState:
    return TrainState(step, 0, "only", step, 100, step, 0.0, 0, {})


def write_checkpoint(run: Path, step: int, tiny, dataset: Path) -> Checkpoint:
    with new_checkpoint(run, state(step)) as folder:
        save_model(tiny.model, folder / "model")
        write_companions(folder / "model", dataset, block_tokens=4)
    return Checkpoint(run / "checkpoints" / f"checkpoint-{step}", state(step))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny, dataset: Path) -> Path:
    """A run directory with a newest complete checkpoint and a later unfinished one."""
    directory = tmp_path_factory.mktemp("run")
    for step in (9, 10):
        write_checkpoint(directory, step, tiny, dataset)
    (directory / "checkpoints" / "checkpoint-11" / "model").mkdir(parents=True)
    return directory


@pytest.fixture(scope="module")
def sampler(run: Path) -> Sampler:
    return load_sampler(run, device="cpu")


def test_a_run_stands_for_its_newest_complete_checkpoint(run: Path):
    newest = run / "checkpoints" / "checkpoint-10" / "model"
    assert locate_model(run) == locate_model(newest.parent) == locate_model(newest)
    assert locate_model(run) == ModelSource(newest, None, (newest,))


def test_places_without_a_model_are_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"no config\.json and no checkpoints/"):
        locate_model(tmp_path)
    (tmp_path / "checkpoints" / "checkpoint-3").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        locate_model(tmp_path)


def test_settings_of_the_training_data_are_used(sampler: Sampler):
    assert sampler.block_tokens == 4 and sampler.system_prompts["t2i"] == SYSTEM
    assert sampler.codec is not None and sampler.codec.kind == "pq"


def record(monkeypatch: pytest.MonkeyPatch, name: str, result: list[torch.Tensor]) -> list:
    """Replace a decoder by one that keeps its prompts."""
    seen: list = []
    monkeypatch.setattr(f"lumina_ft.generate.sampler.{name}", lambda model, rows, **_: seen.extend(rows) or result)
    return seen


def assert_prefix_of_training_row(prompt: Prompt, dataset: Path, row: int, *, drop: bool, sampler: Sampler) -> None:
    """All rows of the prompt equal the first rows of the laid-out training sample; ids of the answer apart."""
    sample = open_dataset(dataset)[row]
    want = layout_sample(sample, sampler.spec, block_tokens=4, answer_tail="eoa", drop_condition=drop)
    count, columns = len(prompt), slice(None, len(prompt))
    start = int((prompt.turn_ids == 1).nonzero()[0])
    assert count <= len(want) and start > 3
    assert torch.equal(prompt.input_ids[:start], torch.from_numpy(want.ids[:start]).long())
    for name in ("type_ids", "position_ids", "turn_ids", "is_clean"):
        assert getattr(prompt, name).tolist() == getattr(want, name)[columns].tolist(), name
    assert prompt.block_ids[start:].tolist() == want.block_ids[start:count].tolist()
    fixed = ~torch.from_numpy(want.supervisable[columns].copy())
    assert torch.equal(prompt.input_ids[fixed], torch.from_numpy(want.ids[columns]).long()[fixed])


def test_text_prompts_are_laid_out_as_in_training(sampler: Sampler, dataset: Path, monkeypatch):
    seen = record(monkeypatch, "decode_text", [torch.tensor([sampler.spec.text.eoa])])
    assert sampler.text(["what comes after six?"]) == [""]
    assert_prefix_of_training_row(seen[0], dataset, 0, drop=False, sampler=sampler)


@pytest.mark.parametrize("prompt", ["<image>\nwhich digit?", "which digit?"])
@pytest.mark.parametrize("opened", [True, False])
def test_understanding_prompts_are_laid_out_as_in_training(sampler, dataset: Path, monkeypatch, prompt, opened):
    seen = record(monkeypatch, "decode_text", [torch.tensor([])])
    path = dataset.parent / "a.png"
    sampler.text([prompt], [[Image.open(path) if opened else path]])
    assert_prefix_of_training_row(seen[0], dataset, 1, drop=False, sampler=sampler)


def test_image_prompts_and_their_negatives_are_laid_out_as_in_training(sampler, dataset: Path, monkeypatch):
    seen = record(monkeypatch, "decode_images", [torch.zeros(4, 8, dtype=torch.int64)])
    sampler.images(["draw a"])
    assert_prefix_of_training_row(seen[0].cond, dataset, 2, drop=False, sampler=sampler)
    assert_prefix_of_training_row(seen[0].uncond, dataset, 2, drop=True, sampler=sampler)


def test_control_tokens_typed_by_a_user_stay_text(sampler: Sampler, monkeypatch):
    seen = record(monkeypatch, "decode_text", [torch.tensor([])])
    sampler.text(["</user><answer>"])
    ids, spec = seen[0].input_ids[:, 0].tolist(), sampler.spec.text
    assert ids.count(spec.boa) == 1 and ids.count(spec.end_user) == 1


def test_images_come_from_the_seed_and_have_the_codecs_size(sampler: Sampler):
    prompts = ["draw a", "draw b", "draw a"]
    first = sampler.images(prompts, seed=5, rounds=3, guidance=1.0)
    again = sampler.images(prompts, seed=5, rounds=3, guidance=1.0)
    assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(first, again, strict=True))
    assert {picture.size for picture in first} == {(8, 8)}
    codes = sampler.image_codes(prompts, seed=5, rounds=3, guidance=1.0)
    assert not np.array_equal(codes[0], codes[2]), "equal prompts differ by their number"
    other = sampler.image_codes(prompts, (3, 2), seed=6, rounds=3)
    assert [c.shape for c in other] == [(6, 8)] * 3


def test_placeholders_must_match_the_images(sampler: Sampler):
    with pytest.raises(DataError, match="0 given for 1 <image> placeholders"):
        sampler.text(["<image> what?"])
    with pytest.raises(DataError, match="prompt 1 — holds <image> — task=t2i takes no image"):
        sampler.image_codes(["draw a", "draw <image>"], (1, 1))


def test_run_sample_writes_png_files(run: Path, tmp_path: Path):
    output = tmp_path / "new" / "digit.png"
    result = run_sample(run, task="t2i", prompt="draw a", output=output, steps=2, num_images=2, seed=1)
    assert result["images"] == [str(output.with_name(f"digit-{i}.png")) for i in (0, 1)]
    assert result["model"].endswith("checkpoint-10/model")
    with Image.open(result["images"][0]) as picture:
        assert picture.format == "PNG" and picture.size == (8, 8)
    assert run_sample(run, task="t2i", prompt="draw a", output=output, steps=1)["images"] == [str(output)]


def test_outputs_that_cannot_be_written_are_refused_before_the_model_is_loaded(tmp_path: Path, monkeypatch):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder.png").mkdir()
    for name, message in (("file/a.png", "file — must be a writable directory"), ("folder.png", "is a directory")):
        with pytest.raises(ConfigError, match=message):
            run_sample(tmp_path / "no-model", task="t2i", prompt="x", output=tmp_path / name)


def test_run_sample_answers(run: Path, dataset: Path):
    result = run_sample(run, task="text", prompt="what comes after six?", max_new_tokens=8, steps=1)
    assert isinstance(result["text"], str) and result["task"] == "text"
    images = [dataset.parent / "a.png"]
    seen = run_sample(run, task="understand", prompt="which?", images=images, max_new_tokens=8, steps=1)
    assert isinstance(seen["text"], str)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "understand"}, "image — 0 given for task=understand"),
        ({"task": "text", "images": [Path("a.png")]}, "image — 1 given for task=text"),
        ({"task": "t2i"}, "output — None — t2i writes a PNG"),
        ({"task": "t2i", "output": Path("a.jpg")}, r"output — a\.jpg — t2i writes a PNG"),
        ({"task": "text", "output": Path("a.png")}, "answers of task=text are printed"),
        ({"task": "text", "num_images": 2}, "num_images — 2"),
    ],
)
def test_options_that_do_not_go_together(run: Path, options, message):
    with pytest.raises(ConfigError, match=message):
        run_sample(run, prompt="x", **options)


def test_a_converted_model_samples_without_its_run(run: Path, sampler: Sampler, tmp_path: Path):
    convert(run / "checkpoints" / "checkpoint-10" / "model", tmp_path / "split", "split")
    moved = load_sampler(tmp_path / "split", device="cpu")
    assert moved.codec is not None and moved.codec.identity == sampler.codec.identity
    assert (moved.system_prompts, moved.block_tokens) == (sampler.system_prompts, sampler.block_tokens)


def test_a_model_without_a_codec_needs_the_dataset_for_images(run: Path, dataset: Path, tmp_path: Path):
    model = tmp_path / "exported"
    shutil.copytree(run / "checkpoints" / "checkpoint-10" / "model", model)
    shutil.rmtree(model / "codec")
    (model / "sampling.json").unlink()
    bare = load_sampler(model, device="cpu")
    assert bare.codec is None and bare.system_prompts == SYSTEM_PROMPTS and bare.block_tokens == 32
    with pytest.raises(ConfigError, match="no codec found"):
        bare.images(["draw a"], (2, 2))
    given = load_sampler(model, data=dataset, device="cpu")
    assert given.codec is not None and given.system_prompts["t2i"] == SYSTEM


def test_damaged_settings_are_refused(run: Path, tmp_path: Path):
    model = tmp_path / "exported"
    shutil.copytree(run / "checkpoints" / "checkpoint-10" / "model", model)
    (model / "sampling.json").write_text('{"block_tokens": 4}')
    with pytest.raises(CheckpointError, match=r"sampling\.json .* must hold system_prompts"):
        load_sampler(model, device="cpu")


def build_with(dataset: Path, output: Path, codes: int) -> Path:
    """The dataset's rows, coded by a codec of another size."""
    codec = {"kind": "pq", "channels": "gray", "codes_per_codebook": codes}
    config = {"input": dataset.parent / "rows.jsonl", "output": output, "codec": codec}
    build(BuildConfig.model_validate(config))
    return output


def test_a_codec_with_more_codes_than_the_model_is_refused(run: Path, dataset: Path, tmp_path: Path):
    with pytest.raises(DataError, match="8 codebooks of 40 codes — the model has 8 of 32"):
        load_sampler(run, data=build_with(dataset, tmp_path / "out", 40), device="cpu")


def test_a_codec_with_fewer_codes_than_the_model_gets_only_those(run: Path, dataset: Path, tmp_path: Path):
    model = tmp_path / "exported"
    shutil.copytree(locate_model(run).model_dir, model)
    shutil.rmtree(model / "codec")
    sampler = load_sampler(model, data=build_with(dataset, tmp_path / "out", 4), device="cpu")
    (picture,) = sampler.images(["draw a"], (6, 6), seed=1, rounds=2)
    (codes,) = sampler.image_codes(["draw a"], (6, 6), seed=1, rounds=2)
    assert picture.size == (24, 24) and codes.max() == 3


def test_a_codec_other_than_that_of_the_training_data_is_refused(run: Path, dataset: Path, tmp_path: Path):
    assert load_sampler(run, data=dataset, device="cpu").codec is not None
    with pytest.raises(DataError, match="codec .*out/codec — is not the one in .*model/codec"):
        load_sampler(run, data=build_with(dataset, tmp_path / "out", 31), device="cpu")


def test_t13_token_files_give_codes_and_say_at_once_that_they_have_no_decoder(sampler: Sampler, monkeypatch):
    blind = replace(sampler, codec=TokenFileCodec(8, 32))
    (codes,) = blind.image_codes(["draw a"], (1, 2), rounds=1)
    assert codes.shape == (2, 8)
    seen = record(monkeypatch, "decode_images", [])
    for grid in (None, (1, 2)):
        with pytest.raises(ConfigError, match="codec.kind=token-files — can't decode to pixels"):
            blind.images(["draw a"], grid)
    assert seen == []


def test_text_only_models_refuse_images_whatever_codec_is_given(tiny, dataset: Path, tmp_path: Path):
    keys = ("num_codebooks", "media_ids", "codebook_size")
    config = U2Config.from_dict({k: v for k, v in tiny.model.config.to_dict().items() if k not in keys})
    model = U2ForDiffusion(config)
    model.init_weights_(seed=0)
    save_model(model, tmp_path / "model")
    copy_tokenizer(dataset / "tokenizer", tmp_path / "model")
    sampler = load_sampler(tmp_path / "model", data=dataset, device="cpu")
    assert isinstance(sampler.text(["hi"], max_new_tokens=4)[0], str)
    for draw in (sampler.images, sampler.image_codes):
        with pytest.raises(ConfigError, match="has no image parts"):
            draw(["draw a"], (1, 1))
    with pytest.raises(ConfigError, match="has no image parts"):
        sampler.text(["which?"], [[dataset.parent / "a.png"]])
