"""Options that all commands share, and how a command reports its result."""

import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides: [bold]optim.lr=1e-4 stages.0.steps=10 ~train[/bold]"),
]


def print_json(result: dict[str, Any]) -> None:
    """Print one object as the last line of stdout."""
    sys.stdout.write(json.dumps(result, default=str) + "\n")
    sys.stdout.flush()


def report(result: dict[str, Any], as_json: bool, show: Callable[[], object] | None = None) -> None:
    """Print a command's result: JSON, or what `show` prints, or `name: value` lines."""
    if as_json:
        print_json(result)
    elif show is not None:
        show()
    else:
        sys.stdout.write("".join(f"{name}: {value}\n" for name, value in result.items()))
