"""`lumina-ft`: its entry point, and the commands that train and sample; more of them are in `commands`.

Commands are options and help. What they do lives elsewhere and is imported when called.
"""

import logging
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer

from lumina_ft import __version__
from lumina_ft.commands import bench, data, models
from lumina_ft.commands.report import Json, Overrides, print_json, report
from lumina_ft.errors import ConfigError, Interrupted, LuminaError, RunError
from lumina_ft.launch.environment import end_rank, is_foreign, is_main_rank, let_another_rank_speak, wait_for_main_rank

app = typer.Typer(
    name="lumina-ft",
    help="Staged fine-tuning of multi-codebook mixture-of-experts diffusion models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(models.app)
app.add_typer(data.app, name="data")
app.add_typer(bench.app, name="bench")

_EPILOG_SFT = """Examples:

    lumina-ft sft --config u2-three-stage model.path=/ckpt/U2 data.path=out/my-data

    lumina-ft sft --config run.yaml parallel.ranks=8 parallel.zero=zero3 stages.heads.lr=1e-4

    lumina-ft sft --config run.yaml --resume

    torchrun --nproc-per-node 8 cli.py sft --config run.yaml
"""

_EPILOG_SAMPLE = """Examples:

    lumina-ft sample --model out/run --task t2i --prompt "draw a seven" --output seven.png --num-images 4

    lumina-ft sample --model out/run --task understand --image digit.png --prompt "which digit is this?"

    lumina-ft sample --model out/run --prompt "What is a prime number?"

    lumina-ft sample --model checkpoints/InternLumina-U2 --adapter my-lora --prompt "What is a prime number?"
"""


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 our bug or a failed run, 2 something to fix, 130 and 143 stopped by a signal.

    A user's error is one line on stderr; only our own bugs show a traceback.
    """
    _log_to_stderr()
    # As an exception, so that files written aside are removed. Ranks and their parent have their own ways.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        app(prog_name="lumina-ft")
    except LuminaError as error:
        from lumina_ft.launch.failures import exit_code

        wait_for_main_rank()
        try:
            _fail(str(error), type(error).__name__, exit_code(error))
        finally:
            end_rank(exit_code(error))
    except Interrupted as stopped:
        if is_foreign() and not is_main_rank():
            let_another_rank_speak()
            end_rank(stopped.exit_code)
        try:
            _fail_stopped(stopped)
        finally:
            end_rank(stopped.exit_code)
    except SystemExit as stopped:
        # Typer has shown a wrong option or argument on stderr and left its error as the context.
        message = getattr(stopped.__context__, "format_message", None)
        if message is not None:
            _print_json_error(" ".join(message().split()), "UsageError", 2)
        raise
    except Exception as error:
        _print_json_error(str(error), type(error).__name__, 1)
        if is_foreign():
            traceback.print_exc()
            end_rank(1)
        raise


def _interrupt(number: int, _: FrameType | None) -> None:
    raise Interrupted(number, "the command has not finished")


def _fail_stopped(stopped: Interrupted) -> None:
    _fail(str(stopped), "Interrupted", stopped.exit_code)


def _log_to_stderr() -> None:
    logger = logging.getLogger("lumina_ft")
    logger.setLevel(logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers = [handler]


def _fail(message: str, kind: str, code: int) -> None:
    _tell(message, kind, code)
    raise SystemExit(code)


def _tell_hang(error: RunError) -> None:
    _tell(str(error), "RunError", 1)


def _tell(message: str, kind: str, code: int) -> None:
    _print_json_error(message, kind, code)
    lines = message.splitlines()
    sys.stderr.write("".join(f"error: {line}\n" for line in lines))
    sys.stderr.flush()


def _print_json_error(message: str, kind: str, code: int) -> None:
    if "--json" in sys.argv:
        print_json({"error": message, "kind": kind, "exit_code": code})


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
    from lumina_ft.launch.signals import listen_as_rank

    # Before anything that starts threads.
    stop = listen_as_rank(_fail_stopped) if is_foreign() else None
    from lumina_ft.config.load import load_run

    if resume and overwrite:
        raise ConfigError("--resume — and --overwrite — contradict each other — give one")
    cfg = load_run(config, overrides or [])
    if dry_run:
        from lumina_ft.launch.plan_view import describe_run, print_run

        report(describe_run(cfg), as_json, lambda: print_run(cfg))
        return
    if is_foreign():
        from lumina_ft.launch.foreign import run_foreign

        result = run_foreign(cfg, resume=resume, overwrite=overwrite, tell=_tell_hang, stop=stop)
    else:
        from lumina_ft.launch.local import run_local

        result = run_local(cfg, resume=resume, overwrite=overwrite)
    if is_main_rank():
        from lumina_ft.launch.summary import print_summary

        report(result, as_json, lambda: print_summary(result))


@app.command(epilog=_EPILOG_SAMPLE)
def sample(
    model: Annotated[
        Path,
        typer.Option(
            "--model",
            "-m",
            help="Run (its newest checkpoint), checkpoint, or model directory; with its adapter, if any.",
        ),
    ],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="User message; <image> places an image in it.")],
    task: Annotated[
        Literal["text", "understand", "t2i"],
        typer.Option("--task", "-t", help="text: answer; understand: answer about images; t2i: draw."),
    ] = "text",
    adapter: Annotated[
        Path | None, typer.Option("--adapter", "-a", help="PEFT LoRA directory to put on --model, unmerged.")
    ] = None,
    no_adapter: Annotated[
        bool, typer.Option("--no-adapter", help="The base of --model alone, prompted as with its adapter.")
    ] = False,
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
        adapter=adapter,
        with_adapter=not no_adapter,
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
    report(result, as_json, lambda: sys.stdout.write("".join(f"{line}\n" for line in shown)))


@app.command(epilog="Example:\n\n    lumina-ft demo --output out/demo seed=1")
def demo(
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to fill; an earlier demo is replaced.")] = (
        Path("out/demo")
    ),
    as_json: Json = False,
) -> None:
    """Train a small model and an adapter on handwritten digits, merge, sample and judge: five minutes on two cores."""
    from lumina_ft.demo.run import print_demo, run_demo

    result = run_demo(output, overrides or [])
    print_demo(result)
    report(result, as_json, lambda: None)
