"""YAML 1.2 in and out, with the line of every key.

YAML 1.2 is what people expect of a config: `no`, `on` and `12:30` are strings, `1e-5` is a number. Dates stay strings
too; no field of ours is one.
"""

import os
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel
from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, SequenceNode
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from lumina_ft.errors import ConfigError

Key = tuple[str | int, ...]
"""Path of a value in a config tree: names of sections and indices of lists."""


class _Constructor(SafeConstructor):
    """The safe constructor, with dates left as the text that was written."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", _Constructor.construct_yaml_str)  # pyright: ignore


@dataclass(frozen=True)
class YamlFile:
    """A parsed config file: its tree, and the 1-based line of each key in it."""

    path: Path
    tree: dict[str, Any]
    lines: dict[Key, int]


def read_yaml(path: Path) -> YamlFile:
    """Read one config file.

    Raises:
        ConfigError: unreadable, not YAML, a key given twice, or not a mapping at the top; with file:line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} — byte {error.start} — must be UTF-8 text — save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path} — {error.strerror} — must be a readable YAML file — check the path") from None
    try:
        tree = parse_yaml(text)
        node = YAML(typ="safe", pure=True).compose(text)  # pyright: ignore
    except MarkedYAMLError as error:
        mark = cast(Any, error.problem_mark or error.context_mark)  # pyright: ignore
        line = int(mark.line) + 1 if mark is not None else 1
        problem = " ".join(str(error.problem or error.context).split())  # pyright: ignore
        raise ConfigError(f"{path}:{line} — {problem} — must be valid YAML 1.2 — check quotes and indent") from None
    except (YAMLError, ValueError) as error:
        raise ConfigError(f"{path} — {' '.join(str(error).split())} — must be valid YAML 1.2 — fix the file") from None
    if tree is None:
        raise ConfigError(f"{path} — empty — must hold the keys of a config — fill it, or pass key=value overrides")
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}:1 — {type(tree).__name__} — must be a mapping at the top — write `key: value` lines")
    lines: dict[Key, int] = {}
    _collect_lines(node, (), lines, set())
    return YamlFile(path, cast(dict[str, Any], tree), lines)


def parse_yaml(text: str) -> Any:
    """Parse YAML text into plain Python values."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    return yaml.load(text)  # pyright: ignore


def parse_yaml_strings(text: str) -> Any:
    """Parse YAML text in which every scalar stays the string that was written."""
    return YAML(typ="base", pure=True).load(text)  # pyright: ignore


def _collect_lines(node: Any, key: Key, lines: dict[Key, int], seen: set[int]) -> None:
    # An anchored node is visited once; its aliases take the line of the key that holds them.
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, MappingNode):
        for name_node, value_node in cast(list[tuple[Any, Any]], node.value):  # pyright: ignore
            child = (*key, str(name_node.value))
            lines[child] = int(name_node.start_mark.line) + 1
            _collect_lines(value_node, child, lines, seen)
    elif isinstance(node, SequenceNode):
        for index, value_node in enumerate(cast(list[Any], node.value)):  # pyright: ignore
            child = (*key, index)
            lines[child] = int(value_node.start_mark.line) + 1
            _collect_lines(value_node, child, lines, seen)


def dump_yaml(config: BaseModel, path: Path) -> None:
    """Write the resolved config, all defaults included, so that reading it gives an equal config.

    The file appears whole or not at all, also where the machine loses power: without it, no run can be resumed.
    """
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 2**20  # folded strings would not all read back equal
    text = StringIO()
    yaml.dump(_quoted(config.model_dump(mode="json")), text)  # pyright: ignore
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text.getvalue())
        file.flush()
        # Else some file systems have the new name on disk before the content.
        os.fsync(file.fileno())
    os.replace(aside, path)


def _quoted(value: Any) -> Any:
    """Strings with control characters or exotic line breaks in double quotes, where they are written as escapes."""
    if isinstance(value, dict):
        return {_quoted(name): _quoted(item) for name, item in cast(dict[Any, Any], value).items()}
    if isinstance(value, list):
        return [_quoted(item) for item in cast(list[Any], value)]
    if isinstance(value, str) and not value.isprintable():
        return DoubleQuotedScalarString(value)
    return value
