"""The demo's figures say what they claim: judged by stand-ins for the models whose abilities are known."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from lumina_ft.config.data_schema import CodecConfig
from lumina_ft.data.codecs.pq import PqCodec, fit_pq
from lumina_ft.data.digits import DIGIT_WORDS, write_digits
from lumina_ft.demo import measure
from lumina_ft.demo.measure import NUM_DRAWINGS, Bench, measure_adapter, measure_base, open_bench

Draw = Callable[[str, int, Image.Image], Image.Image]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    output = tmp_path_factory.mktemp("demo")
    write_digits(output / "digits")
    return open_bench(output / "digits", output, seed=0)


@pytest.fixture(scope="module")
def codec(bench: Bench) -> PqCodec:
    pictures = [Image.open(path).copy() for path in bench.train.paths[::8]]
    return fit_pq(pictures, CodecConfig(channels="gray"), num_images=len(pictures), seed=0)


@dataclass
class StandIn:
    """Draws a real held-out digit of the kind asked for, as `draw` makes it; reads every picture as `answer`."""

    bench: Bench
    codec: PqCodec
    draw: Draw
    answer: str = "seven"
    seeds: list[int] = field(default_factory=list)

    def images(self, prompts: list[str], *, seed: int, **_: float) -> list[Image.Image]:
        self.seeds.append(seed)
        pictures = []
        for number, prompt in enumerate(prompts):
            digit = next(i for i, word in enumerate(DIGIT_WORDS) if word in prompt.split())
            rows = np.flatnonzero(self.bench.heldout.labels == digit)
            row = int(rows[number // 10 % len(rows)])
            pictures.append(self.draw(prompt, number, Image.open(self.bench.heldout.paths[row]).copy()))
        return pictures

    def text(self, prompts: list[str], images: list, **_: int) -> list[str]:
        return [self.answer] * len(prompts)


def knows_both(prompt: str, number: int, picture: Image.Image) -> Image.Image:
    return ImageOps.invert(picture) if "inverted" in prompt.split() else picture


def knows_one(prompt: str, number: int, picture: Image.Image) -> Image.Image:
    return picture


def slips_once(prompt: str, number: int, picture: Image.Image) -> Image.Image:
    pixels = np.array(knows_both(prompt, number, picture))
    pixels[0, 0] ^= number == 17
    return Image.fromarray(pixels)


def measured(bench: Bench, codec: PqCodec, monkeypatch, *, on: Draw, off: Draw, merged: Draw) -> dict:
    models = {("run", True): on, ("run", False): off, ("merged", True): merged}

    def load(path: Path, *, with_adapter: bool = True) -> StandIn:
        return StandIn(bench, codec, models[path.name, with_adapter])

    monkeypatch.setattr(measure, "load_sampler", load)
    return measure_adapter(bench, Path("run"), Path("merged"))


def test_an_adapter_that_has_learnt_the_task(bench: Bench, codec: PqCodec, monkeypatch):
    result = measured(bench, codec, monkeypatch, on=knows_both, off=knows_one, merged=knows_both)
    assert result["lora_task_on"] > 0.95 and result["lora_task_off"] == 0.0
    assert result["base_task_with_adapter"] > 0.95
    assert result["merged_equals_adapter"] is True and result["merged_equal_images"] == NUM_DRAWINGS
    red = np.array([255, 85, 85])
    picture = np.asarray(Image.open(bench.output / "inverted.png").convert("RGB"))
    columns = np.flatnonzero((picture == red).all(-1).any(0))
    assert np.median(columns) > picture.shape[1] / 2, "what is wrong is in the right panel"


def test_one_value_of_one_pixel_makes_a_merged_model_differ(bench: Bench, codec: PqCodec, monkeypatch):
    result = measured(bench, codec, monkeypatch, on=knows_both, off=knows_one, merged=slips_once)
    assert result["merged_equals_adapter"] is False and result["merged_equal_images"] == NUM_DRAWINGS - 1


def test_an_adapter_that_forgets_the_old_task_is_seen(bench: Bench, codec: PqCodec, monkeypatch):
    def always(prompt: str, number: int, picture: Image.Image) -> Image.Image:
        return ImageOps.invert(picture)

    result = measured(bench, codec, monkeypatch, on=always, off=knows_one, merged=always)
    assert result["lora_task_on"] > 0.95 and result["base_task_with_adapter"] < 0.3


def test_the_base_is_measured_on_both_of_its_tasks(bench: Bench, codec: PqCodec, monkeypatch):
    sampler = StandIn(bench, codec, knows_one)
    monkeypatch.setattr(measure, "load_sampler", lambda path: sampler)
    result = measure_base(bench, Path("run"), block_tokens=4)
    assert result["digits_recognised"] > 0.95 and result["generated_images"] == NUM_DRAWINGS
    sevens = float((bench.heldout.labels == 7).mean())
    assert result["understanding_accuracy"] == pytest.approx(sevens)
    assert result["judge_accuracy"] > result["judge_accuracy_codec_inverted"], "this codec has seen no negative"
    assert (bench.output / "digits.png").is_file() and (bench.output / "answers.png").is_file()
