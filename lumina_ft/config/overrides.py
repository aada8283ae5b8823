"""`key=value` overrides from the command line, typed by the schema.

`optim.lr=1e-4` is a number because the schema says so; `system_prompts.t2i=draw: a seven` stays the string that was
typed. `stages.0.lr`, or `stages.heads.lr` by name, reaches into the list of stages; `~key` removes a key.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel
from ruamel.yaml.error import YAMLError

from lumina_ft.config.data_schema import CodecConfig
from lumina_ft.config.replaced import replacement
from lumina_ft.config.schema import DataConfig, StageConfig
from lumina_ft.config.yaml_file import Key, parse_yaml, parse_yaml_strings
from lumina_ft.errors import ConfigError, nearest

Node = dict[str, Any] | list[Any]

PARTIAL_SECTIONS: Mapping[tuple[type[BaseModel], str], type[BaseModel]] = {(StageConfig, "data"): DataConfig}
"""Fields declared as free mappings that hold a part of another section."""

SHORTHANDS: Mapping[type[BaseModel], str] = {CodecConfig: "kind"}
"""Sections that may be written as one string: the field that the string means."""


def apply_overrides(tree: dict[str, Any], overrides: list[str], schema: type[BaseModel]) -> set[Key]:
    """Apply overrides in order to a config tree, in place.

    Args:
        tree: plain mappings and lists, as read from YAML.
        overrides: `key=value` or `~key`.
        schema: the config class at the root of the tree.

    Returns:
        The keys that were set, so that messages can say where a value came from.

    Raises:
        ConfigError: every unusable override, one per line.
    """
    touched: set[Key] = set()
    problems: list[str] = []
    for text in overrides:
        try:
            touched.add(_apply_one(tree, text, schema))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return touched


def _apply_one(tree: dict[str, Any], text: str, schema: type[BaseModel]) -> Key:
    remove = text.startswith("~")
    name, equals, value = text.removeprefix("~").partition("=")
    if remove == bool(equals) or not name or any(not part for part in name.split(".")):
        raise ConfigError(f"{text} — override — must be key=value or ~key with a dotted key — e.g. optim.lr=1e-4")
    cursor = _Cursor(tree, schema, (), text)
    parts = name.split(".")
    for part in parts[:-1]:
        cursor = cursor.step(part)
    if remove:
        return cursor.remove(parts[-1])
    return cursor.assign(parts[-1], value)


@dataclass(frozen=True)
class _Cursor:
    """A container in the tree together with what the schema says about it."""

    node: Node
    annotation: Any
    key: Key
    override: str

    def step(self, part: str) -> "_Cursor":
        """Go into the container called `part`, creating it when the tree doesn't hold it yet."""
        slot, annotation = self._locate(part)
        inner = _container(annotation)
        if inner is None:
            raise self._refuse(slot, "has no keys below it")
        child = self._children().get(slot)
        if child is None:
            child = cast(Node, inner())
            self._put(slot, child)
        shorthand = next((SHORTHANDS[a] for a in _flatten(annotation) if a in SHORTHANDS), None)
        if isinstance(child, str) and shorthand:
            child = {shorthand: child}
            self._put(slot, child)
        if not isinstance(child, (dict, list)):
            raise self._refuse(slot, f"is {child!r}, not a section")
        return _Cursor(cast(Node, child), annotation, (*self.key, slot), self.override)

    def assign(self, part: str, text: str) -> Key:
        slot, annotation = self._locate(part)
        try:
            value = typed_value(text, annotation)
        except YAMLError as error:
            reason = " ".join(str(error).split())
            raise self._refuse(slot, f"must be valid YAML ({reason}); quote the whole override") from None
        self._put(slot, value)
        return (*self.key, slot)

    def remove(self, part: str) -> Key:
        slot, _ = self._locate(part)
        if slot not in self._children():
            raise self._refuse(slot, "isn't set, so it can't be removed")
        if isinstance(self.node, list):
            self.node.pop(cast(int, slot))
        else:
            self.node.pop(cast(str, slot))
        return (*self.key, slot)

    def _children(self) -> dict[str | int, Any]:
        if isinstance(self.node, list):
            return dict(enumerate(self.node))
        return cast(dict[str | int, Any], self.node)

    def _put(self, slot: str | int, value: Any) -> None:
        if not isinstance(self.node, list):
            self.node[cast(str, slot)] = value
        elif slot == len(self.node):
            self.node.append(value)
        else:
            self.node[cast(int, slot)] = value

    def _locate(self, part: str) -> tuple[str | int, Any]:
        """Slot of `part` in this container and the annotation of what it holds."""
        if isinstance(self.node, list):
            return _list_index(self.node, part, self._refuse), _element(self.annotation)
        section = _section(self.annotation)
        if section is None:
            return part, _mapped(self.annotation)
        if part not in section.model_fields:
            fix = nearest(part, section.model_fields) or f"; known: {', '.join(section.model_fields)}"
            old = replacement((*self.key, part), self.override.partition("=")[2])
            raise self._refuse(part, old or f"unknown key{fix}")
        return part, PARTIAL_SECTIONS.get((section, part)) or section.model_fields[part].annotation

    def _refuse(self, slot: str | int, rule: str) -> ConfigError:
        return ConfigError(f"{dotted((*self.key, slot))} — override {self.override!r} — {rule}")


def _list_index(items: list[Any], part: str, refuse: Callable[[str, str], ConfigError]) -> int:
    """Index of an element given by number, by its `name`, or one past the end to append."""
    names = [cast(dict[str, Any], item).get("name") if isinstance(item, dict) else None for item in items]
    if part in names:
        return names.index(part)
    if part.isdecimal() and int(part) <= len(items):
        return int(part)
    known = ", ".join(str(name) for name in names if name is not None)
    raise refuse(part, f"must be an index 0…{len(items)}" + (f" or a name of: {known}" if known else ""))


def dotted(key: Key) -> str:
    """`("stages", 0, "lr")` as `stages.0.lr`."""
    return ".".join(str(part) for part in key)


def typed_value(text: str, annotation: Any) -> Any:
    """Read the text of an override as the schema's type wants it.

    Text and paths are taken literally; a list may be written as `[a, b]` or, for one element, as `a`. Everything else
    is YAML, checked afterwards by the schema.
    """
    kinds = _flatten(annotation)
    optional = type(None) in kinds
    if optional and text in ("null", ""):
        return None
    if any(_is_text(kind) for kind in kinds) and not any(_is_list(kind) for kind in kinds):
        return text
    lists = [kind for kind in kinds if _is_list(kind)]
    if lists:
        texts = any(_is_text(element) for element in _flatten(_element(lists[0])))
        bracketed = text.lstrip().startswith("[")
        parsed = parse_yaml_strings(text) if texts and bracketed else text if texts else parse_yaml(text)
        return cast(list[Any], parsed) if isinstance(parsed, list) else [parsed]
    return parse_yaml(text)


def _flatten(annotation: Any) -> list[Any]:
    """The alternatives of an annotation, with Annotated and unions taken apart."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _flatten(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [kind for argument in get_args(annotation) for kind in _flatten(argument)]
    return [annotation]


def _is_text(kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return all(isinstance(value, str) for value in get_args(kind))
    return kind is str or (isinstance(kind, type) and issubclass(kind, Path))


def _is_list(kind: Any) -> bool:
    return get_origin(kind) in (tuple, list)


def _section(annotation: Any) -> type[BaseModel] | None:
    kinds = (kind for kind in _flatten(annotation) if isinstance(kind, type) and get_origin(kind) is None)
    return next((kind for kind in kinds if issubclass(kind, BaseModel)), None)


def _container(annotation: Any) -> type | None:
    """list, dict, or None for a leaf."""
    if any(_is_list(kind) for kind in _flatten(annotation)):
        return list
    if _section(annotation) or any(get_origin(kind) is dict or kind is Any for kind in _flatten(annotation)):
        return dict
    return None


def _element(annotation: Any) -> Any:
    """Type of the elements of `tuple[X, ...]` or `list[X]`."""
    lists = [kind for kind in _flatten(annotation) if _is_list(kind)]
    return get_args(lists[0])[0] if lists else Any


def _mapped(annotation: Any) -> Any:
    """Type of the values of `dict[str, X]`; Any when the schema leaves it open."""
    dicts = [kind for kind in _flatten(annotation) if get_origin(kind) is dict]
    return get_args(dicts[0])[1] if dicts else Any
