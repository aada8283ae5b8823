"""Raw JSONL rows to conversations: `messages` (role/content) and `pairs` (prompt/response).

Files are split at newline bytes only, so U+2028 inside a string is content. A byte order mark, CRLF and blank lines are
accepted. In string content the exact placeholder `<image>` places the next entry of the row's `images`; in a list of
content parts an image part places it and text is literal. A row's `id` is accepted and not stored. Errors here don't
say where: the caller adds file:line.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lumina_ft.data.segments import Role
from lumina_ft.errors import DataError, nearest

Format = Literal["messages", "pairs"]
TASKS = ("text", "understand", "t2i")
PLACEHOLDER = "<image>"
ROLES = {"system": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}
COMMON_FIELDS = ("image", "images", "task", "id")
FIELDS: dict[Format, tuple[str, ...]] = {
    "messages": ("messages", *COMMON_FIELDS),
    "pairs": ("prompt", "response", "system", *COMMON_FIELDS),
}
_BOM = b"\xef\xbb\xbf"


class RawLine(NamedTuple):
    """One non-blank line: `file:line`, its number from 1, and its bytes without the line end."""

    source: str
    number: int
    data: bytes


@dataclass(frozen=True)
class ImageRef:
    """An image of the conversation, by the path that the row gives."""

    path: str


@dataclass(frozen=True)
class Turn:
    """One message: pieces of text and images in order."""

    role: Role
    parts: tuple[str | ImageRef, ...]

    @property
    def images(self) -> tuple[ImageRef, ...]:
        return tuple(part for part in self.parts if isinstance(part, ImageRef))


@dataclass(frozen=True)
class RawConversation:
    """A row in normal form.

    Attributes:
        task: text, understand or t2i.
        system: the row's own system prompt, None for the default.
        turns: user, assistant, user, …, assistant.
    """

    task: str
    system: str | None
    turns: tuple[Turn, ...]


class _Slot:
    """Stands for `<image>` until the row's images are dealt out."""


_Part = str | ImageRef | _Slot


def read_lines(path: Path) -> Iterator[RawLine]:
    """Non-blank lines of a JSONL file.

    Raises:
        DataError: the file can't be read.
    """
    try:
        with path.open("rb") as stream:
            for number, data in enumerate(stream, start=1):
                line = data.removeprefix(_BOM) if number == 1 else data
                line = line.rstrip(b"\r\n")
                if line.strip():
                    yield RawLine(f"{path}:{number}", number, line)
    except OSError as exc:
        raise DataError(f"input={path} — {exc.strerror} — must be a readable JSONL file — fix the path") from exc


def parse_row(data: bytes) -> dict[str, Any]:
    """Parse one line.

    Raises:
        DataError: not UTF-8, not JSON, a repeated key, or no object.
    """
    try:
        row = json.loads(data.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as exc:
        raise DataError(f"byte {exc.start} is {data[exc.start]:#04x} — must be UTF-8 — convert the file") from exc
    except json.JSONDecodeError as exc:
        raise DataError(f"broken JSON: {exc.msg} at column {exc.colno} — must be one JSON object — fix it") from exc
    except (RecursionError, ValueError) as exc:
        raise DataError(f"broken JSON: {exc} — must be one JSON object — fix it") from exc
    if not isinstance(row, dict):
        raise DataError(f"a JSON {_kind(row)} — must be one JSON object per line — wrap it")
    return row


def detect_format(path: Path) -> Format:
    """Format of a file by its first row that has `messages` or `prompt`.

    A file without any such row is called `pairs`; its rows are then refused one by one.
    """
    for line in read_lines(path):
        try:
            row = parse_row(line.data)
        except DataError:
            continue
        if "messages" in row:
            return "messages"
        if "prompt" in row:
            return "pairs"
    return "pairs"


def to_conversation(row: dict[str, Any], fmt: Format, task: str) -> RawConversation:
    """Normal form of a parsed row.

    Args:
        row: parsed line.
        fmt: its format.
        task: the build's task, or `auto` for the row's own `task` or what its media imply.

    Raises:
        DataError: unknown field or role, wrong type, turns out of order, placeholders that don't match the images, or a
            task that doesn't match the content.
    """
    for name in row:
        if name not in FIELDS[fmt]:
            known = FIELDS[fmt]
            raise DataError(f"field {name!r} — unknown in {fmt} rows{nearest(name, known)}; known: {', '.join(known)}")
    task = _row_task(row, task)
    images = _row_images(row)
    messages = _pair_messages(row, task, images) if fmt == "pairs" else _typed(row, "messages", list, "a list")
    turns = [_turn(message, f"messages[{number}]") for number, message in enumerate(messages)]
    system = None
    if turns and turns[0][0] is Role.SYSTEM:
        system = _system_text(turns.pop(0)[1])
    _check_order([role for role, _ in turns])
    placed = _deal(turns, images)
    return RawConversation(_check_task(placed, task), system, placed)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} occurs twice")
    return row


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _typed(row: dict[str, Any], key: str, kind: type, name: str) -> Any:
    if key not in row:
        raise DataError(f"field {key!r} — missing — must be {name} — add it")
    if not isinstance(row[key], kind):
        raise DataError(f"field {key!r} — {_short(row[key])} — must be {name}, not {_kind(row[key])}")
    return row[key]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else text[:59] + "…"


def _row_task(row: dict[str, Any], task: str) -> str:
    own = row.get("task")
    if own is None:
        return task
    if own not in TASKS:
        raise DataError(f"field 'task' — {_short(own)} — unknown{nearest(str(own), TASKS)}; known: {', '.join(TASKS)}")
    if task not in ("auto", own):
        raise DataError(f"field 'task' — {own} — contradicts task={task} of the build — remove one of them")
    return own


def _row_images(row: dict[str, Any]) -> list[str]:
    if row.get("image") is not None and row.get("images") is not None:
        raise DataError("fields 'image' and 'images' — both given — must be one of them — merge them into images")
    key = "image" if row.get("image") is not None else "images"
    value = row.get(key)
    if value is None:
        return []
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
        raise DataError(f"field {key!r} — {_short(value)} — must be a path or a list of paths")
    for path in paths:
        _check_local(path)
    return paths


def _check_local(path: str) -> None:
    if "://" in path or path.startswith("data:"):
        raise DataError(f"image {_short(path)} — a web address or inline data — must be a file — save it first")


def _pair_messages(row: dict[str, Any], task: str, images: list[str]) -> list[Any]:
    """The messages that a prompt/response row stands for. Without a response, the image is the answer."""
    messages = [{"role": "user", "content": _typed(row, "prompt", str, "a string")}]
    if row.get("system") is not None:
        messages.insert(0, {"role": "system", "content": _typed(row, "system", str, "a string")})
    response = row.get("response")
    # An empty response may be a mistake: it makes a t2i row only where the task says so.
    if images and ((response is None and task in ("auto", "t2i")) or (response == "" and task == "t2i")):
        response = PLACEHOLDER
    elif response is None:
        raise DataError("field 'response' — missing — must be a string; only a t2i row with an image needs none")
    else:
        response = _typed(row, "response", str, "a string")
    return [*messages, {"role": "assistant", "content": response}]


def _turn(message: Any, where: str) -> tuple[Role, list[_Part]]:
    if not isinstance(message, dict):
        raise DataError(f"{where} — {_short(message)} — must be an object with role and content")
    for name in message:
        if name not in ("role", "content"):
            raise DataError(f"{where}.{name} — unknown field{nearest(name, ('role', 'content'))}; known: role, content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        close = nearest(str(role), ROLES)
        raise DataError(f"{where}.role — {_short(role)} — unknown role{close}; known: {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, str):
        return ROLES[role], _split_placeholders(content)
    if not isinstance(content, list):
        raise DataError(f"{where}.content — {_short(content)} — must be a string or a list of parts")
    return ROLES[role], [_part(part, f"{where}.content[{number}]") for number, part in enumerate(content)]


def _split_placeholders(text: str) -> list[_Part]:
    pieces = text.split(PLACEHOLDER)
    parts: list[_Part] = [pieces[0]]
    for piece in pieces[1:]:
        parts += [_Slot(), piece]
    return [part for part in parts if part != ""]


def _part(part: Any, where: str) -> _Part:
    """One content part: text, or an image with its own path or (without one) the next of `images`."""
    if not isinstance(part, dict):
        raise DataError(f"{where} — {_short(part)} — must be an object with type")
    allowed = {"text": ("text",), "image": ("image", "path"), "image_url": ("image_url",)}
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in allowed:
        raise DataError(f"{where}.type — {_short(kind)} — unknown{nearest(str(kind), allowed)}; known: text, image")
    for name in part:
        if name != "type" and name not in allowed[kind]:
            raise DataError(f"{where}.{name} — unknown field of a {kind} part; known: {', '.join(allowed[kind])}")
    given = [part[name] for name in allowed[kind] if name in part]
    if kind == "image_url" and given and isinstance(given[0], dict):
        given = [given[0].get("url")]
    if kind == "image" and not given:
        return _Slot()
    if len(given) != 1 or not isinstance(given[0], str) or (kind != "text" and not given[0]):
        raise DataError(f"{where} — {_short(part)} — must hold one string {' or '.join(allowed[kind])}")
    if kind == "text":
        return given[0]
    _check_local(given[0])
    return ImageRef(given[0])


def _system_text(parts: list[_Part]) -> str:
    text = [part for part in parts if isinstance(part, str)]
    if len(text) < len(parts):
        raise DataError("system message — holds an image — must be text — move the image to a user message")
    return "".join(text)


def _check_order(roles: list[Role]) -> None:
    expected = [Role.ASSISTANT if number % 2 else Role.USER for number in range(len(roles))]
    if roles != expected or len(roles) < 2 or len(roles) % 2:
        found = ", ".join(role.name.lower() for role in roles) or "nothing"
        raise DataError(
            f"messages — {found} — must be user, assistant, user, …, assistant after at most one system message"
        )


def _deal(turns: list[tuple[Role, list[_Part]]], images: list[str]) -> tuple[Turn, ...]:
    """Put the row's images where the placeholders are; without any, before the first user text (spec §2)."""
    slots = sum(isinstance(part, _Slot) for _, parts in turns for part in parts)
    placed = any(isinstance(part, ImageRef) for _, parts in turns for part in parts)
    if images and not slots and not placed:
        text = turns[0][1]
        turns[0] = (turns[0][0], _prepended(len(images), text))
        slots = len(images)
    if slots != len(images):
        raise DataError(
            f"images — {len(images)} given for {slots} {PLACEHOLDER} placeholders — the counts must match — add or "
            "remove one"
        )
    queue = iter(images)
    return tuple(
        Turn(role, tuple(ImageRef(next(queue)) if isinstance(part, _Slot) else part for part in parts if part != ""))
        for role, parts in turns
    )


def _prepended(count: int, text: list[_Part]) -> list[_Part]:
    """`count` placeholders joined by newlines to a non-empty text."""
    parts: list[_Part] = [_Slot()]
    for _ in range(count - 1):
        parts += ["\n", _Slot()]
    return [*parts, "\n", *text] if text else parts


def _check_task(turns: tuple[Turn, ...], task: str) -> str:
    """Compare the task with the content, or derive it."""
    prompt_images = sum(len(turn.images) for turn in turns[::2])
    answers = turns[1::2]
    image_answers = [turn for turn in answers if turn.images]
    for number, turn in enumerate(turns):
        if turn.role is Role.ASSISTANT and (not turn.parts or (turn.images and len(turn.parts) > 1)):
            found = "empty" if not turn.parts else "mixes text and images or holds several"
            raise DataError(f"answer {number // 2} — {found} — must be text or exactly one image")
        if turn.role is Role.USER and not turn.parts:
            raise DataError(f"user message {number // 2} — empty — must hold text or an image")
    if image_answers and prompt_images:
        raise DataError("images — in a prompt and in an answer — image editing can't be built from this format yet")
    found = "t2i" if answers[-1].images else "understand" if prompt_images else "text"
    if image_answers and found != "t2i":
        raise DataError("images — in an earlier answer only — the last answer of a t2i row must be the image")
    if task not in ("auto", found):
        rule = {"text": "no image", "understand": "an image in a prompt and text answers", "t2i": "an image as answer"}
        raise DataError(f"task {task} — the row looks like {found} — must have {rule[task]}")
    return found
