"""`data build` (D6, T13): rows in, dataset out; after an error nothing is left behind."""

import io
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lumina_ft.config.data_schema import BuildConfig
from lumina_ft.data.build import QUARANTINE_FILE, build
from lumina_ft.data.codecs import load_codec
from lumina_ft.data.layout import layout_sample
from lumina_ft.data.prompts import SYSTEM_PROMPTS
from lumina_ft.data.segments import Kind, Role, Sample
from lumina_ft.data.shards import open_dataset
from lumina_ft.data.token_spec import demo_spec
from lumina_ft.data.tokenizer import copy_tokenizer, load_tokenizer
from lumina_ft.errors import ConfigError, DataError
from lumina_ft.tokens import control_ids

GRAY = {"channels": "gray"}
TEXT_ROW = {"prompt": "what comes after six?", "response": "seven"}
ASK_ROW = {"messages": [{"role": "user", "content": "<image>\nwhich digit?"}, {"role": "assistant", "content": "two"}]}
DRAW_ROW = {"prompt": "draw a two", "image": "a.png"}


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A directory with three pictures."""
    directory = tmp_path / "raw"
    directory.mkdir()
    rng = np.random.default_rng(0)
    for name in "abc":
        Image.fromarray(rng.integers(0, 256, (8, 8)).astype(np.uint8)).save(directory / f"{name}.png")
    return directory


def rows_file(directory: Path, *rows: Any, name: str = "rows.jsonl") -> Path:
    """Write rows; a string is a raw line."""
    path = directory / name
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


def run(raw: Path, *rows: Any, **keys: Any) -> tuple[dict[str, Any], Path]:
    """Build the rows into `out` beside the raw directory."""
    output = raw.parent / "out"
    config = {"output": output, "codec": GRAY} | keys
    if "input" not in keys:
        config["input"] = rows_file(raw, *rows)
    return build(BuildConfig.model_validate(config)), Path(config["output"])


def entries(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def described(sample: Sample) -> list[tuple[str, int, str, Any]]:
    """Role, turn, kind, and decoded text or grid shape per segment."""
    demo = load_tokenizer("demo")
    return [
        (
            s.role.name.lower(),
            s.turn,
            s.kind.name.lower(),
            demo.decode(s.text_ids) if s.kind is Kind.TEXT else (s.shape, s.codes.shape),
        )
        for s in sample.segments
    ]


# what a build makes


def test_each_task_becomes_segments_with_its_published_system_prompt(raw: Path) -> None:
    summary, output = run(raw, TEXT_ROW, DRAW_ROW, {"prompt": "read", "response": "two", "image": "b.png"})
    reader = open_dataset(output)
    grid = ((2, 2), (4, 8))
    assert [described(reader[i]) for i in range(3)] == [
        [
            ("system", 0, "text", SYSTEM_PROMPTS["text"]),
            ("user", 0, "text", TEXT_ROW["prompt"]),
            ("assistant", 1, "text", "seven"),
        ],
        [
            ("system", 0, "text", SYSTEM_PROMPTS["t2i"]),
            ("user", 0, "text", "draw a two"),
            ("assistant", 1, "image", grid),
        ],
        [
            ("system", 0, "text", SYSTEM_PROMPTS["understand"]),
            ("user", 0, "image", grid),
            ("user", 0, "text", "\nread"),
            ("assistant", 1, "text", "two"),
        ],
    ]
    assert [reader[i].task for i in range(3)] == ["text", "t2i", "understand"]
    assert [reader[i].source for i in range(3)] == [f"rows.jsonl:{n}" for n in (1, 2, 3)]
    assert summary["tasks"] == {"t2i": 1, "text": 1, "understand": 1} and summary["samples"] == 3
    assert (summary["images"], summary["truncated_images"], summary["quarantined"]) == (2, 0, 0)
    lengths = [
        len(layout_sample(reader[i], demo_spec(), block_tokens=32, answer_tail="eoa", drop_condition=False))
        for i in range(3)
    ]
    assert summary["tokens"] == sum(lengths) and summary["longest_sample"] == max(lengths)
    assert summary["packing"] == {
        "method": "best_fit",
        "max_tokens": 8192,
        "packs": 1,
        "token_use": round(sum(lengths) / 8192, 6),
    }
    assert json.loads(json.dumps(summary)) == summary


def test_dataset_carries_ids_tokenizer_codec_and_prompts(raw: Path) -> None:
    _, output = run(raw, DRAW_ROW, system_prompts={"t2i": "Paint."})
    meta = open_dataset(output).meta
    codec = load_codec(output)
    assert meta.spec == demo_spec() and meta.system_prompts == {"t2i": "Paint."}
    assert meta.codec == {"kind": "pq", "identity": codec.identity}
    assert load_tokenizer(output / "tokenizer").identity == meta.tokenizer_identity == load_tokenizer("demo").identity
    grid = codec.read(raw / "a.png")
    assert np.array_equal(open_dataset(output)[0].segments[-1].codes, grid.codes)


def test_text_only_build_has_no_codec_and_own_system_prompt_wins(raw: Path) -> None:
    summary, output = run(raw, TEXT_ROW | {"system": "Be brief."})
    assert open_dataset(output).meta.codec is None and summary["codec"] is None
    assert entries(output) == {"dataset.json", "shards", "tokenizer"}
    assert described(open_dataset(output)[0])[0] == ("system", 0, "text", "Be brief.")


def test_multi_turn_messages_keep_turn_numbers(raw: Path) -> None:
    contents = ["<image>which digit?", "two", "sure?", "yes", "draw it", "<image>"]
    roles = ["user", "assistant"] * 3
    messages = [{"role": r, "content": c} for r, c in zip(roles[:4], contents[:4], strict=True)]
    _, output = run(raw, {"messages": messages, "images": ["a.png"]})
    assert [(s.role, s.turn) for s in open_dataset(output)[0].segments] == [
        (Role.SYSTEM, 0),
        (Role.USER, 0),
        (Role.USER, 0),
        (Role.ASSISTANT, 1),
        (Role.USER, 2),
        (Role.ASSISTANT, 3),
    ]


def test_control_tokens_typed_in_any_field_stay_text(raw: Path) -> None:
    typed = "</user><answer><|mask|><BOI></answer> é\u2028"
    _, output = run(raw, {"prompt": typed, "response": typed, "system": typed})
    sample = open_dataset(output)[0]
    for segment in sample.segments:
        assert not control_ids(demo_spec().text) & set(segment.text_ids.tolist())
        assert load_tokenizer("demo").decode(segment.text_ids) == typed


def test_bom_crlf_blank_lines_and_u2028_are_accepted(raw: Path) -> None:
    row = json.dumps({"prompt": "a\u2028b", "response": "c"}, ensure_ascii=False).encode()
    (raw / "odd.jsonl").write_bytes(b"\xef\xbb\xbf" + row + b"\r\n\r\n \n" + row)
    summary, output = run(raw, input=raw / "odd.jsonl")
    assert summary["samples"] == 2 and open_dataset(output)[1].source == "odd.jsonl:4"
    assert described(open_dataset(output)[0])[1][3] == "a\u2028b"


def test_format_auto_reads_the_first_row_of_each_file_and_says_so(raw: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = [
        rows_file(raw, TEXT_ROW, name="p.jsonl"),
        rows_file(raw, ASK_ROW | {"images": ["a.png"]}, name="m.jsonl"),
    ]
    with caplog.at_level(logging.INFO):
        summary, _ = run(raw, input=files)
    assert summary["formats"] == {str(files[0]): "pairs", str(files[1]): "messages"}
    assert f"{files[1]}: format messages" in caplog.text
    with pytest.raises(DataError, match=r"p.jsonl:1 — field 'prompt' — unknown in messages rows"):
        run(raw, input=files, format="messages", output=raw.parent / "other")


def test_media_dir_replaces_the_input_directory(raw: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "lists"
    elsewhere.mkdir()
    path = rows_file(elsewhere, DRAW_ROW)
    with pytest.raises(DataError, match=rf"rows.jsonl:1 — image {elsewhere}/a.png — no such file"):
        run(raw, input=path)
    summary, _ = run(raw, input=path, media_dir=raw)
    assert summary["images"] == 1


def test_equal_input_gives_equal_bytes_for_any_place_and_number_of_workers(raw: Path, tmp_path: Path) -> None:
    """Also quarantine and truncated-image counts agree."""
    whole = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)).save(whole, "JPEG")
    results = []
    for place, workers in (("one", 1), ("two", 1), ("three", 2)):
        home = tmp_path / place
        home.mkdir()
        for image in raw.glob("*.png"):
            (home / image.name).write_bytes(image.read_bytes())
        (home / "cut.jpg").write_bytes(whole.getvalue()[:2500])
        rows: list[Any] = []
        for number in range(150):
            rows.append({"prompt": f"draw {number}", "image": ("a.png", "b.png", "cut.jpg")[number % 3]})
        rows[70] = "{broken"
        output = home / "out"
        config = BuildConfig(
            input=(rows_file(home, *rows),),
            output=output,
            workers=workers,
            on_bad_row="quarantine",
            codec={"channels": "gray"},  # pyright: ignore[reportArgumentType]
        )
        seen: list[tuple[int, int]] = []
        summary = build(config, lambda done, total, seen=seen: seen.append((done, total)))
        assert seen[-1] == (150, 150)
        files = {
            str(path.relative_to(output)): path.read_bytes()
            for path in sorted(output.rglob("*"))
            if path.is_file() and path.name != QUARANTINE_FILE
        }
        quarantine = [json.loads(line)["reason"].replace(str(home), "") for line in (output / QUARANTINE_FILE).open()]
        drop = {"output", "formats"}
        results.append((files, quarantine, {k: v for k, v in summary.items() if k not in drop}))
    assert results[0] == results[1] == results[2]
    assert results[0][2]["truncated_images"] == 1 and results[0][2]["quarantined"] == 1


def test_fitted_codec_is_reused_by_path_and_contradicting_keys_are_refused(raw: Path, tmp_path: Path) -> None:
    _, first = run(raw, DRAW_ROW, {"prompt": "x", "image": "b.png"}, codec=GRAY | {"codes_per_codebook": 16})
    _, second = run(raw, {"prompt": "x", "image": "c.png"}, output=tmp_path / "held", codec={"path": first})
    assert open_dataset(second).meta.codec == open_dataset(first).meta.codec
    assert open_dataset(second).meta.spec == open_dataset(first).meta.spec == demo_spec(codes=16)
    for codec, rule in (
        ({"path": first, "patch_size": 2}, r"codec.patch_size — 2 — the codec in .* has 4"),
        ({"path": tmp_path / "none"}, "no codec.json"),
        ({"path": first, "kind": "token-files"}, "token-files has nothing to load"),
    ):
        with pytest.raises((ConfigError, DataError), match=rule):
            run(raw, DRAW_ROW, output=tmp_path / "third", codec=codec)


def test_fit_images_limits_the_fit_and_passes_over_unreadable_images(raw: Path) -> None:
    (raw / "bad.png").write_bytes(b"<html>")
    rows = [{"prompt": "x", "image": f"{name}.png"} for name in ("bad", "a", "bad", "b")]
    summary, output = run(raw, *rows, on_bad_row="quarantine", codec=GRAY | {"fit_images": 1})
    assert summary["samples"] == 2 and summary["quarantined"] == 2
    assert load_codec(output).num_codebooks == 8


@pytest.mark.parametrize("count", [800, pytest.param(10_000, marks=pytest.mark.slow)])
def test_packing_report_reaches_98_percent_on_lognormal_lengths(raw: Path, count: int) -> None:
    """Median 600, sigma 0.8, at most 4096 tokens, packed to 8192."""
    from lumina_ft.data.layout import sample_length

    lengths = np.exp(np.random.default_rng(0).normal(np.log(600), 0.8, count)).astype(int).clip(1, 4096)
    demo = load_tokenizer("demo")
    word = " seven"
    assert len(demo.encode_text(word * 7)) == 7
    path = raw / "long.jsonl"
    overhead = len(demo.encode_text(SYSTEM_PROMPTS["text"])) + 4 + 1 + 64
    with path.open("w") as stream:
        for length in lengths:
            row = {"prompt": word * max(1, length - overhead), "response": "seven"}
            stream.write(json.dumps(row) + "\n")
    summary, output = run(raw, input=path)
    assert summary["samples"] == count and summary["longest_sample"] == 4096
    assert summary["packing"]["token_use"] >= 0.98
    assert summary["packing"]["packs"] >= summary["tokens"] / 8192
    sample = open_dataset(output)[0]
    assert sample_length(sample, block_tokens=32, answer_tail="eoa") == max(lengths[0], overhead + 1)


# bad input, one by one


def bad_html(raw: Path) -> dict[str, Any]:
    (raw / "page.jpg").write_bytes(b"<!DOCTYPE html><html>404")
    return {"prompt": "x", "image": "page.jpg"}


def bad_empty(raw: Path) -> dict[str, Any]:
    (raw / "empty.jpg").touch()
    return {"prompt": "x", "image": "empty.jpg"}


BAD_ROWS: list[tuple[str, Callable[[Path], Any], str]] = [
    (
        "missing image",
        lambda raw: {"prompt": "x", "image": "none.png"},
        "image .*/none.png — no such file — must exist",
    ),
    ("empty image", bad_empty, "image .*/empty.jpg — empty, 0 bytes — must have content"),
    ("HTML as JPEG", bad_html, "image .*/page.jpg — an HTML page, probably a failed download — must be an image"),
    ("unknown role", lambda raw: {"messages": [{"role": "bot", "content": "x"}]}, "unknown role; known: system, user"),
    ("unknown field", lambda raw: TEXT_ROW | {"respones": "x"}, "field 'respones' — unknown .* mean 'response'"),
    ("broken JSON", lambda raw: '{"prompt": "x", ', "broken JSON: .* — must be one JSON object"),
    ("over-long sample", lambda raw: TEXT_ROW | {"prompt": "x" * 9000}, r"\d+ tokens — must be at most max_sample_tok"),
    ("lone surrogate", lambda raw: '{"prompt": "\\ud800", "response": "x"}', "holds a lone surrogate"),
    (
        "surrogate in a path",
        lambda raw: '{"prompt": "x", "response": "y", "image": "\\ud800.png"}',
        "image .* — no such file",
    ),
    ("no text answer", lambda raw: TEXT_ROW | {"response": ""}, "answer 0 — empty"),
]


@pytest.mark.parametrize(("make", "rule"), [case[1:] for case in BAD_ROWS], ids=[case[0] for case in BAD_ROWS])
def test_bad_row_is_one_line_with_file_and_line_and_nothing_is_left(
    raw: Path, make: Callable[[Path], Any], rule: str
) -> None:
    row = make(raw)
    fmt = "messages" if isinstance(row, dict) and "messages" in row else "pairs"
    good = ASK_ROW | {"images": ["a.png"]} if fmt == "messages" else DRAW_ROW
    before = None
    for output in (raw.parent / "out", raw.parent / "new" / "deep" / "out"):
        path = rows_file(raw, good, good, row, good)
        before = before or entries(raw.parent)
        with pytest.raises(DataError) as caught:
            run(raw, input=path, output=output, format=fmt)
        text = str(caught.value)
        assert text.startswith(f"{path}:3 — ") and "\n" not in text
        assert caught.match(rule)
        assert entries(raw.parent) == before


@pytest.mark.parametrize(("make", "rule"), [case[1:] for case in BAD_ROWS], ids=[case[0] for case in BAD_ROWS])
def test_bad_row_is_quarantined_with_reason_and_the_rest_is_built(
    raw: Path, make: Callable[[Path], Any], rule: str
) -> None:
    row = make(raw)
    fmt = "messages" if isinstance(row, dict) and "messages" in row else "pairs"
    good = ASK_ROW | {"images": ["a.png"]} if fmt == "messages" else DRAW_ROW
    summary, output = run(raw, good, row, good, format=fmt, on_bad_row="quarantine")
    lines = (output / QUARANTINE_FILE).read_text(encoding="utf-8").splitlines()
    entry = json.loads(lines[0])
    assert len(lines) == summary["quarantined"] == 1 and summary["samples"] == len(open_dataset(output)) == 2
    assert entry["source"] == f"{raw / 'rows.jsonl'}:2" and entry["reason"].startswith(entry["source"] + " — ")
    assert entry["row"] == (row if isinstance(row, str) else json.dumps(row))
    assert [open_dataset(output)[i].source for i in (0, 1)] == ["rows.jsonl:1", "rows.jsonl:3"]


def test_no_good_row_left_is_a_data_error_that_shows_the_first_reason(raw: Path) -> None:
    with pytest.raises(DataError, match=r"all 2 rows are bad, the first: .*rows.jsonl:1 — broken JSON"):
        run(raw, "{", '{"prompt": 1}', on_bad_row="quarantine")
    with pytest.raises(DataError, match="rows.jsonl — no rows — at least one good row"):
        run(raw, "", "  ")
    with pytest.raises(DataError, match="input=.*none.jsonl — No such file"):
        run(raw, input=raw / "none.jsonl")
    assert entries(raw.parent) == {"raw"}


def test_only_unreadable_images_is_reported_at_their_row(raw: Path) -> None:
    with pytest.raises(DataError, match="rows.jsonl:1 — image .*/none.png — no such file"):
        run(raw, {"prompt": "x", "image": "none.png"})


def test_missing_media_dir_is_a_config_error(raw: Path) -> None:
    with pytest.raises(ConfigError, match="media_dir=.*nowhere — no such directory"):
        run(raw, TEXT_ROW, media_dir=raw / "nowhere")


def test_codes_that_16_bits_cannot_hold_are_refused(raw: Path) -> None:
    with pytest.raises(ConfigError, match="70000 codes in demo — must be at most 65536"):
        run(raw, DRAW_ROW, codec=GRAY | {"codes_per_codebook": 70000})
    with pytest.raises(ConfigError, match="70000 codes in demo — must be at most 65536"):
        run(raw, DRAW_ROW, codec={"kind": "token-files", "codes_per_codebook": 70000})


def test_interrupt_leaves_nothing_behind(raw: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    config = BuildConfig(input=(rows_file(raw, *[TEXT_ROW] * 80),), output=raw.parent / "out")
    with pytest.raises(KeyboardInterrupt):
        build(config, interrupt)
    assert entries(raw.parent) == {"raw"}


def test_truncated_jpeg_is_used_and_counted_once(raw: Path) -> None:
    whole = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)).save(whole, "JPEG")
    (raw / "cut.jpg").write_bytes(whole.getvalue()[:2000])
    rows = [{"prompt": "x", "image": "cut.jpg"}, {"prompt": "y", "image": "cut.jpg"}, DRAW_ROW]
    summary, output = run(raw, *rows)
    assert (summary["samples"], summary["images"], summary["truncated_images"]) == (3, 3, 1)
    assert np.array_equal(open_dataset(output)[0].segments[-1].codes, open_dataset(output)[1].segments[-1].codes)


# the output directory


def test_existing_output_is_refused_and_untouched(raw: Path) -> None:
    output = raw.parent / "out"
    output.mkdir()
    (output / "precious.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"output=.*out — exists — must be a new directory"):
        run(raw, TEXT_ROW)
    with pytest.raises(ConfigError, match="holds no dataset.json — overwrite=true replaces datasets only"):
        run(raw, TEXT_ROW, overwrite=True)
    assert (output / "precious.txt").read_text() == "x" and entries(raw.parent) == {"raw", "out"}
    (raw.parent / "file").write_text("x")
    with pytest.raises(ConfigError, match="not a directory"):
        run(raw, TEXT_ROW, overwrite=True, output=raw.parent / "file")


def test_overwrite_replaces_a_dataset_only_when_the_new_one_is_complete(raw: Path) -> None:
    run(raw, TEXT_ROW)
    with pytest.raises(DataError):
        run(raw, TEXT_ROW, "{", overwrite=True)
    assert len(open_dataset(raw.parent / "out")) == 1
    run(raw, TEXT_ROW, TEXT_ROW, overwrite=True)
    assert len(open_dataset(raw.parent / "out")) == 2 and entries(raw.parent) == {"raw", "out"}


def test_overwrite_never_deletes_its_own_input(raw: Path) -> None:
    _, output = run(raw, DRAW_ROW)
    inner = rows_file(output, TEXT_ROW, name="inner.jsonl")
    for keys in ({"input": inner}, {"codec": {"path": output / "codec"}}):
        with pytest.raises(ConfigError, match="which this build reads — choose another directory"):
            run(raw, DRAW_ROW, overwrite=True, **keys)
    assert inner.exists()


def test_unwritable_parent_is_a_config_error(raw: Path) -> None:
    (raw.parent / "file").write_text("x")
    with pytest.raises(ConfigError, match="must be writable"):
        run(raw, TEXT_ROW, output=raw.parent / "file" / "out")


# tokenizer and model


def model_directory(path: Path, **changes: Any) -> Path:
    """A directory with the demo tokenizer and a config.json that fits it, but for `changes`."""
    copy_tokenizer(load_tokenizer("demo").directory, path)
    spec = demo_spec()
    config = {"vocab_size": 512, "num_codebooks": 8, "text_ids": asdict(spec.text), "media_ids": asdict(spec.media)}
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


def test_tokenizer_that_disagrees_with_the_model_names_token_and_both_ids(raw: Path, tmp_path: Path) -> None:
    ids = asdict(demo_spec().text) | {"boi": 10}
    directory = model_directory(tmp_path / "model", text_ids=ids)
    with pytest.raises(DataError, match=r"<BOI> has id 506, the model's table in .*config.json says 10"):
        run(raw, TEXT_ROW, tokenizer=str(directory))
    with pytest.raises(DataError, match="<BOI> has id 506"):
        run(raw, TEXT_ROW, model_config_file=directory / "config.json")
    assert not (raw.parent / "out").exists()


def test_model_config_decides_ids_codebooks_and_code_range(raw: Path, tmp_path: Path) -> None:
    media = asdict(demo_spec(codes=16).media)
    directory = model_directory(tmp_path / "model", media_ids=media, num_codebooks=4)
    _, output = run(
        raw, DRAW_ROW, tokenizer=str(directory), codec=GRAY | {"num_codebooks": 4, "codes_per_codebook": 16}
    )
    assert open_dataset(output).meta.spec == demo_spec(codes=16, codebooks=4)
    for codec, rule in (
        ({"num_codebooks": 8, "codes_per_codebook": 16}, "codec.num_codebooks — 8 — the model in .* has 4"),
        ({"num_codebooks": 4, "codes_per_codebook": 17}, "codec.codes_per_codebook — 17 — the model in .* has 16"),
    ):
        with pytest.raises(ConfigError, match=rule):
            run(raw, DRAW_ROW, tokenizer=str(directory), codec=GRAY | codec, output=tmp_path / "no")
    small = model_directory(tmp_path / "small", text_rows=512, vocab_size=512)
    (small / "config.json").unlink()
    with pytest.raises(ConfigError, match="model_config_file — not set, and .*small has no config.json"):
        run(raw, TEXT_ROW, tokenizer=str(small), output=tmp_path / "no")
    with pytest.raises(DataError, match="nowhere — is not a directory"):
        run(raw, TEXT_ROW, tokenizer=str(tmp_path / "nowhere"), output=tmp_path / "no")


def test_tokenizer_larger_than_the_models_vocabulary_is_refused(raw: Path, tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "model")
    spec = json.loads((directory / "tokenizer.json").read_text())
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": 512, "content": "<extra>"})
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(DataError, match="ids up to 512 — the model in .* has 512 text rows"):
        run(raw, TEXT_ROW, tokenizer=str(directory))


# token files


def token_file(path: Path, codes: int = 4096, **extra: Any) -> str:
    coords = torch.tensor([[0, 0, h, w, 0] for h in range(3) for w in range(2)])
    indices = torch.randint(codes, (6, 8), generator=torch.Generator().manual_seed(0))
    indices[5, 7] = codes - 1
    torch.save({"indices": indices, "coords": coords, **extra}, path)
    return path.name


def test_token_files_are_images_of_the_official_codec(raw: Path) -> None:
    rows = [{"prompt": "draw", "image": token_file(raw / "t.pkl")}, {"prompt": "q", "response": "a", "image": "t.pkl"}]
    summary, output = run(raw, *rows, codec="token-files")
    reader = open_dataset(output)
    expected = torch.load(raw / "t.pkl")["indices"].numpy()
    for index, place in ((0, -1), (1, 1)):
        segment = reader[index].segments[place]
        assert segment.shape == (3, 2) and np.array_equal(segment.codes, expected)
    assert summary["codec"] == "token-files" and reader.meta.spec == demo_spec(codes=4096)


def test_codes_out_of_the_models_range_and_pickled_code_are_bad_rows(raw: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.system, (f"touch {raw / 'executed'}",)

    token_file(raw / "t.pt", codes=64)
    token_file(raw / "evil.pt", codes=32, extra=Attack())
    for name, rule in (("t.pt", r"indices\[\d, \d\] — \d\d — codes must be in 0..31"), ("evil.pt", "refused: names")):
        with pytest.raises(DataError, match=rf"rows.jsonl:1 — token file .*{name} — {rule}"):
            run(raw, {"prompt": "x", "image": name}, codec={"kind": "token-files", "codes_per_codebook": 32})
    assert not (raw / "executed").exists() and not (raw.parent / "out").exists()
