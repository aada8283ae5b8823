"""The demo's second task: its rows, its judge, and a codec that can show it."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lumina_ft.config.data_schema import CodecConfig
from lumina_ft.config.load import load_run
from lumina_ft.data.codecs.pq import fit_pq
from lumina_ft.data.digits import DIGIT_WORDS, DRAW_PROMPTS, draw_prompt, write_digits
from lumina_ft.demo.inverted import INVERTED_PROMPTS, inverted_prompt, write_inverted
from lumina_ft.demo.judge import NOT_INVERTED, DigitJudge, Digits, is_ordinary, load_split, to_pixels
from lumina_ft.demo.run import ADAPTER_RECIPE, RECIPE, _adapter_config


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "digits"
    write_digits(path)
    return path


@pytest.fixture(scope="module")
def rows(digits: Path) -> list[dict[str, str]]:
    path = write_inverted(digits, phrasings=2, seed=0)
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def train(digits: Path) -> Digits:
    return load_split(digits, "train")


@pytest.fixture(scope="module")
def heldout(digits: Path) -> Digits:
    return load_split(digits, "heldout")


def as_pictures(pixels: np.ndarray) -> list[Image.Image]:
    return [Image.fromarray(row.reshape(8, 8).astype(np.uint8)) for row in pixels]


def test_rows_show_the_negatives_of_training_digits_in_other_words(digits: Path, rows, train: Digits) -> None:
    assert len(rows) == 2 * len(train.labels)
    assert {row["image"] for row in rows} == {f"images/train_inverted/{path.name}" for path in train.paths}
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert first["image"] == second["image"] and first["prompt"] != second["prompt"]
    for row in rows[:60]:
        negative, source = Path(row["image"]), digits / "images" / "train" / Path(row["image"]).name
        total = np.asarray(Image.open(digits / negative)).astype(int) + np.asarray(Image.open(source))
        assert (total == 255).all()
        assert DIGIT_WORDS[int(negative.stem.split("-")[1])] in row["prompt"]


def test_requests_of_the_two_tasks_differ() -> None:
    ordinary = {draw_prompt(digit, i) for digit in range(10) for i in range(len(DRAW_PROMPTS))}
    inverted = {inverted_prompt(digit, i) for digit in range(10) for i in range(len(INVERTED_PROMPTS))}
    assert len(inverted) == 10 * len(DRAW_PROMPTS) and not ordinary & inverted


def test_every_real_digit_is_ordinary_and_no_negative_is(train: Digits, heldout: Digits) -> None:
    for pixels in (train.pixels, heldout.pixels):
        assert is_ordinary(pixels).all()
        assert not is_ordinary(255 - pixels).any()


def test_negatives_are_read_and_their_copies_counted(train: Digits, heldout: Digits) -> None:
    judge = DigitJudge(train)
    verdict = judge.judge_inverted(as_pictures(255 - heldout.pixels), heldout.labels, train.pixels)
    assert verdict.recognised > 0.95 and verdict.copies == 0
    again = judge.judge_inverted(as_pictures(255 - train.pixels[:5]), train.labels[:5], train.pixels)
    assert again.copies == 5


def test_an_ordinary_digit_is_no_inverted_one(train: Digits, heldout: Digits) -> None:
    verdict = DigitJudge(train).judge_inverted(as_pictures(heldout.pixels), heldout.labels, train.pixels)
    assert verdict.recognised == 0.0
    assert (verdict.read == NOT_INVERTED).all()


def test_bright_noise_is_not_taken_for_a_digit(train: Digits) -> None:
    noise = np.random.default_rng(0).integers(128, 256, size=(200, 64)).astype(np.float64)
    verdict = DigitJudge(train).judge_inverted(as_pictures(noise), np.arange(200) % 10, train.pixels)
    assert verdict.recognised < 0.3


def test_a_codec_fitted_on_both_kinds_shows_both(train: Digits, heldout: Digits) -> None:
    judge = DigitJudge(train)
    some = train.pixels[::4]
    pictures = as_pictures(np.concatenate([some, 255 - some]))
    codec = fit_pq(pictures, CodecConfig(channels="gray"), num_images=len(pictures), seed=0)

    def shown(pixels: np.ndarray) -> np.ndarray:
        grids = codec.encode(as_pictures(pixels))
        return to_pixels([codec.decode(grid.codes, grid.height, grid.width) for grid in grids])

    assert judge.accuracy(shown(heldout.pixels), heldout.labels) > 0.93
    assert judge.accuracy(255 - shown(255 - heldout.pixels), heldout.labels) > 0.93


def test_the_adapters_run_follows_the_bases(tmp_path: Path) -> None:
    base = load_run(
        RECIPE, ["seed=7", "parallel.ranks=1", "parallel.threads_per_rank=2", "parallel.expert_parallel_size=1"]
    )
    cfg = _adapter_config(tmp_path, base, "somewhere/model")
    assert (cfg.seed, cfg.parallel.ranks, cfg.parallel.threads_per_rank) == (7, 1, 2)
    assert cfg.parallel.expert_parallel_size == 1
    assert cfg.model.path == Path("somewhere/model") and cfg.output_dir == tmp_path / "lora"
    assert cfg.data.path == tmp_path / "dataset_lora"


def test_the_recipe_names_the_checkpoint_that_the_base_recipe_ends_with() -> None:
    base, adapter = load_run(RECIPE, []), load_run(ADAPTER_RECIPE, [])
    last = sum(stage.steps or 0 for stage in base.stages)
    assert adapter.model.path == base.output_dir / "checkpoints" / f"checkpoint-{last}" / "model"
    assert adapter.lora is not None and all(stage.lora == "train" for stage in adapter.stages)
    assert adapter.data.block_tokens == base.data.block_tokens
    assert "experts" in adapter.lora.targets
    assert adapter.parallel.expert_parallel_size == base.parallel.expert_parallel_size == base.parallel.ranks == 2
