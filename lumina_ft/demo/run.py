"""`lumina-ft demo`: the whole toolkit on real handwritten digits, from PNG files to judged results.

digits → data build → sft (three stages, ZeRO-3 on two ranks) → sample → judge → pictures, table
"""

import json
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lumina_ft.config.data_schema import BuildConfig, CodecConfig, Task
from lumina_ft.config.load import load_run
from lumina_ft.config.schema import RunConfig
from lumina_ft.errors import ConfigError

if TYPE_CHECKING:
    from PIL import Image

    from lumina_ft.demo.judge import Digits
    from lumina_ft.sample import Sampler

log = logging.getLogger(__name__)

RECIPE = "u2-demo"
RESULT_FILE = "demo.json"
HELDOUT_FRACTION = 0.2
DISTORTED_COPIES = 6
REPHRASED_COPIES = 1
SYSTEM_PROMPTS: dict[Task, str] = {"t2i": "draw", "understand": "read"}
"""Short, because every sample repeats them."""

NUM_DRAWINGS = 200
ROUNDS = 4
TEMPERATURE = 0.7
GUIDANCE = 0.5
"""Half a unit sharpens the digits; 2 and more make a model of this size repeat a few shapes."""

_OWNED = (
    "digits",
    "dataset",
    "heldout",
    "run",
    "digits.png",
    "answers.png",
    "losses.png",
    "expert_load.png",
    RESULT_FILE,
)
"""All that a demo writes, hence all that the next one may delete."""


@dataclass
class _Clock:
    """Wall seconds per phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Announce and time a phase."""
        log.info("demo: %s", name)
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 1)


def run_demo(output: Path, overrides: list[str]) -> dict[str, Any]:
    """Run the demo and leave everything it made in `output`.

    Args:
        output: directory; one that an earlier demo left is emptied first.
        overrides: `key=value` for the training recipe `u2-demo`.

    Returns:
        JSON-ready results; also written to `output/demo.json`.

    Raises:
        ConfigError: `output` holds something that no demo wrote, or an override is wrong.
        LuminaError: what a phase reports.
    """
    clock = _Clock()
    places = {"data.path": "dataset", "data.eval_path": "heldout", "output_dir": "run"}
    run_config = load_run(RECIPE, [f"{key}={output / name}" for key, name in places.items()] + overrides)
    _clear(output)
    with clock.phase("digits"):
        rows = _write_digits(output / "digits", run_config.seed)
    with clock.phase("build"):
        built = _build(output, rows, run_config)
    with clock.phase("train"):
        trained = _train(run_config)
    with clock.phase("sample"):
        judged = _sample_and_judge(output, run_config)
    result = {
        **judged,
        "stages": len(trained["stages"]),
        "samples": built["samples"],
        "tokens": sum(stage["tokens"] for stage in trained["stages"]),
        "steps": sum(stage["steps"] for stage in trained["stages"]),
        "seconds": clock.seconds | {"total": round(sum(clock.seconds.values()), 1)},
        "model": trained["model"],
        "output": str(output),
    }
    (output / RESULT_FILE).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def print_demo(result: dict[str, Any]) -> None:
    """Show the results as a table on stderr."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="lumina-ft demo: handwritten digits", title_justify="left")
    table.add_column("result")
    table.add_column("value", justify="right")
    table.add_column("what it is", overflow="fold")
    lines = (
        ("digits_recognised", "generated digits that the judge reads as asked"),
        ("distinct_images", f"different pictures among {NUM_DRAWINGS}"),
        ("copies_of_training", "generated pictures that equal a training digit"),
        ("understanding_accuracy", "right words for held-out real digits"),
        ("judge_accuracy", "the judge itself on held-out real digits"),
        ("judge_accuracy_codec", "the same after the image codec"),
        ("stages", "training stages, each in fresh ranks"),
        ("steps", "optimizer steps"),
        ("tokens", "tokens trained on"),
    )
    for name, meaning in lines:
        value = result[name]
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else f"{value:,}", meaning)
    for phase, seconds in result["seconds"].items():
        table.add_row(f"seconds {phase}", f"{seconds:.1f}", "", end_section=phase == "total")
    console = Console(stderr=True, width=100)
    console.print(table)
    console.print(f"pictures: {result['output']}/digits.png, answers.png, losses.png, expert_load.png")


def _clear(output: Path) -> None:
    """Empty the directory of an earlier demo."""
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output — {str(output)!r} — is a file — must be a directory; choose another")
    foreign = sorted(p.name for p in output.iterdir() if p.name not in _OWNED) if output.exists() else []
    if foreign:
        raise ConfigError(
            f"--output — {str(output)!r} — holds {', '.join(foreign[:3])}, which no demo wrote — "
            "must be new or an earlier demo's directory; choose another"
        )
    for name in _OWNED:
        path = output / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    output.mkdir(parents=True, exist_ok=True)


def _write_digits(directory: Path, seed: int) -> list[Path]:
    """Write the digits and return the JSONL files of the training rows."""
    from lumina_ft.data.digits import write_digits
    from lumina_ft.demo.augment import write_distorted, write_rephrased

    write_digits(directory, heldout_fraction=HELDOUT_FRACTION, seed=seed)
    drawn = write_rephrased(directory, copies=REPHRASED_COPIES, seed=seed)
    read = write_distorted(directory, copies=DISTORTED_COPIES, seed=seed)
    return [directory / "t2i_train.jsonl", drawn, directory / "understand_train.jsonl", read]


def _build(output: Path, rows: list[Path], run_config: RunConfig) -> dict[str, Any]:
    """Build the training dataset, and the held-out one with the training codec. Returns the former's summary."""
    from lumina_ft.data.build import build

    def config(files: list[Path], name: str, codec: CodecConfig) -> BuildConfig:
        return BuildConfig(
            input=tuple(files),
            output=output / name,
            codec=codec,
            system_prompts=SYSTEM_PROMPTS,
            block_tokens=run_config.data.block_tokens,
            max_sample_tokens=run_config.data.max_pack_tokens,
        )

    summary = build(config(rows, "dataset", CodecConfig(channels="gray")))
    heldout = [output / "digits" / f"{task}_heldout.jsonl" for task in SYSTEM_PROMPTS]
    build(config(heldout, "heldout", CodecConfig(path=output / "dataset")))
    return summary


def _train(run_config: RunConfig) -> dict[str, Any]:
    from lumina_ft.launch.local import run_local

    return run_local(run_config, resume=False, overwrite=False)


def _sample_and_judge(output: Path, run_config: RunConfig) -> dict[str, Any]:
    """Generate, answer, judge and draw."""
    from lumina_ft.demo.judge import DigitJudge, load_split, to_pixels
    from lumina_ft.demo.pictures import draw_answers, draw_grid
    from lumina_ft.sample import load_sampler

    sampler = load_sampler(run_config.output_dir)
    train, heldout = load_split(output / "digits", "train"), load_split(output / "digits", "heldout")
    judge = DigitJudge(train)
    wanted = np.arange(NUM_DRAWINGS) % 10
    drawings = _draw(sampler, wanted, run_config.seed)
    verdict = judge.judge_drawings(drawings, wanted, to_pixels(_through_codec(sampler, train)))
    paths, answers, right = _answer(sampler, output / "digits", run_config.data.block_tokens)
    draw_grid(drawings, wanted, verdict.read, output / "digits.png")
    draw_answers(paths, answers, right, output / "answers.png")
    _copy_plots(run_config, output)
    return {
        "digits_recognised": verdict.recognised,
        "distinct_images": verdict.distinct,
        "copies_of_training": verdict.copies,
        "generated_images": len(drawings),
        "understanding_accuracy": float(right.mean()),
        "heldout_digits": len(answers),
        "judge_accuracy": judge.accuracy(heldout.pixels, heldout.labels),
        "judge_accuracy_codec": judge.accuracy(to_pixels(_through_codec(sampler, heldout)), heldout.labels),
    }


def _draw(sampler: "Sampler", wanted: NDArray[np.int64], seed: int) -> "list[Image.Image]":
    """One picture per digit asked for, the training phrasings in turn."""
    from lumina_ft.data.digits import DRAW_PROMPTS, draw_prompt

    prompts = [draw_prompt(int(digit), i // 10 % len(DRAW_PROMPTS)) for i, digit in enumerate(wanted)]
    return sampler.images(prompts, seed=seed, temperature=TEMPERATURE, guidance=GUIDANCE, rounds=ROUNDS)


def _answer(sampler: "Sampler", digits: Path, block_tokens: int) -> tuple[list[Path], list[str], NDArray[np.bool_]]:
    """Ask about every held-out digit: pictures, answers, and which are right."""
    from lumina_ft.data.images import open_image
    from lumina_ft.demo.judge import judge_answers

    lines = (digits / "understand_heldout.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    paths = [digits / row["images"][0] for row in rows]
    answers = sampler.text(
        [row["messages"][0]["content"] for row in rows],
        [[open_image(path, "gray")[0]] for path in paths],
        max_new_tokens=block_tokens,
    )
    return paths, answers, judge_answers(answers, [row["messages"][1]["content"] for row in rows])


def _through_codec(sampler: "Sampler", digits: "Digits") -> "list[Image.Image]":
    """Real digits as the codec gives them back."""
    from lumina_ft.data.images import open_image

    codec = sampler.codec
    assert codec is not None, "drawing has used it"
    codes = codec.encode([open_image(path, "gray")[0] for path in digits.paths])
    return [codec.decode(grid.codes, grid.height, grid.width) for grid in codes]


def _copy_plots(run_config: RunConfig, output: Path) -> None:
    """The run's own pictures, next to the demo's."""
    plots = run_config.output_dir / "plots"
    shutil.copyfile(plots / "losses.png", output / "losses.png")
    last = run_config.stages[-1].name
    shutil.copyfile(plots / f"expert_load_{last}.png", output / "expert_load.png")
