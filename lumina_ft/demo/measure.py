"""What the demo's models can do: pictures and answers sampled from them, judged, counted and drawn.

Every comparison of two models uses equal prompts and equal seeds.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from lumina_ft.data.digits import DRAW_PROMPTS, draw_prompt
from lumina_ft.data.images import open_image
from lumina_ft.demo.inverted import inverted_prompt
from lumina_ft.demo.judge import DigitJudge, Digits, judge_answers, load_split, to_pixels
from lumina_ft.demo.pictures import Panel, draw_answers, draw_grids
from lumina_ft.generate.load import load_sampler
from lumina_ft.generate.sampler import Sampler

NUM_DRAWINGS = 200
ROUNDS = 4
TEMPERATURE = 0.5
GUIDANCE = 0.5
"""Half a unit sharpens the digits; 2 and more make a model of this size repeat a few shapes."""


@dataclass(frozen=True)
class Bench:
    """What all measurements share.

    Attributes:
        digits: directory of the real ones.
        output: where pictures go.
        seed: of every draw.
        wanted: [NUM_DRAWINGS] digit to ask for in each drawing.
        train, heldout: real digits.
        judge: fitted on `train`.
    """

    digits: Path
    output: Path
    seed: int
    wanted: NDArray[np.int64]
    train: Digits
    heldout: Digits
    judge: DigitJudge


def open_bench(digits: Path, output: Path, seed: int) -> Bench:
    """Load the real digits and fit the judge."""
    train, heldout = load_split(digits, "train"), load_split(digits, "heldout")
    return Bench(digits, output, seed, np.arange(NUM_DRAWINGS) % 10, train, heldout, DigitJudge(train))


def measure_base(bench: Bench, run: Path, block_tokens: int) -> dict[str, Any]:
    """Both tasks of the base model; draws `digits.png` and `answers.png`.

    Args:
        run: of the base model.
        block_tokens: longest answer.
    """
    sampler = load_sampler(run)
    heldout = bench.heldout
    drawings = _draw(bench, sampler, draw_prompt)
    verdict = bench.judge.judge_drawings(drawings, bench.wanted, _through_codec(sampler, _opened(bench.train)))
    paths, answers, right = _answer(sampler, bench.digits, block_tokens)
    title = "“draw a seven”, …: {share} recognised as asked"
    draw_grids([Panel(title, drawings, verdict.read)], bench.wanted, bench.output / "digits.png")
    draw_answers(paths, answers, right, bench.output / "answers.png")
    again = _through_codec(sampler, _opened(heldout))
    negatives = [ImageOps.invert(picture) for picture in _opened(heldout)]
    return {
        "digits_recognised": verdict.recognised,
        "distinct_images": verdict.distinct,
        "copies_of_training": verdict.copies,
        "generated_images": len(drawings),
        "understanding_accuracy": float(right.mean()),
        "heldout_digits": len(answers),
        "judge_accuracy": bench.judge.accuracy(heldout.pixels, heldout.labels),
        "judge_accuracy_codec": bench.judge.accuracy(again, heldout.labels),
        "judge_accuracy_codec_inverted": bench.judge.accuracy(255 - _through_codec(sampler, negatives), heldout.labels),
    }


def measure_adapter(bench: Bench, run: Path, merged: Path) -> dict[str, Any]:
    """The new task with the adapter, without it and from the merged model, and the old task with the adapter.

    Draws `inverted.png`.

    Args:
        run: of the adapter.
        merged: model directory with the adapter merged into it.
    """
    with_adapter, without, merged_model = load_sampler(run), load_sampler(run, with_adapter=False), load_sampler(merged)
    on, off, from_merged = (_draw(bench, s, inverted_prompt) for s in (with_adapter, without, merged_model))
    old_task = _draw(bench, with_adapter, draw_prompt)
    known = _through_codec(with_adapter, _opened(bench.train))
    verdict_on, verdict_off = (bench.judge.judge_inverted(pictures, bench.wanted, known) for pictures in (on, off))
    equal = sum(a.tobytes() == b.tobytes() for a, b in zip(on, from_merged, strict=True))
    panels = [
        Panel("“draw an inverted seven”, …\nwith the adapter: {share} as asked", on, verdict_on.read),
        Panel("the same prompts and seeds\nwithout it: {share} as asked", off, verdict_off.read),
    ]
    draw_grids(panels, bench.wanted, bench.output / "inverted.png", columns=10)
    return {
        "lora_task_on": verdict_on.recognised,
        "lora_task_off": verdict_off.recognised,
        "lora_distinct_images": verdict_on.distinct,
        "merged_equals_adapter": equal == len(on),
        "merged_equal_images": equal,
        "base_task_with_adapter": bench.judge.judge_drawings(old_task, bench.wanted, known).recognised,
    }


def _draw(bench: Bench, sampler: Sampler, prompt: Callable[[int, int], str]) -> list[Image.Image]:
    """One picture per digit asked for, the training phrasings in turn."""
    prompts = [prompt(digit, i // 10 % len(DRAW_PROMPTS)) for i, digit in enumerate(bench.wanted.tolist())]
    return sampler.images(prompts, seed=bench.seed, temperature=TEMPERATURE, guidance=GUIDANCE, rounds=ROUNDS)


def _answer(sampler: Sampler, digits: Path, block_tokens: int) -> tuple[list[Path], list[str], NDArray[np.bool_]]:
    """Ask about every held-out digit: pictures, answers, and which are right."""
    lines = (digits / "understand_heldout.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    paths = [digits / row["images"][0] for row in rows]
    answers = sampler.text(
        [row["messages"][0]["content"] for row in rows],
        [[open_image(path, "gray")[0]] for path in paths],
        max_new_tokens=block_tokens,
    )
    return paths, answers, judge_answers(answers, [row["messages"][1]["content"] for row in rows])


def _opened(digits: Digits) -> list[Image.Image]:
    return [open_image(path, "gray")[0] for path in digits.paths]


def _through_codec(sampler: Sampler, pictures: Sequence[Image.Image]) -> NDArray[np.float64]:
    """[n, 64] pictures as the codec gives them back."""
    codec = sampler.codec
    assert codec is not None, "the demo's models have theirs"
    return to_pixels([codec.decode(grid.codes, grid.height, grid.width) for grid in codec.encode(pictures)])
