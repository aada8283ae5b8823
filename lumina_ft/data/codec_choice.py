"""Which codec a build uses, and which model its rows must fit."""

import logging
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
from PIL import Image

from lumina_ft.config.data_schema import BuildConfig, CodecConfig
from lumina_ft.data.codecs import MAX_CODES, ImageCodec, load_codec
from lumina_ft.data.formats import parse_row, read_lines, to_conversation
from lumina_ft.data.images import open_image
from lumina_ft.data.rows import InputFile, image_paths
from lumina_ft.data.token_spec import ModelTable, demo_table, read_model_table
from lumina_ft.errors import ConfigError, DataError

log = logging.getLogger(__name__)

PUBLISHED_CODES = 4096
"""Codes per codebook of the official encoder, for token files without a model config."""


def choose_model_table(config: BuildConfig) -> ModelTable:
    """Ids and sizes that the rows must fit: the named model config, the tokenizer directory's, or the demo's.

    Raises:
        ConfigError: none of them exists, an id table is wrong, or codes don't fit the stored dtype.
        DataError: `codec.path` holds no codec.
    """
    table = _model_table(config)
    codes = table.spec.media.codebook_size
    if codes > MAX_CODES:
        raise ConfigError(
            f"codec.codes_per_codebook — {codes} codes in {table.source} — must be at most {MAX_CODES}, which is what "
            "16 bits hold — lower it"
        )
    return table


def _model_table(config: BuildConfig) -> ModelTable:
    if config.model_config_file is not None:
        return read_model_table(config.model_config_file)
    if config.tokenizer != "demo":
        directory = Path(config.tokenizer)
        if directory.is_dir() and not (directory / "config.json").is_file():
            raise ConfigError(
                f"model_config_file — not set, and {directory} has no config.json — the model's ids must be known — "
                "set it to the model's config.json"
            )
        return read_model_table(directory)
    codec = config.codec
    if codec.path is not None and codec.kind == "pq":
        fitted = load_codec(codec.path)
        return demo_table(fitted.codes_per_codebook, fitted.num_codebooks)
    codes_given = "codes_per_codebook" in codec.model_fields_set
    codes = PUBLISHED_CODES if codec.kind == "token-files" and not codes_given else codec.codes_per_codebook
    return demo_table(codes, codec.num_codebooks)


def choose_codec(config: BuildConfig, table: ModelTable, files: Iterable[InputFile]) -> ImageCodec | None:
    """Load, make or fit the codec.

    Returns:
        None if `pq` is to be fitted and no row has a readable image.

    Raises:
        ConfigError: the codec doesn't fit the model, or a key contradicts the loaded codec.
        DataError: `codec.path` holds no codec.
    """
    if config.codec.kind == "token-files":
        from lumina_ft.data.codecs.token_files import TokenFileCodec

        if config.codec.path is not None:
            raise ConfigError(f"codec.path={config.codec.path} — token-files has nothing to load — remove the key")
        return TokenFileCodec(table.spec.num_codebooks, table.spec.media.codebook_size)
    codec = _load(config.codec) if config.codec.path is not None else _fit(config, files)
    if codec is None:
        return None
    books, codes = table.spec.num_codebooks, table.spec.media.codebook_size
    if codec.num_codebooks != books:
        raise ConfigError(
            f"codec.num_codebooks — {codec.num_codebooks} — the model in {table.source} has {books} — set it to that; "
            "a text-only model takes no rows with images"
        )
    if codec.codes_per_codebook > codes:
        raise ConfigError(
            f"codec.codes_per_codebook — {codec.codes_per_codebook} — the model in {table.source} has {codes} codes — "
            "set it to that or less"
        )
    return codec


def _load(config: CodecConfig) -> ImageCodec:
    """A fitted codec; keys that are set must agree with it."""
    assert config.path is not None
    codec = load_codec(config.path)
    if codec.kind != config.kind:
        raise ConfigError(f"codec.kind — {config.kind} — {config.path} holds {codec.kind} — set it to that")
    for key in ("image_size", "patch_size", "codes_per_codebook", "num_codebooks", "channels"):
        if key in config.model_fields_set and getattr(config, key) != getattr(codec, key):
            raise ConfigError(
                f"codec.{key} — {getattr(config, key)} — the codec in {config.path} has {getattr(codec, key)} — remove "
                "the key or codec.path"
            )
    return codec


def _fit(config: BuildConfig, files: Iterable[InputFile]) -> ImageCodec | None:
    from lumina_ft.data.codecs.pq import fit_pq

    paths = _distinct_images(config.task, files)
    if not paths:
        return None
    order = np.random.default_rng([config.seed, 1]).permutation(len(paths))
    wanted = min(config.codec.fit_images, len(paths))
    images = _readable((paths[i] for i in order), config.codec, wanted)
    first = next(images, None)
    if first is None:
        return None
    codec = fit_pq(chain([first], images), config.codec, num_images=wanted, seed=config.seed)
    log.info("codec pq: fitted on up to %d images", wanted)
    return codec


def _distinct_images(task: str, files: Iterable[InputFile]) -> list[Path]:
    """Image files of all well-formed rows, each once, in order; bad rows are reported when they are encoded."""
    found: dict[Path, None] = {}
    for file in files:
        for line in read_lines(file.path):
            try:
                conversation = to_conversation(parse_row(line.data), file.format, task)
            except DataError:
                continue
            found.update(dict.fromkeys(image_paths(conversation, file)))
    return list(found)


def _readable(paths: Iterable[Path], config: CodecConfig, wanted: int) -> Iterator[Image.Image]:
    """The first `wanted` images that open."""
    count = 0
    for path in paths:
        if count == wanted:
            return
        try:
            image, _ = open_image(path, config.channels)
        except DataError:
            continue
        count += 1
        yield image
