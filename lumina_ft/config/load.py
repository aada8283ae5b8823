"""Read a config: a YAML file or recipe name plus overrides becomes a checked, frozen config object."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lumina_ft.config.data_schema import BuildConfig
from lumina_ft.config.fields import Section
from lumina_ft.config.overrides import PARTIAL_SECTIONS, apply_overrides, dotted
from lumina_ft.config.replaced import replacement
from lumina_ft.config.schema import DataConfig, RunConfig
from lumina_ft.config.yaml_file import Key, YamlFile, dump_yaml, read_yaml
from lumina_ft.errors import ConfigError, nearest

__all__ = ["RECIPES", "dump_yaml", "find_config", "load_build", "load_run"]

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
"""Run configs that ship with the package, usable by name."""

_Config = TypeVar("_Config", bound=Section)

_MAX_VALUE_CHARS = 80


def load_run(config: Path | str, overrides: list[str]) -> RunConfig:
    """Load a training run.

    Args:
        config: YAML file, or the name of a shipped recipe.
        overrides: `key=value` (dotted, typed by the schema) and `~key` (removes), applied in order.

    Raises:
        ConfigError: everything that is wrong at once, one line each: "file:line: key — value — rule".
    """
    return _load(RunConfig, read_yaml(find_config(config)), overrides)


def load_build(config: Path | None, overrides: list[str]) -> BuildConfig:
    """Load a dataset build; without a file, the overrides must hold the required keys.

    Raises:
        ConfigError: everything that is wrong at once, one line each.
    """
    file = YamlFile(Path("command line"), {}, {}) if config is None else read_yaml(config)
    return _load(BuildConfig, file, overrides)


def find_config(config: Path | str) -> Path:
    """The file behind a path or recipe name.

    Raises:
        ConfigError: neither exists, with the nearest recipe.
    """
    path = Path(config).expanduser()
    if path.is_file():
        return path
    recipes = sorted(p.stem for p in RECIPES.glob("*.yaml"))
    if str(config) in recipes:
        return RECIPES / f"{config}.yaml"
    raise ConfigError(
        f"--config — {str(config)!r} — must be a YAML file or the name of a shipped recipe"
        f" ({', '.join(recipes)}) — check the path{nearest(str(config), recipes)}"
    )


def _load(schema: type[_Config], file: YamlFile, overrides: list[str]) -> _Config:
    touched = apply_overrides(file.tree, overrides, schema)
    problems: list[ErrorDetails] = []
    config: _Config | None = None
    try:
        config = schema.model_validate(file.tree)
    except ValidationError as error:
        # Keys that are neither ours nor the file's come from merging a stage's data overrides: reported below.
        problems += [e for e in error.errors() if not e["loc"] or e["loc"][0] in {*file.tree, *schema.model_fields}]
    if schema is RunConfig:
        problems += _stage_data_problems(file.tree)
    if config is not None and not problems:
        return config
    lines = {_describe(problem, schema, file, touched): None for problem in problems}
    raise ConfigError("\n".join(lines))


def _stage_data_problems(tree: dict[str, Any]) -> Iterator[ErrorDetails]:
    """Check each stage's partial `data` section as if it were whole, and report it under the stage's key."""
    stages = tree.get("stages")
    base = tree.get("data")
    for index, stage in enumerate(cast(list[Any], stages) if isinstance(stages, list) else []):
        own = cast(dict[str, Any], stage).get("data") if isinstance(stage, dict) else None
        if not isinstance(own, dict):
            continue
        own = cast(dict[str, Any], own)
        merged = {"path": ".", **(cast(dict[str, Any], base) if isinstance(base, dict) else {}), **own}
        try:
            DataConfig.model_validate(merged)
        except ValidationError as error:
            for detail in error.errors():
                if detail["loc"] and detail["loc"][0] in own:
                    yield {**detail, "loc": ("stages", index, "data", *detail["loc"])}


def _describe(problem: ErrorDetails, schema: type[BaseModel], file: YamlFile, touched: set[Key]) -> str:
    """One line: "file:line: key — value — rule; fix"."""
    key = _real_key(problem["loc"], file.tree)
    prefixes = [key[:length] for length in range(len(key), 0, -1)]
    line = next((file.lines[prefix] for prefix in prefixes if prefix in file.lines), None)
    if any(prefix in touched for prefix in prefixes):
        where = "override"
    elif file.lines:
        where = f"{file.path}:{line}" if line else str(file.path)
    else:
        where = str(file.path)
    kind = problem["type"]
    head = f"{where}: {dotted(key)} — " if key else f"{where} — "
    if kind == "extra_forbidden":
        rule = replacement(key, problem["input"]) or f"unknown key{_key_suggestion(key, schema)}"
        return f"{head}{_shown(problem['input'])} — {rule}"
    if kind == "missing":
        return f"{head}missing — required key; add it to the file or pass {dotted(key)}=VALUE"
    rule = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if kind == "value_error" and (not key or isinstance(problem["input"], (dict, BaseModel))):
        return f"{head}{rule}"
    if kind == "literal_error" and isinstance(problem["input"], str):
        known = str(problem.get("ctx", {}).get("expected", "")).replace("'", "").replace(" or ", ", ").split(", ")
        rule += nearest(problem["input"], known)
    elif kind == "string_type" and isinstance(problem["input"], (int, float)):
        rule += "; put it in quotes"
    elif kind == "tuple_type":
        rule = "must be a list; write [a, b]"
    return f"{head}{_shown(problem['input'])} — {rule[:1].lower()}{rule[1:]}"


def _real_key(loc: Key, tree: dict[str, Any]) -> Key:
    """The part of pydantic's location that names keys; union branches in it ("function-before[…]") are dropped."""
    key: list[str | int] = []
    node: Any = tree
    for position, part in enumerate(loc):
        children: dict[str | int, Any] = {}
        if isinstance(node, dict):
            children = cast(dict[str | int, Any], node)
        elif isinstance(node, list):
            children = dict(enumerate(cast(list[Any], node)))
        if part in children:
            key.append(part)
            node = children[part]
        elif position == len(loc) - 1 and isinstance(part, str) and part.isidentifier():
            key.append(part)
    return tuple(key)


def _shown(value: Any) -> str:
    text = repr(str(value)) if isinstance(value, Path) else repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[: _MAX_VALUE_CHARS - 1]}…"


def _key_suggestion(key: Key, schema: type[BaseModel]) -> str:
    """The nearest key beside the unknown one, else the same name in another section, else the known keys."""
    section = _section_at(key[:-1], schema)
    name = str(key[-1])
    if close := nearest(name, section.model_fields):
        return close
    elsewhere = {path.rsplit(".", 1)[-1]: path for path in _all_keys(schema, "")}
    if name in elsewhere:
        return f"; did you mean {elsewhere[name]!r}?"
    return f"; known: {', '.join(section.model_fields)}"


def _section_at(key: Key, schema: type[BaseModel]) -> type[BaseModel]:
    section = schema
    for part in key:
        if isinstance(part, int):
            continue
        inner = PARTIAL_SECTIONS.get((section, part)) or _inner_section(section, part)
        section = inner or section
    return section


def _inner_section(section: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The section class inside a field such as `X`, `X | None` or `tuple[X, ...]`."""
    pending: list[Any] = [section.model_fields[name].annotation] if name in section.model_fields else []
    while pending:
        annotation = pending.pop()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
        pending += get_args(annotation)
    return None


def _all_keys(section: type[BaseModel], prefix: str) -> Iterator[str]:
    """Dotted keys of a schema; lists of sections appear as `stages.0`."""
    for name, field in section.model_fields.items():
        inner = _inner_section(section, name)
        if inner is None:
            yield f"{prefix}{name}"
        else:
            step = ".0" if "tuple" in str(field.annotation) else ""
            yield from _all_keys(inner, f"{prefix}{name}{step}.")
