"""Commands that measure the parts that cost time."""

from pathlib import Path
from typing import Annotated

import typer

from lumina_ft.commands.report import Json, report
from lumina_ft.errors import ConfigError, nearest

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


@app.command("kernels")
def bench_kernels(
    operation: Annotated[
        list[str] | None,
        typer.Option(help="moe, attention, router or cross-entropy; repeat for several. Default: all."),
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(help="A side to leave out, such as flex, which is compiled first; repeatable.")
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="real, small or tiny. Default: real on a GPU, small on the CPU.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Of timing per operation and case.")] = 2.0,
    as_json: Json = False,
) -> None:
    """Check every kernel and its peers against a reference, then time them: on the GPU if there is one."""
    from lumina_ft.bench.kernels.run import OPERATIONS, SIZES
    from lumina_ft.bench.kernels.run import bench_kernels as measure
    from lumina_ft.bench.kernels.tables import print_kernels

    operations = tuple(operation or OPERATIONS)
    for name in operations:
        _check_name("--operation", name, OPERATIONS)
    if size is not None:
        _check_name("--size", size, SIZES)
    result = measure(operations=operations, skip=tuple(skip or ()), size=size, seconds=seconds)
    report(result, as_json, lambda: print_kernels(result))
    for line in result["wrong"]:
        typer.echo(f"error: bench kernels: {line} — report this bug", err=True)
    if result["wrong"]:
        # Not an exception: its object would follow the figures of what is right, and only the last line counts.
        raise typer.Exit(1)


@app.command("step")
def bench_step(
    case: Annotated[
        list[str] | None,
        typer.Option(help="demo, experts, real or tiny; repeat for several. Default: what fits this machine."),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Of each choice; the first is not timed.")] = 10,
    as_json: Json = False,
) -> None:
    """Time training steps of small models, and on a GPU of layers of real width, under each choice of kernels."""
    from lumina_ft.bench.step import CASES, print_steps
    from lumina_ft.bench.step import bench_step as measure

    for name in case or ():
        _check_name("--case", name, tuple(CASES))
    result = measure(cases=case, steps=steps)
    report(result, as_json, lambda: print_steps(result))


@app.command("aot")
def bench_aot(
    arch: Annotated[
        list[str] | None, typer.Option(help="Such as sm_90; repeatable. Default: all that have a file of tiles.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Compile at the same time.")] = 2,
    as_json: Json = False,
) -> None:
    """Compile every Triton kernel for GPUs that need not be there, and fail if one spills registers or is too large."""
    from lumina_ft.bench.aot import bench_aot as compile_all
    from lumina_ft.bench.aot import print_aot, tiled_architectures

    for name in arch or ():
        _check_name("--arch", name, tiled_architectures())
    result = compile_all(arch or tiled_architectures(), processes=processes)
    report(result, as_json, lambda: print_aot(result))
    for line in result["problems"]:
        typer.echo(f"error: bench aot: {line} — change its tile or the kernel", err=True)
    if result["problems"]:
        raise typer.Exit(1)


@app.command("tune")
def bench_tune(
    arch: Annotated[str, typer.Option(help="sm_80, sm_86, sm_89 or sm_90.")] = "sm_90",
    kernel: Annotated[list[str] | None, typer.Option(help="Search this one only; repeatable. Default: all.")] = None,
    output: Annotated[Path | None, typer.Option(help="File to write. Default: the one that is shipped.")] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder that keeps what compiling found for the next call.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Choose tile sizes: candidates that compile well and, on a GPU of the architecture, the fastest of them."""
    from lumina_ft.bench.tune import bench_tune as search
    from lumina_ft.bench.tune import print_tune
    from lumina_ft.kernels.aot import CAPABILITY

    _check_name("--arch", arch, tuple(CAPABILITY))
    result = search(arch, kernels=tuple(kernel or ()), output=output, results=cache)
    report(result, as_json, lambda: print_tune(result))


def _check(top_k: int, experts: int) -> None:
    if top_k > experts:
        raise ConfigError(f"--top-k — {top_k} — must not exceed --experts={experts} — lower it")


def _check_name(option: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ConfigError(f"{option} — {name!r} — must be one of {', '.join(known)}{nearest(name, known)}")


def _check_rows(sizes: dict[str, int], multiple: int, dtype: str) -> None:
    """Sizes that the grouped product takes."""
    for name, size in sizes.items():
        if size % multiple:
            raise ConfigError(
                f"--{name} — {size} — must be a multiple of {multiple}, as {dtype} rows need — use "
                f"{size // multiple * multiple}"
            )
