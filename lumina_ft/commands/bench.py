"""Commands that measure the parts that cost time."""

from typing import Annotated

import typer

from lumina_ft.commands.report import Json, report
from lumina_ft.errors import ConfigError

app = typer.Typer(help="Measure the parts that cost time.", no_args_is_help=True)

Experts = Annotated[int, typer.Option(min=1, help="Number of experts.")]
TopK = Annotated[int, typer.Option(min=1, help="Experts per token.")]


@app.command("moe")
def bench_moe(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of one forward pass.")] = 512,
    hidden: Annotated[int, typer.Option(min=4, help="Hidden size, a multiple of 4.")] = 256,
    width: Annotated[int, typer.Option(min=4, help="Width of one expert, a multiple of 4.")] = 64,
    experts: Experts = 256,
    top_k: TopK = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds; the medians count.")] = 11,
    as_json: Json = False,
) -> None:
    """Time the routed experts as one grouped operation against a loop over per-expert weights, on this CPU."""
    from lumina_ft.bench.moe import bench_moe as measure

    _check(top_k, experts)
    _check_rows({"hidden": hidden, "width": width}, 4, "float32")
    sizes = {"tokens": tokens, "hidden": hidden, "width": width, "experts": experts, "top_k": top_k}
    report(measure(**sizes, repeats=repeats), as_json)


@app.command("lora")
def bench_lora(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of one forward pass; each fills top-k rows.")] = 256,
    hidden: Annotated[int, typer.Option(min=8, help="Hidden size, a multiple of 8.")] = 2048,
    width: Annotated[int, typer.Option(min=8, help="Width of one expert, a multiple of 8.")] = 512,
    experts: Experts = 256,
    top_k: TopK = 8,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Timed passes of each side; the medians count.")] = 5,
    as_json: Json = False,
) -> None:
    """Time adapters of routed experts, and their memory, against PEFT's own, in bfloat16 on this CPU."""
    from lumina_ft.bench.lora import LoraCase
    from lumina_ft.bench.lora import bench_lora as measure

    _check(top_k, experts)
    _check_rows({"hidden": hidden, "width": width}, 8, "bfloat16")
    case = LoraCase(tokens=tokens, hidden=hidden, width=width, experts=experts, top_k=top_k, rank=rank)
    report(measure(case, repeats=repeats), as_json)


def _check(top_k: int, experts: int) -> None:
    if top_k > experts:
        raise ConfigError(f"--top-k — {top_k} — must not exceed --experts={experts} — lower it")


def _check_rows(sizes: dict[str, int], multiple: int, dtype: str) -> None:
    """Sizes that the grouped product takes."""
    for name, size in sizes.items():
        if size % multiple:
            raise ConfigError(
                f"--{name} — {size} — must be a multiple of {multiple}, as {dtype} rows need — use "
                f"{size // multiple * multiple}"
            )
