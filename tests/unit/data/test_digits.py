"""The demo's raw data, and the recipe in datasets/."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lumina_ft.config.data_schema import BuildConfig
from lumina_ft.data.build import build
from lumina_ft.data.digits import DIGIT_WORDS, draw_prompt, load_digits, split_digits, write_digits
from lumina_ft.errors import ConfigError, DataError

SPLITS = {"train": 1438, "heldout": 359}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("digits") / "d"
    assert write_digits(directory) == SPLITS
    return directory


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_split_is_stratified_deterministic_and_follows_the_seed() -> None:
    labels = load_digits()[1]
    heldout = split_digits(labels, heldout_fraction=0.2, seed=0)
    assert np.array_equal(heldout, split_digits(labels, heldout_fraction=0.2, seed=0))
    assert not np.array_equal(heldout, split_digits(labels, heldout_fraction=0.2, seed=1))
    shares = [heldout[labels == digit].mean() for digit in range(10)]
    assert max(abs(share - 0.2) for share in shares) < 0.01


def test_rows_ask_for_the_digit_that_the_picture_shows_and_splits_share_no_picture(written: Path) -> None:
    images, labels = load_digits()
    seen = {}
    for split, count in SPLITS.items():
        draws, asks = rows(written / f"t2i_{split}.jsonl"), rows(written / f"understand_{split}.jsonl")
        assert len(draws) == len(asks) == count
        for draw, ask in zip(draws, asks, strict=True):
            number = int(Path(draw["image"]).name[:4])
            word = DIGIT_WORDS[labels[number]]
            assert word in draw["prompt"].split() and ask["messages"][1]["content"] == word
            assert ask["images"] == [draw["image"]]
            assert seen.setdefault(number, split) == split
            pixels = np.asarray(Image.open(written / draw["image"]))
            assert np.array_equal(np.rint(pixels / 255 * 16), np.rint(images[number] / 255 * 16))
        assert len({draw["prompt"] for draw in draws}) == 40
        assert len({ask["messages"][0]["content"] for ask in asks}) == 3
    assert len(seen) == 1797


def test_written_digits_are_byte_identical(written: Path, tmp_path: Path) -> None:
    write_digits(tmp_path / "again")
    for path in sorted(written.rglob("*")):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "again" / path.relative_to(written)).read_bytes()


def test_existing_files_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(DataError, match="exists and is not empty"):
        write_digits(tmp_path)


def test_unwritable_output_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="output=.*digits — Not a directory — must be writable"):
        write_digits(tmp_path / "file" / "digits")


def test_prompts_are_grammatical() -> None:
    assert [draw_prompt(8, i) for i in range(4)] == [
        "draw an eight",
        "please draw the digit eight",
        "a handwritten eight",
        "write eight",
    ]
    assert draw_prompt(1) == "draw a one"


def test_shipped_recipe_builds(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets/digits.yaml` names what `data digits` writes."""
    from lumina_ft.config.load import load_build

    recipe = Path(__file__).parents[3] / "datasets" / "digits.yaml"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "digits").symlink_to(written)
    config = load_build(recipe, [])
    assert isinstance(config, BuildConfig)
    for path in config.input:
        assert path.is_file()
    summary = build(config.model_copy(update={"output": tmp_path / "built"}))
    assert summary["tasks"] == {"t2i": 1438, "understand": 1438}
