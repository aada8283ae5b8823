"""`lumina-ft demo`: the whole toolkit on real handwritten digits, from PNG files to judged results.

digits → data build → sft (three stages, ZeRO-3 on two ranks that share the experts) → sft of an adapter on attention,
MLPs and experts of that model, for a new task (ZeRO-2) → merge-lora → sample → judge → pictures, table
"""

import json
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lumina_ft.config.data_schema import BuildConfig, CodecConfig, Task
from lumina_ft.config.load import load_run
from lumina_ft.config.schema import RunConfig
from lumina_ft.errors import ConfigError

log = logging.getLogger(__name__)

RECIPE = "u2-demo"
ADAPTER_RECIPE = "u2-demo-lora"
RESULT_FILE = "demo.json"
HELDOUT_FRACTION = 0.2
DISTORTED_COPIES = 6
REPHRASED_COPIES = 1
INVERTED_PHRASINGS = 3
SYSTEM_PROMPTS: dict[Task, str] = {"t2i": "draw", "understand": "read"}
"""Short, because every sample repeats them."""

_SHARED_KEYS = (
    "seed",
    "parallel.ranks",
    "parallel.threads_per_rank",
    "parallel.expert_parallel_size",
    "data.block_tokens",
    "data.max_pack_tokens",
)
"""What the adapter's run takes over from the base's, overrides included."""

_OWNED = (
    "digits",
    "dataset",
    "dataset_lora",
    "heldout",
    "run",
    "lora",
    "merged",
    "digits.png",
    "inverted.png",
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
    base_config = load_run(RECIPE, [f"{key}={output / name}" for key, name in places.items()] + overrides)
    _clear(output)
    with clock.phase("digits"):
        base_rows, adapter_rows = _write_digits(output / "digits", base_config.seed)
    with clock.phase("build"):
        built = _build(output, base_rows, adapter_rows, base_config)
    with clock.phase("train"):
        base = _train(base_config)
    adapter_config = _adapter_config(output, base_config, base["model"])
    with clock.phase("lora"):
        adapter = _train(adapter_config)
    with clock.phase("merge"):
        merged = _merge(adapter, output / "merged")
    with clock.phase("sample"):
        judged = _sample_and_judge(output, base_config, adapter_config)
    stages = [*base["stages"], *adapter["stages"]]
    result = {
        **judged,
        **merged,
        **_experts(base_config, Path(adapter["adapter"])),
        "stages": len(stages),
        "samples": built["samples"],
        "tokens": sum(stage["tokens"] for stage in stages),
        "steps": sum(stage["steps"] for stage in stages),
        "seconds": clock.seconds | {"total": round(sum(clock.seconds.values()), 1)},
        "model": base["model"],
        "adapter": adapter["adapter"],
        "merged_model": str(output / "merged"),
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
        ("distinct_images", f"different pictures among {result['generated_images']}"),
        ("copies_of_training", "generated pictures that equal a training digit"),
        ("understanding_accuracy", "right words for held-out real digits"),
        ("lora_task_on", "generated inverted digits as asked, with the adapter"),
        ("lora_task_off", "the same prompts and seeds without it"),
        ("merged_equals_adapter", "the merged model draws the same pictures, bit for bit"),
        ("base_task_with_adapter", "ordinary digits as asked, with the adapter"),
        ("lowest_delta_cosine", "of merged weights: 1 where rounding kept the update"),
        ("judge_accuracy", "the judge itself on held-out real digits"),
        ("judge_accuracy_codec", "the same after the image codec"),
        ("judge_accuracy_codec_inverted", "the same of their negatives"),
        ("expert_parallel_size", "ranks that share the routed experts, in both trainings"),
        ("experts_per_rank", "routed experts of a layer that each of them holds"),
        ("busiest_rank_load", "slots routed to the busier rank's experts; 1 is even"),
        ("adapter_parameters", "in the adapter's matrices"),
        ("expert_adapter_parameters", "of these on routed experts"),
        ("stages", "training stages, each in fresh ranks"),
        ("steps", "optimizer steps"),
        ("tokens", "tokens trained on"),
    )
    for name, meaning in lines:
        value = result[name]
        table.add_row(name, _shown(value), meaning)
    for phase, seconds in result["seconds"].items():
        table.add_row(f"seconds {phase}", f"{seconds:.1f}", "", end_section=phase == "total")
    console = Console(stderr=True, width=100)
    console.print(table)
    console.print(f"pictures: {result['output']}/digits.png, inverted.png, answers.png, losses.png, expert_load.png")


def _shown(value: float | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}"


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


def _write_digits(directory: Path, seed: int) -> tuple[list[Path], list[Path]]:
    """Write the digits and return the JSONL files of the base's and of the adapter's training rows."""
    from lumina_ft.data.digits import write_digits
    from lumina_ft.demo.augment import write_distorted, write_rephrased
    from lumina_ft.demo.inverted import write_inverted

    write_digits(directory, heldout_fraction=HELDOUT_FRACTION, seed=seed)
    drawn = directory / "t2i_train.jsonl"
    rephrased = write_rephrased(directory, copies=REPHRASED_COPIES, seed=seed)
    distorted = write_distorted(directory, copies=DISTORTED_COPIES, seed=seed)
    inverted = write_inverted(directory, phrasings=INVERTED_PHRASINGS, seed=seed)
    return [drawn, rephrased, directory / "understand_train.jsonl", distorted], [inverted, drawn]


def _build(output: Path, base_rows: list[Path], adapter_rows: list[Path], run_config: RunConfig) -> dict[str, Any]:
    """Build both training datasets and the held-out one. Returns the summary of the base's.

    The codec is fitted on the adapter's pictures, the real training digits and their negatives: like a published image
    tokenizer it knows more kinds of pictures than one model was trained on.
    """
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

    build(config(adapter_rows, "dataset_lora", CodecConfig(channels="gray")))
    fitted = CodecConfig(path=output / "dataset_lora")
    summary = build(config(base_rows, "dataset", fitted))
    heldout = [output / "digits" / f"{task}_heldout.jsonl" for task in SYSTEM_PROMPTS]
    build(config(heldout, "heldout", fitted))
    return summary


def _adapter_config(output: Path, base: RunConfig, model: str) -> RunConfig:
    """The adapter's recipe, on the model that the base's run has left."""
    given = {"output_dir": output / "lora", "data.path": output / "dataset_lora", "model.path": model}
    for key in _SHARED_KEYS:
        value: Any = base
        for name in key.split("."):
            value = getattr(value, name)
        given[key] = value
    return load_run(ADAPTER_RECIPE, [f"{key}={value}" for key, value in given.items()])


def _train(run_config: RunConfig) -> dict[str, Any]:
    from lumina_ft.launch.local import run_local

    return run_local(run_config, resume=False, overwrite=False)


def _merge(adapter: dict[str, Any], output: Path) -> dict[str, Any]:
    """Merge what the adapter's run reports into its base, and verify it."""
    from lumina_ft.adapters.combine import WeightedAdapter
    from lumina_ft.adapters.merge import merge_adapters

    summary = merge_adapters(Path(adapter["model"]), [WeightedAdapter(Path(adapter["adapter"]), 1.0)], output)
    assert summary.check is not None, "verification is on"
    return {"lowest_delta_cosine": summary.check.lowest_cosine, "merged_tensors": summary.adapted + summary.replaced}


def _sample_and_judge(output: Path, base: RunConfig, adapter: RunConfig) -> dict[str, Any]:
    from lumina_ft.demo.measure import measure_adapter, measure_base, open_bench

    bench = open_bench(output / "digits", output, base.seed)
    judged = measure_base(bench, base.output_dir, base.data.block_tokens)
    judged |= measure_adapter(bench, adapter.output_dir, output / "merged")
    _copy_plots(base, output)
    return judged


def _experts(base: RunConfig, adapter: Path) -> dict[str, Any]:
    from lumina_ft.demo.experts import describe_experts

    return describe_experts(base.output_dir, adapter, base.parallel.expert_parallel_size)


def _copy_plots(run_config: RunConfig, output: Path) -> None:
    """The run's own pictures, next to the demo's."""
    plots = run_config.output_dir / "plots"
    shutil.copyfile(plots / "losses.png", output / "losses.png")
    last = run_config.stages[-1].name
    shutil.copyfile(plots / f"expert_load_{last}.png", output / "expert_load.png")
