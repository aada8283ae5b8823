"""Commands about model directories: their layout, their adapters, their size."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lumina_ft.commands.report import Json, Overrides, report
from lumina_ft.errors import ConfigError

Layout = Literal["packed", "split"]
MaxShardGib = Annotated[float, typer.Option("--max-shard-gib", min=0.001, help="Largest shard file.")]

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

_EPILOG_CONVERT = """Examples:

    lumina-ft convert checkpoints/InternLumina-U2 checkpoints/U2-packed --layout packed

    lumina-ft convert out/run/checkpoints/checkpoint-900/model out/release --layout split
"""


_EPILOG_PLAN = """Examples:

    lumina-ft plan --model-config checkpoints/InternLumina-U2/config.json

    lumina-ft plan --model-config checkpoints/InternLumina-U2 --ranks 8 --lora-rank 16

    lumina-ft plan --config run.yaml parallel.ranks=8 parallel.zero=zero2 parallel.expert_parallel_size=8
"""


_EPILOG_MERGE = """Examples:

    lumina-ft merge-lora --config out/run/run.yaml

    lumina-ft merge-lora --base checkpoints/U2 --adapter out/run/checkpoints/checkpoint-900/adapter --output out/merged

    lumina-ft merge-lora --base checkpoints/U2 --adapter styles/ink=0.7 --adapter styles/night=0.4 --output out/mixed

    lumina-ft merge-lora --config run.yaml --layout split --dtype float32 --output out/release
"""


@app.command(epilog=_EPILOG_CONVERT)
def convert(
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="Checkpoint directory of either layout.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Directory to create.")],
    layout: Annotated[
        Layout,
        typer.Option("--layout", help="packed: 3-D experts, for training; split: one tensor per expert, as published."),
    ],
    max_shard_gib: MaxShardGib = 5.0,
    as_json: Json = False,
) -> None:
    """Rewrite a checkpoint in the other layout, tensor by tensor, without building the model."""
    from lumina_ft.checkpoint.export import convert as convert_checkpoint

    summary = convert_checkpoint(source, output, layout, max_shard_bytes=int(max_shard_gib * 2**30))
    report(summary._asdict(), as_json)


@app.command(epilog=_EPILOG_PLAN)
def plan(
    overrides: Overrides = None,
    config: Annotated[
        str | None, typer.Option("--config", "-c", help="YAML of a run, or a recipe: memory of each of its stages.")
    ] = None,
    model_config: Annotated[
        str | None, typer.Option("--model-config", help="config.json, a directory that holds one, or a shipped name.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="With --model-config: memory of its layouts over N ranks.")
    ] = None,
    zero: Annotated[
        str | None, typer.Option("--zero", help="With --ranks: zero0 to zero3, or a DeepSpeed JSON. Default: all four.")
    ] = None,
    expert_parallel_size: Annotated[
        int | None,
        typer.Option("--expert-parallel-size", min=1, help="With --ranks: ranks that share the experts. Default: all."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option("--dtype", help="With --ranks: compute dtype. Default: bfloat16."),
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option("--lora-rank", min=1, help="With --ranks: layouts with an adapter alone, too.")
    ] = None,
    lora_target: Annotated[
        list[str] | None,
        typer.Option("--lora-target", help="With --lora-rank; repeatable. Default: attention, MLPs and experts."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Count a model's parameters, and each rank's bytes of weights, gradients and optimizer; estimate the peak."""
    sizes = {"--zero": zero, "--expert-parallel-size": expert_parallel_size, "--dtype": dtype, "--lora-rank": lora_rank}
    _check_plan_options(config, model_config, overrides, {"--ranks": ranks, **sizes, "--lora-target": lora_target})
    from lumina_ft.plan.memory import describe_layouts, describe_run
    from lumina_ft.plan.model import describe_model
    from lumina_ft.plan.tables import print_all

    if config is not None:
        description = describe_run(config, overrides or [])
    else:
        description = describe_model(model_config or "")
        if ranks is not None:
            description["layouts"] = describe_layouts(
                model_config or "",
                ranks=ranks,
                zero=zero,
                expert_parallel_size=expert_parallel_size,
                dtype=dtype,
                lora_rank=lora_rank,
                lora_targets=lora_target,
            )
    report(description, as_json, lambda: print_all(description))


def _check_plan_options(
    config: str | None, model_config: str | None, overrides: list[str] | None, layout: dict[str, Any]
) -> None:
    """Options of `plan` that don't go together."""
    if (config is None) == (model_config is None):
        raise ConfigError("--config — or --model-config — one of them says what is planned — give exactly one")
    given = [name for name, value in layout.items() if value]
    if config is not None and given:
        raise ConfigError(
            f"{given[0]} — with --config — the run's own keys decide this — use parallel.ranks=… and others"
        )
    if config is None and overrides:
        raise ConfigError(f"{overrides[0]} — an override without --config — changes that file's keys — add --config")
    if given and not layout["--ranks"]:
        raise ConfigError(f"{given[0]} — without --ranks — memory is planned for a number of ranks — add --ranks")
    if layout["--lora-target"] and not layout["--lora-rank"]:
        raise ConfigError("--lora-target — without --lora-rank — an adapter needs a rank — add --lora-rank")


@app.command("merge-lora", epilog=_EPILOG_MERGE)
def merge_lora(
    overrides: Overrides = None,
    config: Annotated[
        str | None, typer.Option("--config", "-c", help="YAML of a run: its newest checkpoint's adapter and base.")
    ] = None,
    base: Annotated[
        Path | None, typer.Option("--base", help="Model directory that the adapter was trained on.")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter", metavar="DIR[=WEIGHT]", help="PEFT LoRA directory; repeatable, weights default to 1."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Directory to create. Default: merged in the run's.")
    ] = None,
    layout: Annotated[
        Layout | None, typer.Option("--layout", help="packed (training) or split (as published). Default: the base's.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option("--dtype", help="Of all weights. float32 keeps updates that bfloat16 rounds away."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model directory that is there.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Read the result again and prove every value.")
    ] = True,
    max_shard_gib: MaxShardGib = 5.0,
    as_json: Json = False,
) -> None:
    """Merge adapters into their base, tensor by tensor, and prove the result before it gets its name."""
    from lumina_ft.merge_lora import print_merge, run_merge

    if (config is None) == (base is None and not adapter):
        raise ConfigError("--config — or --base with --adapter and --output — say what is merged — give one of the two")
    if config is None and overrides:
        raise ConfigError(f"{overrides[0]} — an override without --config — changes that file's keys — add --config")
    result = run_merge(
        config,
        overrides or [],
        base=base,
        adapters=adapter or [],
        output=output,
        layout=layout,
        dtype=dtype,
        overwrite=overwrite,
        verify=verify,
        max_shard_bytes=int(max_shard_gib * 2**30),
    )
    report(result, as_json, lambda: print_merge(result))
