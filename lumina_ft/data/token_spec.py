"""Which ids a model uses: read from its `config.json`, or those of the demo.

Two optional tables in `config.json` name every id: `text_ids: {field: id}` and `media_ids: {field: id}` with the fields
of `TextIds` and `MediaIds`. Without them a vocabulary of 157,184 rows means the published ids (spec §2).
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from lumina_ft.errors import ConfigError, nearest
from lumina_ft.tokens import (
    PUBLISHED_MEDIA_IDS,
    PUBLISHED_TEXT_IDS,
    TOKEN_STRINGS,
    MediaIds,
    TextIds,
    TokenSpec,
)

PUBLISHED_VOCAB_ROWS = 157184
DEMO_TOKENIZER = Path(__file__).parent / "demo_tokenizer"
IdTable = TypeVar("IdTable", TextIds, MediaIds)


@dataclass(frozen=True)
class ModelTable:
    """What data code must know of a model.

    Attributes:
        spec: its ids and number of codebooks.
        vocab_rows: rows of its text embedding; every text id must be smaller.
        source: file or name that says so, for messages.
    """

    spec: TokenSpec
    vocab_rows: int
    source: str


def demo_spec(codes: int = 32, codebooks: int = 8) -> TokenSpec:
    """Ids of a model that goes with the demo tokenizer.

    Args:
        codes: codes per codebook; the media control rows follow them: mask = codes, newline = codes + 1, ….
        codebooks: C.
    """
    tokens = json.loads((DEMO_TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    ids = {entry["content"]: entry["id"] for entry in tokens}
    pad = json.loads((DEMO_TOKENIZER / "tokenizer_config.json").read_text(encoding="utf-8"))["pad_token"]
    text = TextIds(**{name: ids[token] for name, token in TOKEN_STRINGS.items()}, pad=ids[pad])
    media = MediaIds(
        codebook_size=codes,
        mask=codes,
        newline=codes + 1,
        line_3d=codes + 2,
        layer_3d=codes + 3,
        line_video=codes + 4,
        frame_video=codes + 5,
    )
    return TokenSpec(text=text, media=media, num_codebooks=codebooks)


def demo_table(codes: int = 32, codebooks: int = 8) -> ModelTable:
    """`demo_spec` with the size of the demo vocabulary."""
    from tokenizers import Tokenizer

    size = Tokenizer.from_file(str(DEMO_TOKENIZER / "tokenizer.json")).get_vocab_size()
    return ModelTable(demo_spec(codes, codebooks), vocab_rows=size, source="demo")


def read_model_table(path: Path) -> ModelTable:
    """Read the id tables of a model.

    Args:
        path: a `config.json`, or the directory that holds it.

    Raises:
        ConfigError: no such file, broken JSON, or an id that is missing, unknown, not an integer or out of range.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"model_config_file={file} — {exc.strerror} — must be a model's config.json") from exc
    except ValueError as exc:
        raise ConfigError(f"model_config_file={file} — not JSON: {exc} — must be a model's config.json") from exc
    if not isinstance(config, dict):
        raise ConfigError(f"model_config_file={file} — a JSON {type(config).__name__} — must be an object")
    return model_table(config, str(file))


def model_table(config: dict[str, Any], source: str) -> ModelTable:
    """Id tables of a parsed `config.json`; see `read_model_table`.

    Raises:
        ConfigError: an id is missing, unknown, not an integer or out of range.
    """
    vocab = _count(config, "vocab_size", source)
    rows = _count(config, "text_rows", source) if config.get("text_rows") is not None else vocab
    # Text-only checkpoints have no codebooks: their rows have one column, and no media id is ever used.
    text_only = config.get("num_codebooks") is None
    codebooks = 1 if text_only else _count(config, "num_codebooks", source)
    published = vocab == PUBLISHED_VOCAB_ROWS
    text = _ids(config, "text_ids", TextIds, PUBLISHED_TEXT_IDS if published else None, source)
    media = _ids(config, "media_ids", MediaIds, PUBLISHED_MEDIA_IDS if published or text_only else None, source)
    for field in fields(text):
        if getattr(text, field.name) >= rows:
            raise ConfigError(
                f"{source}: text_ids.{field.name} — {getattr(text, field.name)} — must be below the {rows} text rows"
            )
    if not text_only:
        _check_media(config, media, source)
    return ModelTable(TokenSpec(text=text, media=media, num_codebooks=codebooks), vocab_rows=rows, source=source)


def _check_media(config: dict[str, Any], media: MediaIds, source: str) -> None:
    """Codes must fit the image head, control rows lie after the codes and inside the image table."""
    classes, rows = config.get("image_head_classes"), config.get("image_embedding_rows")
    if classes is not None and media.codebook_size > classes:
        raise ConfigError(
            f"{source}: media_ids.codebook_size — {media.codebook_size} — must be at most image_head_classes={classes}"
        )
    for name in (field.name for field in fields(media) if field.name != "codebook_size"):
        value = getattr(media, name)
        if value < media.codebook_size or (rows is not None and value >= rows):
            raise ConfigError(
                f"{source}: media_ids.{name} — {value} — must follow the {media.codebook_size} codes and be below "
                f"image_embedding_rows={rows}"
            )


def _count(config: dict[str, Any], key: str, source: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{source}: {key} — {value!r} — must be an integer of at least 1")
    return value


def _ids(config: dict[str, Any], key: str, table: type[IdTable], published: IdTable | None, source: str) -> IdTable:
    """One id table of the config, or the published one."""
    names = [field.name for field in fields(table)]
    given = config.get(key)
    if given is None:
        if published is None:
            raise ConfigError(
                f"{source}: {key} — missing — only a vocabulary of {PUBLISHED_VOCAB_ROWS} has published ids; add "
                f"{key} with the fields {', '.join(names)}"
            )
        return published
    if not isinstance(given, dict):
        raise ConfigError(f"{source}: {key} — {given!r} — must be an object of field: id")
    for name, value in given.items():
        if name not in names:
            raise ConfigError(
                f"{source}: {key}.{name} — unknown field{nearest(name, names)}; known: {', '.join(names)}"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"{source}: {key}.{name} — {value!r} — must be an integer of at least 0")
    missing = [name for name in names if name not in given]
    if missing:
        raise ConfigError(f"{source}: {key} — lacks {', '.join(missing)} — every field is needed; add them")
    _check_distinct(given, key, source)
    return table(**given)


def _check_distinct(ids: dict[str, int], key: str, source: str) -> None:
    """Two names for one id would make different rows look the same; only padding may share the id of an end token."""
    owners: dict[int, str] = {}
    for name, value in ids.items():
        if name in ("pad", "codebook_size"):
            continue
        if value in owners:
            raise ConfigError(f"{source}: {key}.{name} — {value} — is {key}.{owners[value]} too; give each its own id")
        owners[value] = name
