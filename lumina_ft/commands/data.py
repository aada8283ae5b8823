"""`lumina-ft data`: build and look at data sets."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from lumina_ft.commands.report import Json, report
from lumina_ft.errors import ConfigError

app = typer.Typer(help="Build and look at data sets.", no_args_is_help=True, rich_markup_mode="rich")

_EPILOG_BUILD = """Examples:

    lumina-ft data build datasets/digits.yaml

    lumina-ft data build input=rows.jsonl output=out/data codec=pq codec.image_size=64 on_bad_row=quarantine
"""


@app.command("build", epilog=_EPILOG_BUILD)
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

    config, overrides = split_config(arguments or [])
    cfg = load_build(config, overrides)
    with counted("rows") as advance:
        summary = build(cfg, progress=advance)
    packing = summary["packing"]
    sys.stderr.write(
        f"{summary['samples']} samples, {summary['tokens']} tokens; packed to {packing['max_tokens']}: "
        f"{packing['packs']} packs, token use {100 * packing['token_use']:.2f} %\n"
    )
    report(summary, as_json)


def split_config(arguments: list[str]) -> tuple[Path | None, list[str]]:
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


@app.command("digits")
def data_digits(
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to create.")],
    heldout_fraction: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share kept out of training.")] = 0.2,
    seed: Annotated[int, typer.Option(min=0, help="Drives the split and the phrasings.")] = 0,
    as_json: Json = False,
) -> None:
    """Write scikit-learn's handwritten digits as PNG files and JSONL rows, ready for [bold]data build[/bold]."""
    from lumina_ft.data.digits import write_digits

    counts = write_digits(output, heldout_fraction=heldout_fraction, seed=seed)
    report({"output": str(output), **counts}, as_json)


@app.command("inspect")
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

    report(preview, as_json, show)
