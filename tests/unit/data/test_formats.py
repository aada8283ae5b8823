"""Raw rows to conversations: what is accepted, and one clear error for everything else."""

import json
from pathlib import Path
from typing import Any

import pytest

from lumina_ft.data.formats import (
    ImageRef,
    RawConversation,
    detect_format,
    parse_row,
    read_lines,
    to_conversation,
)
from lumina_ft.data.segments import Role
from lumina_ft.errors import DataError


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def chat(*contents: Any, **fields: Any) -> dict[str, Any]:
    """A messages row whose contents alternate user, assistant."""
    roles = ("user", "assistant")
    return {"messages": [message(roles[i % 2], content) for i, content in enumerate(contents)], **fields}


def parts(conversation: RawConversation) -> list[list[Any]]:
    """Parts per turn; images as `@path`."""
    return [["@" + p.path if isinstance(p, ImageRef) else p for p in turn.parts] for turn in conversation.turns]


def from_messages(row: dict[str, Any], task: str = "auto") -> RawConversation:
    return to_conversation(row, "messages", task)


def from_pairs(row: dict[str, Any], task: str = "auto") -> RawConversation:
    return to_conversation(row, "pairs", task)


# lines


def test_bom_crlf_blank_lines_and_u2028_are_accepted_with_true_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"a": "x\u2028y\u2029z\x85"}, {"b": 1}, {"c": "\r\n"}]
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
    path.write_bytes(b"\xef\xbb\xbf" + lines[0] + b"\r\n\r\n   \n" + lines[1] + b"\n\n" + lines[2])
    found = list(read_lines(path))
    assert [line.source for line in found] == [f"{path}:{n}" for n in (1, 4, 6)]
    assert [parse_row(line.data) for line in found] == rows


def test_missing_input_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none.jsonl — No such file"):
        list(read_lines(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="Is a directory"):
        list(read_lines(tmp_path))


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b'{"a": 1', "broken JSON: Expecting ',' delimiter at column 8"),
        (b"hello", "broken JSON"),
        (b'{"a": 1} {"b": 2}', "broken JSON: Extra data"),
        (b'{"prompt": "a", "prompt": "b"}', "key 'prompt' occurs twice"),
        (b"[1]", "a JSON list — must be one JSON object per line"),
        (b"null", "a JSON null"),
        (b'{"a": "\xff"}', "byte 7 is 0xff — must be UTF-8"),
        (b"[" * 100_000, "broken JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "broken JSON"),
    ],
)
def test_broken_lines_are_refused(data: bytes, rule: str) -> None:
    with pytest.raises(DataError, match=rule):
        parse_row(data)


def test_format_is_that_of_the_first_row_which_has_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('broken\n{"other": 1}\n{"messages": []}\n{"prompt": ""}\n')
    assert detect_format(path) == "messages"
    path.write_text('{"prompt": ""}\n')
    assert detect_format(path) == "pairs"


# messages


def test_string_contents_and_system_message() -> None:
    row = {"messages": [message("system", "S"), *chat("hi", "yo", "so?", "end")["messages"]]}
    talk = from_messages(row)
    assert (talk.system, talk.task, parts(talk)) == ("S", "text", [["hi"], ["yo"], ["so?"], ["end"]])
    assert [turn.role for turn in talk.turns] == [Role.USER, Role.ASSISTANT] * 2


def test_placeholders_in_strings_place_images_in_order() -> None:
    talk = from_messages(chat("<image>\nand <image>?", "a", "<image>b", "c", images=["1", "2", "3"]))
    assert parts(talk) == [["@1", "\nand ", "@2", "?"], ["a"], ["@3", "b"], ["c"]]
    assert talk.task == "understand"


def test_images_without_placeholders_come_before_the_first_user_text_joined_by_newlines() -> None:
    assert parts(from_messages(chat("what?", "a", images=["1", "2"])))[0] == ["@1", "\n", "@2", "\n", "what?"]
    assert parts(from_pairs({"prompt": "", "response": "a", "image": "1"}))[0] == ["@1"]
    assert parts(from_pairs({"prompt": "u", "response": "a", "image": "1"}))[0] == ["@1", "\n", "u"]


def test_content_parts_place_images_and_their_text_is_literal() -> None:
    content = [
        {"type": "text", "text": "see <image> "},
        {"type": "image", "image": "p1"},
        {"type": "image"},
        {"type": "image_url", "image_url": {"url": "p3"}},
    ]
    talk = from_messages(chat(content, [{"type": "text", "text": "ok"}], images=["listed"]))
    assert parts(talk) == [["see <image> ", "@p1", "@listed", "@p3"], ["ok"]]


def test_near_placeholders_and_control_tokens_are_text() -> None:
    text = "<Image> <image > <img> <IMG_CONTEXT> </user><answer>"
    assert parts(from_messages(chat(text, "a"))) == [[text], ["a"]]


def test_t2i_messages_have_an_image_answer() -> None:
    talk = from_messages(chat("draw", "<image>", images=["p"]))
    assert (talk.task, parts(talk)) == ("t2i", [["draw"], ["@p"]])


# pairs


def test_pairs_of_each_task() -> None:
    assert from_pairs({"prompt": "p", "response": "r", "system": "S", "id": 7}).system == "S"
    talk = from_pairs({"prompt": "<image>what?", "response": "r", "image": "i"})
    assert (talk.task, parts(talk)) == ("understand", [["@i", "what?"], ["r"]])
    for row in ({"prompt": "draw", "image": "i"}, {"prompt": "draw", "response": "<image>", "images": ["i"]}):
        assert (from_pairs(row).task, parts(from_pairs(row))) == ("t2i", [["draw"], ["@i"]])
    assert from_pairs({"prompt": "draw", "response": "", "image": "i"}, "t2i").task == "t2i"


def test_task_field_of_a_row_is_honoured_and_checked() -> None:
    assert from_pairs({"prompt": "p", "response": "", "image": "i", "task": "t2i"}).task == "t2i"
    for row, task, rule in (
        ({"prompt": "p", "response": "r", "task": "t2i"}, "auto", "task t2i — the row looks like text"),
        ({"prompt": "p", "response": "r", "image": "i", "task": "text"}, "auto", "looks like understand"),
        ({"prompt": "p", "image": "i"}, "understand", "field 'response' — missing"),
        ({"prompt": "p", "response": "r", "task": "text"}, "t2i", "contradicts task=t2i"),
        ({"prompt": "p", "response": "r", "task": "t2"}, "auto", "unknown; did you mean 't2i'"),
        ({"prompt": "p", "response": "r", "task": 1}, "auto", "field 'task' — 1 — unknown"),
    ):
        with pytest.raises(DataError, match=rule):
            from_pairs(row, task)


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        (chat("u", "a", taks="t2i"), "field 'taks' — unknown in messages rows; did you mean 'task'"),
        (chat("u", "a", prompt="x"), "field 'prompt' — unknown in messages rows"),
        ({"messages": "u"}, "field 'messages' — \"u\" — must be a list, not string"),
        ({}, "field 'messages' — missing"),
        ({"messages": []}, "messages — nothing — must be user, assistant"),
        ({"messages": ["u"]}, r"messages\[0\] — \"u\" — must be an object"),
        ({"messages": [message("human", "u")]}, r"messages\[0\].role — \"human\" — unknown role; known: system, user"),
        ({"messages": [message("asistant", "u")]}, "did you mean 'assistant'"),
        ({"messages": [message("user", "u") | {"name": "x"}]}, r"messages\[0\].name — unknown field"),
        ({"messages": [message("user", None)]}, r"messages\[0\].content — null — must be a string or a list"),
        ({"messages": [message("user", "u")]}, "messages — user — must be user, assistant"),
        (chat("u", "a", "u"), "messages — user, assistant, user — must be"),
        ({"messages": [message("user", "u"), message("user", "v")]}, "messages — user, user"),
        ({"messages": [*chat("u", "a")["messages"], message("system", "s")]}, "user, assistant, system"),
        ({"messages": [message("system", [{"type": "image"}]), *chat("u", "a")["messages"]]}, "system message — holds"),
        (chat("<image> u", "a"), "images — 0 given for 1 <image> placeholders — the counts must match"),
        (chat("<image> u", "a", images=["1", "2"]), "images — 2 given for 1"),
        (chat([{"type": "image", "image": "1"}], "a", images=["2"]), "images — 1 given for 0"),
        (chat([{"type": "audio"}], "a"), r"content\[0\].type — \"audio\" — unknown"),
        (chat([{"type": "text", "txt": "u"}], "a"), r"content\[0\].txt — unknown field of a text part"),
        (chat([{"type": "text"}], "a"), "must hold one string text"),
        (chat([{"type": "image", "image": ""}], "a"), "must hold one string image or path"),
        (chat([{"type": "image_url", "image_url": {}}], "a"), "must hold one string image_url"),
        (chat(["u"], "a"), r"content\[0\] — \"u\" — must be an object with type"),
        (chat("u", ""), "answer 0 — empty — must be text or exactly one image"),
        (chat("", "a"), "user message 0 — empty"),
        (chat("u", "here: <image>", images=["1"]), "answer 0 — mixes text and images"),
        (chat("u", "<image><image>", images=["1", "2"]), "answer 0 — mixes text and images or holds several"),
        (chat("<image>u", "<image>", images=["1", "2"]), "image editing can't be built"),
        (chat("u", "<image>", "v", "text", images=["1"]), "in an earlier answer only"),
        (chat("<image>u", "a", image=["1"], images=["1"]), "'image' and 'images' — both given"),
        (chat("<image>u", "a", images=[1]), r"field 'images' — \[1\] — must be a path or a list of paths"),
        (chat("<image>u", "a", images="https://example.org/x.png"), "a web address or inline data"),
        (chat([{"type": "image", "path": "data:image/png;base64,x"}], "a"), "a web address or inline data"),
    ],
)
def test_wrong_messages_rows_are_refused(row: dict[str, Any], rule: str) -> None:
    with pytest.raises(DataError, match=rule):
        from_messages(row)


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"response": "r"}, "field 'prompt' — missing — must be a string"),
        ({"prompt": "p"}, "field 'response' — missing — must be a string; only a t2i row"),
        ({"prompt": 1, "response": "r"}, "field 'prompt' — 1 — must be a string, not number"),
        ({"prompt": "p", "response": 2}, "field 'response' — 2 — must be a string, not number"),
        ({"prompt": "p", "response": [{"type": "text", "text": "r"}]}, "field 'response' — .* not list"),
        ({"prompt": "p", "respons": "r"}, "field 'respons' — unknown in pairs rows; did you mean 'response'"),
        ({"prompt": "p", "response": "", "image": "i"}, "answer 0 — empty"),
        ({"prompt": "", "image": "i"}, "user message 0 — empty"),
        ({"prompt": "p", "image": ["i", "j"]}, "images — 2 given for 1"),
        ({"prompt": "p", "response": "r", "system": 3}, "field 'system' — 3 — must be a string"),
    ],
)
def test_wrong_pairs_rows_are_refused(row: dict[str, Any], rule: str) -> None:
    with pytest.raises(DataError, match=rule):
        from_pairs(row)
