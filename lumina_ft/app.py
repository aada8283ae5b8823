"""All commands of `lumina-ft`: their options and help. What they do lives elsewhere and is imported when called."""

import json
import logging
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import typer

from lumina_ft import __version__
from lumina_ft.errors import ConfigError, Interrupted, LuminaError

app = typer.Typer(
    name="lumina-ft",
    help="Staged fine-tuning of multi-codebook mixture-of-experts diffusion models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
data_app = typer.Typer(help="Build and look at data sets.", no_args_is_help=True, rich_markup_mode="rich")
bench_app = typer.Typer(help="Measure the parts that cost time.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides: [bold]optim.lr=1e-4 stages.0.steps=10 ~train[/bold]"),
]

_EPILOG_SFT = """Examples:

    lumina-ft sft --config u2-three-stage model.path=/ckpt/U2 data.path=out/my-data

    lumina-ft sft --config run.yaml parallel.ranks=8 parallel.zero=zero3 stages.heads.lr=1e-4

    lumina-ft sft --config run.yaml --resume

    torchrun --nproc-per-node 8 cli.py sft --config run.yaml
"""

_EPILOG_CONVERT = """Examples:

    lumina-ft convert checkpoints/InternLumina-U2 checkpoints/U2-packed --layout packed

    lumina-ft convert out/run/checkpoints/checkpoint-900/model out/release --layout split
"""

_EPILOG_SAMPLE = """Examples:

    lumina-ft sample --model out/run --task t2i --prompt "draw a seven" --output seven.png --num-images 4

    lumina-ft sample --model out/run --task understand --image digit.png --prompt "which digit is this?"

    lumina-ft sample --model out/run --prompt "What is a prime number?"
"""

_EPILOG_BUILD = """Examples:

    lumina-ft data build datasets/digits.yaml

    lumina-ft data build input=rows.jsonl output=out/data codec=pq codec.image_size=64 on_bad_row=quarantine
"""


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 our bug or a failed run, 2 something to fix, 130 and 143 stopped by a signal.

    A user's error is one line on stderr; only our own bugs show a traceback.
    """
    _log_to_stderr()
    # As an exception, so that files written aside are removed; a rank, which may sit in a collective, resets this.
    signal.signal(signal.SIGTERM, _terminated)
    try:
        app(prog_name="lumina-ft")
    except LuminaError as error:
        from lumina_ft.launch.failures import exit_code
        from lumina_ft.launch.foreign import end_rank, wait_for_main_rank

        wait_for_main_rank()
        try:
            _fail(str(error), type(error).__name__, exit_code(error))
        finally:
            end_rank(exit_code(error))
    except Interrupted as stopped:
        _fail(str(stopped), "Interrupted", stopped.exit_code)
    except SystemExit as stopped:
        # Typer has shown a wrong option or argument on stderr and left its error as the context.
        message = getattr(stopped.__context__, "format_message", None)
        if message is not None:
            _print_json_error(" ".join(message().split()), "UsageError", 2)
        raise
    except Exception as error:
        from lumina_ft.launch.foreign import end_rank, is_foreign

        _print_json_error(str(error), type(error).__name__, 1)
        if is_foreign():
            traceback.print_exc()
            end_rank(1)
        raise


def _terminated(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _log_to_stderr() -> None:
    logger = logging.getLogger("lumina_ft")
    logger.setLevel(logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers = [handler]


def _fail(message: str, kind: str, code: int) -> None:
    _print_json_error(message, kind, code)
    lines = message.splitlines()
    sys.stderr.write("".join(f"error: {line}\n" for line in lines))
    sys.stderr.flush()
    raise SystemExit(code)


def _print_json_error(message: str, kind: str, code: int) -> None:
    if "--json" in sys.argv:
        _print_json({"error": message, "kind": kind, "exit_code": code})


def _print_json(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result, default=str) + "\n")
    sys.stdout.flush()


def _report(result: dict[str, Any], as_json: bool, show: Callable[[], object] | None = None) -> None:
    """Print a command's result: JSON, or what `show` prints, or `name: value` lines."""
    if as_json:
        _print_json(result)
    elif show is not None:
        show()
    else:
        sys.stdout.write("".join(f"{name}: {value}\n" for name, value in result.items()))


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"lumina-ft {__version__}\n")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Staged fine-tuning of multi-codebook mixture-of-experts diffusion models."""


@app.command(epilog=_EPILOG_SFT)
def sft(
    config: Annotated[str, typer.Option("--config", "-c", help="YAML file or name of a shipped recipe.")],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest complete checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the run in output_dir first.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check keys, paths and data sets, print the plan, start nothing."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Train the stages of a config, each in fresh ranks; under torchrun or deepspeed, in their ranks."""
    from lumina_ft.config.load import load_run
    from lumina_ft.launch.foreign import is_foreign, is_main_rank, run_foreign

    if resume and overwrite:
        raise ConfigError("--resume — and --overwrite — contradict each other — give one")
    cfg = load_run(config, overrides or [])
    if dry_run:
        from lumina_ft.launch.plan_view import describe_run, print_run

        _report(describe_run(cfg), as_json, lambda: print_run(cfg))
        return
    if is_foreign():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        result = run_foreign(cfg, resume=resume, overwrite=overwrite)
    else:
        from lumina_ft.launch.local import run_local

        result = run_local(cfg, resume=resume, overwrite=overwrite)
    if is_main_rank():
        from lumina_ft.launch.summary import print_summary

        _report(result, as_json, lambda: print_summary(result))


@app.command(epilog=_EPILOG_SAMPLE)
def sample(
    model: Annotated[
        Path,
        typer.Option("--model", "-m", help="Run directory (its newest checkpoint), checkpoint, or model directory."),
    ],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="User message; <image> places an image in it.")],
    task: Annotated[
        Literal["text", "understand", "t2i"],
        typer.Option("--task", "-t", help="text: answer; understand: answer about images; t2i: draw."),
    ] = "text",
    image: Annotated[list[Path] | None, typer.Option("--image", "-i", help="understand: an image; repeatable.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="t2i: PNG to write.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides every draw.")] = 0,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 takes the likeliest token. Default: 0 for answers, 1 for images.")
    ] = None,
    guidance: Annotated[float, typer.Option(min=0.0, help="t2i: weight of the prompt against no prompt.")] = 3.0,
    steps: Annotated[int | None, typer.Option(min=1, help="Model calls per text block, or rounds of an image.")] = None,
    num_images: Annotated[int, typer.Option("--num-images", "-n", min=1, help="t2i: images to draw.")] = 1,
    grid: Annotated[
        tuple[int, int] | None, typer.Option(metavar="H W", help="t2i: code rows and columns. Default: the codec's.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 1024,
    data: Annotated[Path | None, typer.Option(help="Built dataset with the codec. Default: the run's.")] = None,
    as_json: Json = False,
) -> None:
    """Answer a prompt or draw an image with a trained model."""
    from lumina_ft.sample import run_sample

    result = run_sample(
        model,
        task=task,
        prompt=prompt,
        images=image or [],
        output=output,
        seed=seed,
        temperature=temperature,
        guidance=guidance,
        steps=steps,
        num_images=num_images,
        grid=grid,
        max_new_tokens=max_new_tokens,
        data=data,
    )
    shown = result["images"] if task == "t2i" else [result["text"]]
    _report(result, as_json, lambda: sys.stdout.write("".join(f"{line}\n" for line in shown)))


@app.command(epilog="Example:\n\n    lumina-ft demo --output out/demo")
def demo(
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to fill; an earlier demo is replaced.")] = (
        Path("out/demo")
    ),
    as_json: Json = False,
) -> None:
    """Train a small model on handwritten digits, let it draw and read, and judge both: eight minutes on two cores."""
    from lumina_ft.demo.run import print_demo, run_demo

    result = run_demo(output, overrides or [])
    print_demo(result)
    _report(result, as_json, lambda: None)


@app.command(epilog=_EPILOG_CONVERT)
def convert(
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="Checkpoint directory of either layout.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Directory to create.")],
    layout: Annotated[
        Literal["packed", "split"],
        typer.Option("--layout", help="packed: 3-D experts, for training; split: one tensor per expert, as published."),
    ],
    max_shard_gib: Annotated[float, typer.Option("--max-shard-gib", min=0.001, help="Largest shard file.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Rewrite a checkpoint in the other layout, tensor by tensor, without building the model."""
    from lumina_ft.checkpoint.export import convert as convert_checkpoint

    summary = convert_checkpoint(source, output, layout, max_shard_bytes=int(max_shard_gib * 2**30))
    _report(summary._asdict(), as_json)


@app.command(epilog="Example:\n\n    lumina-ft plan --model-config checkpoints/InternLumina-U2/config.json")
def plan(
    model_config: Annotated[
        str, typer.Option("--model-config", help="config.json, a directory that holds one, or a shipped name.")
    ],
    as_json: Json = False,
) -> None:
    """Count every parameter of a model, group by group, without allocating one."""
    from lumina_ft.plan import describe_model, print_plan

    description = describe_model(model_config)
    _report(description, as_json, lambda: print_plan(description))


@bench_app.command("moe")
def bench_moe(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of one forward pass.")] = 512,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 256,
    width: Annotated[int, typer.Option(min=1, help="Width of one expert.")] = 64,
    experts: Annotated[int, typer.Option(min=1, help="Number of experts.")] = 256,
    top_k: Annotated[int, typer.Option(min=1, help="Experts per token.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds; the medians count.")] = 11,
    as_json: Json = False,
) -> None:
    """Time the routed experts as one grouped operation against a loop over per-expert weights, on this CPU."""
    from lumina_ft.bench import bench_moe as measure

    if top_k > experts:
        raise ConfigError(f"--top-k — {top_k} — must not exceed --experts={experts} — lower it")
    sizes = {"tokens": tokens, "hidden": hidden, "width": width, "experts": experts, "top_k": top_k}
    _report(measure(**sizes, repeats=repeats), as_json)


@data_app.command("build", epilog=_EPILOG_BUILD)
def data_build(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help="A YAML file, then overrides; either may be left out."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Turn raw rows and images into a dataset of token ids and codes."""
    from lumina_ft.config.load import load_build
    from lumina_ft.data.build import build
    from lumina_ft.monitor.progress import counted

    config, overrides = _split_config(arguments or [])
    cfg = load_build(config, overrides)
    with counted("rows") as advance:
        summary = build(cfg, progress=advance)
    packing = summary["packing"]
    sys.stderr.write(
        f"{summary['samples']} samples, {summary['tokens']} tokens; packed to {packing['max_tokens']}: "
        f"{packing['packs']} packs, token use {100 * packing['token_use']:.2f} %\n"
    )
    _report(summary, as_json)


def _split_config(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """The config file among `[CONFIG] [KEY=VALUE]...`: the one argument that is no override."""
    files = [a for a in arguments if not ("=" in a or a.startswith("~")) or Path(a).is_file()]
    if len(files) > 1:
        raise ConfigError(f"{files[1]} — a second file — must be one CONFIG, then key=value — join the files")
    overrides = [a for a in arguments if a not in files]
    if not files:
        return None, overrides
    if not Path(files[0]).is_file():
        raise ConfigError(f"{files[0]} — no such file — must be a YAML file or key=value — check the path")
    return Path(files[0]), overrides


@data_app.command("digits")
def data_digits(
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to create.")],
    heldout_fraction: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share kept out of training.")] = 0.2,
    seed: Annotated[int, typer.Option(min=0, help="Drives the split and the phrasings.")] = 0,
    as_json: Json = False,
) -> None:
    """Write scikit-learn's handwritten digits as PNG files and JSONL rows, ready for [bold]data build[/bold]."""
    from lumina_ft.data.digits import write_digits

    counts = write_digits(output, heldout_fraction=heldout_fraction, seed=seed)
    _report({"output": str(output), **counts}, as_json)


@data_app.command("inspect")
def data_inspect(
    path: Annotated[Path, typer.Argument(help="Dataset directory written by data build.")],
    samples: Annotated[int, typer.Option("--samples", "-n", min=0, help="Samples to show.")] = 3,
    as_json: Json = False,
) -> None:
    """Show what a built dataset holds: tasks, sizes, and the first samples as text and code grids."""
    from lumina_ft.data.preview import preview_dataset

    preview = preview_dataset(path, samples)

    def show() -> None:
        for name in ("path", "num_samples", "tasks", "codebooks", "codec", "identity"):
            sys.stdout.write(f"{name}: {preview[name]}\n")
        for sample in preview["samples"]:
            sys.stdout.write(f"\nsample {sample['index']} ({sample['task']}, {sample['source']})\n")
            for segment in sample["segments"]:
                content = segment.get("text", "")
                if segment["kind"] != "text":
                    content = f"{segment['shape']} codes {segment['code_range']}"
                sys.stdout.write(f"  {segment['role']:9} {segment['turn']:3} {segment['kind']:5} {content}\n")

    _report(preview, as_json, show)
