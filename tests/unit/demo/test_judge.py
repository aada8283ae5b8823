"""The demo's judge is honest: fitted on real training digits only, and it can say no."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lumina_ft.data.digits import DIGIT_WORDS, write_digits
from lumina_ft.demo.augment import distort, write_distorted, write_rephrased
from lumina_ft.demo.judge import DigitJudge, Digits, judge_answers, load_split, to_pixels
from lumina_ft.demo.pictures import Panel, draw_answers, draw_grids
from lumina_ft.demo.run import RESULT_FILE, _clear
from lumina_ft.errors import DataError, LuminaError


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "digits"
    write_digits(path)
    return path


@pytest.fixture(scope="module")
def train(digits: Path) -> Digits:
    return load_split(digits, "train")


@pytest.fixture(scope="module")
def heldout(digits: Path) -> Digits:
    return load_split(digits, "heldout")


def as_pictures(pixels: np.ndarray) -> list[Image.Image]:
    return [Image.fromarray(row.reshape(8, 8).astype(np.uint8)) for row in pixels]


def test_splits_share_no_picture_and_labels_match_the_rows(digits: Path, train: Digits, heldout: Digits) -> None:
    assert len(train.labels) + len(heldout.labels) == 1797
    assert not {row.tobytes() for row in train.pixels} & {row.tobytes() for row in heldout.pixels}
    rows = [json.loads(line) for line in (digits / "understand_heldout.jsonl").read_text().splitlines()]
    words = {digits / row["images"][0]: row["messages"][1]["content"] for row in rows}
    assert [words[path] for path in heldout.paths] == [DIGIT_WORDS[label] for label in heldout.labels]


def test_judge_reads_real_heldout_digits(train: Digits, heldout: Digits) -> None:
    accuracy = DigitJudge(train).accuracy(heldout.pixels, heldout.labels)
    assert 0.95 < accuracy <= 1.0


def test_judge_refuses_digits_drawn_on_wrong_request(train: Digits, heldout: Digits) -> None:
    verdict = DigitJudge(train).judge_drawings(as_pictures(heldout.pixels), (heldout.labels + 1) % 10, train.pixels)
    assert verdict.recognised < 0.05


def test_judge_is_near_chance_on_noise(train: Digits) -> None:
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, size=(200, 64)).astype(np.float64)
    verdict = DigitJudge(train).judge_drawings(as_pictures(noise), np.arange(200) % 10, train.pixels)
    assert verdict.recognised < 0.3
    assert verdict.distinct == 200 and verdict.copies == 0


def test_repetition_and_copying_are_counted(train: Digits) -> None:
    pictures = as_pictures(np.concatenate([train.pixels[:3], train.pixels[:3]]))
    wanted = np.tile(train.labels[:3], 2)
    verdict = DigitJudge(train).judge_drawings(pictures, wanted, train.pixels)
    assert (verdict.distinct, verdict.copies) == (3, 6)
    assert verdict.recognised == 1.0


def test_other_sizes_are_refused() -> None:
    with pytest.raises(DataError, match=r"\(16, 16\).*8x8"):
        to_pixels([Image.new("L", (16, 16))])


def test_missing_split_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="heldout.*no PNG"):
        load_split(tmp_path, "heldout")


def test_only_the_bare_word_is_a_right_answer() -> None:
    given = ["seven", " seven\n", "seven eight", "Seven", "", "7"]
    assert judge_answers(given, ["seven"] * 6).tolist() == [True, True, False, False, False, False]


def test_distorted_rows_show_training_pictures_only(digits: Path, train: Digits) -> None:
    path = write_distorted(digits, copies=2, seed=0)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 2 * len(train.labels)
    for row in rows[:40]:
        picture = digits / row["images"][0]
        label = int(picture.stem.split("-")[1])
        assert row["messages"][1]["content"] == DIGIT_WORDS[label]
        source = digits / "images" / "train" / f"{picture.stem.rsplit('-', 1)[0]}.png"
        assert source.is_file()
        assert not np.array_equal(np.asarray(Image.open(picture)), np.asarray(Image.open(source)))


def test_rephrased_rows_ask_for_the_same_digit_in_other_words(digits: Path) -> None:
    original = [json.loads(line) for line in (digits / "t2i_train.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in write_rephrased(digits, copies=2, seed=0).read_text().splitlines()]
    assert [row["image"] for row in rows[::2]] == [row["image"] for row in original]
    for first, second, before in zip(rows[::2], rows[1::2], original, strict=True):
        assert len({first["prompt"], second["prompt"], before["prompt"]}) == 3
    for row in rows:
        assert DIGIT_WORDS[int(Path(row["image"]).stem.split("-")[1])] in row["prompt"]


def test_distortion_is_small_and_seeded(train: Digits) -> None:
    picture = as_pictures(train.pixels[:1])[0]
    twice = [np.asarray(distort(picture, np.random.default_rng(3))) for _ in range(2)]
    assert np.array_equal(*twice)
    moved = np.abs(twice[0].astype(float) - np.asarray(picture, dtype=float)).mean()
    assert 0 < moved < 60


def test_pictures_are_written(tmp_path: Path, heldout: Digits) -> None:
    pictures = as_pictures(heldout.pixels[:30])
    wanted = heldout.labels[:30]
    panel = Panel("{share} right", pictures, (wanted + (np.arange(30) == 0)) % 10)
    grid = draw_grids([panel, panel], wanted, tmp_path / "digits.png", columns=2)
    answers = draw_answers(heldout.paths[:30], ["seven"] * 30, np.arange(30) > 3, tmp_path / "answers.png")
    red = np.array([255, 85, 85])
    assert (np.asarray(Image.open(grid).convert("RGB")) == red).all(-1).any()
    assert Image.open(answers).width > 300


def test_output_of_others_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    (tmp_path / RESULT_FILE).write_text("{}")
    _clear(tmp_path)
    assert not any(tmp_path.iterdir())
    (tmp_path / "thesis.tex").write_text("precious")
    (tmp_path / RESULT_FILE).write_text("{}")
    with pytest.raises(LuminaError, match=r"thesis\.tex"):
        _clear(tmp_path)
    assert (tmp_path / RESULT_FILE).is_file()
