"""Write docs/config.md from the configuration schema: `python scripts/write_config_docs.py`."""

import re
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from lumina_ft.config.data_schema import BuildConfig
from lumina_ft.config.groups import GROUP_ALIASES_U2, GROUPS_U2
from lumina_ft.config.schema import RunConfig

TARGET = Path(__file__).resolve().parent.parent / "docs" / "config.md"

HEAD = """# Configuration keys

Written by `scripts/write_config_docs.py` from the schema; don't edit.

A key on the command line is dotted: `optim.lr=1e-4`, `stages.0.steps=10` or, by the stage's name,
`stages.heads.steps=10`; `~optim.lr` removes a key. Lists are written `[a, b]`; one element may stand alone. Text is
taken as it is, no quotes needed inside. YAML 1.2 rules hold: `no` and `12:30` are text, `1e-5` is a number. A leading
`~/` in a path is the home directory.
"""


def main() -> None:
    """Write the page."""
    TARGET.write_text(render(), encoding="utf-8")


def render() -> str:
    """The page as Markdown."""
    parts = [HEAD, "## `lumina-ft sft --config FILE`\n", *_section(RunConfig, "")]
    aliases = [f"`{alias}` = {', '.join(groups)}" for alias, groups in GROUP_ALIASES_U2.items() if alias != "all"]
    parts.append(f"Parameter groups: {', '.join(f'`{group}`' for group in GROUPS_U2)}. Aliases: {'; '.join(aliases)};")
    parts.append("`all` = every group.\n")
    parts += ["## `lumina-ft data build [FILE]`\n", *_section(BuildConfig, "")]
    return "\n".join(parts)


def _section(model: type[BaseModel], prefix: str) -> list[str]:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    nested: list[str] = []
    for name, field in model.model_fields.items():
        inner = _inner(field.annotation)
        listed = get_origin(_bare(field.annotation)) is tuple
        if inner is not None:
            step = f"{prefix}{name}{'.N' if listed else ''}"
            nested += [f"### `{step}`\n", *_intro(inner), *_section(inner, f"{step}.")]
            continue
        default = "required" if field.default is PydanticUndefined else _shown(field.default)
        # Ids of requirements and of the model description mean nothing to a reader of this page.
        meaning = re.sub(r" \((spec §\d+|[A-Z]\d+)\)", "", " ".join((field.description or "").split()))
        rows.append(f"| `{prefix}{name}` | {_type(field.annotation)} | {default} | {meaning} |")
    return [*rows, "", *nested]


def _intro(model: type[BaseModel]) -> list[str]:
    doc = model.__doc__
    return [" ".join(doc.split()) + "\n"] if doc else []


def _bare(annotation: Any) -> Any:
    return _bare(get_args(annotation)[0]) if get_origin(annotation) is Annotated else annotation


def _inner(annotation: Any) -> type[BaseModel] | None:
    bare = _bare(annotation)
    if isinstance(bare, type) and not get_origin(bare) and issubclass(bare, BaseModel):
        return bare
    return next((found for argument in get_args(bare) if (found := _inner(argument)) is not None), None)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(str(item) for item in value)}]`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`" if value != {} else "`{}`"


def _type(annotation: Any) -> str:
    bare = _bare(annotation)
    origin = get_origin(bare)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(bare))
    if origin in (Union, types.UnionType):
        kinds = (_type(argument) for argument in get_args(bare) if argument is not type(None))
        return ", ".join(dict.fromkeys(kinds))
    if origin is tuple:
        inner = get_args(bare)
        return f"list of {_type(inner[0])}" if inner[-1] is Ellipsis else f"[{', '.join(_type(i) for i in inner)}]"
    if origin is dict:
        return "mapping"
    return {str: "text", int: "integer", float: "number", bool: "true/false", Path: "path"}[bare]


if __name__ == "__main__":
    main()
