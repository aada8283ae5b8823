"""`lumina-ft data build`: raw rows and images to a dataset of segments.

The order is: check the keys, fit or load the codec, encode row by row (in processes if asked), write aside, rename.
Equal input gives equal bytes, whatever the number of workers. After an error nothing is left behind.
"""

import json
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from lumina_ft.config.data_schema import BuildConfig
from lumina_ft.data.codec_choice import choose_codec, choose_model_table
from lumina_ft.data.codecs import CODEC_DIR, ImageCodec
from lumina_ft.data.formats import TASKS, RawLine, detect_format, read_lines
from lumina_ft.data.pack import plan_packs, token_use
from lumina_ft.data.prompts import SYSTEM_PROMPTS
from lumina_ft.data.rows import InputFile, RowEncoder, RowResult
from lumina_ft.data.shards import META_FILE, ShardWriter, make_meta, write_meta
from lumina_ft.data.token_spec import ModelTable
from lumina_ft.data.tokenizer import TextTokenizer, check_text_ids, copy_tokenizer, load_tokenizer, text_ids
from lumina_ft.errors import ConfigError, DataError, RunError

log = logging.getLogger(__name__)

QUARANTINE_FILE = "quarantine.jsonl"
CHUNK_ROWS = 64
Progress = Callable[[int, int], None]
Work = tuple[RawLine, InputFile]


def build(cfg: BuildConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Build a dataset directory.

    Args:
        cfg: what to read and where to write.
        progress: called with (rows done, rows in all) now and then.

    Returns:
        JSON-ready summary: output, rows, samples, tasks, images, truncated_images, quarantined, tokens, longest_sample,
        packing (method, max_tokens, packs, token_use as a share), codec, formats.

    Raises:
        ConfigError: a key is wrong, or `output` is in the way.
        DataError: a bad row with `on_bad_row: error`, or no row is left.
        RunError: a worker process died.
    """
    _check_output(cfg)
    files = _input_files(cfg)
    tokenizer = load_tokenizer(cfg.tokenizer)
    table = choose_model_table(cfg)
    _check_tokenizer(tokenizer, table)
    total = sum(1 for file in files for _ in read_lines(file.path))
    codec = choose_codec(cfg, table, files)
    encoder = RowEncoder(
        encoder=tokenizer.encoder,
        codec=codec,
        system_prompts={task: SYSTEM_PROMPTS[task] for task in TASKS} | dict(cfg.system_prompts.items()),
        task=cfg.task,
        num_codebooks=table.spec.num_codebooks,
        block_tokens=cfg.block_tokens,
        max_sample_tokens=cfg.max_sample_tokens,
    )
    with _aside(cfg.output, overwrite=cfg.overwrite) as directory:
        tally = _write_rows(cfg, encoder, files, directory, total, progress)
        _write_companions(directory, tally, tokenizer, table, codec, encoder, cfg.block_tokens)
    return _summary(cfg, files, tally, codec)


@dataclass
class _Tally:
    """What was counted while rows went by."""

    rows: int = 0
    lengths: list[int] = field(default_factory=list)
    images: int = 0
    repaired: set[str] = field(default_factory=set)
    quarantined: int = 0
    first_reason: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    shards: tuple[dict[str, Any], ...] = ()


def _write_rows(
    cfg: BuildConfig,
    encoder: RowEncoder,
    files: list[InputFile],
    directory: Path,
    total: int,
    progress: Progress | None,
) -> _Tally:
    """Encode every row and write the shards and the quarantine file."""
    tally = _Tally()
    writer = ShardWriter(directory, num_codebooks=encoder.num_codebooks)
    work = ((line, file) for file in files for line in read_lines(file.path))
    with closing(_encoded(work, encoder, cfg.workers)) as results:
        for (line, _), result in results:
            tally.rows += 1
            if result.sample is None:
                if cfg.on_bad_row == "error":
                    raise DataError(result.reason)
                _quarantine(directory / QUARANTINE_FILE, line, result)
                tally.first_reason = tally.first_reason or result.reason
                tally.quarantined += 1
            else:
                writer.add(replace(result.sample, index=len(tally.lengths)))
                tally.lengths.append(result.length)
                tally.images += len(result.images)
                tally.repaired.update(result.repaired)
            if progress is not None and (tally.rows % CHUNK_ROWS == 0 or tally.rows == total):
                progress(tally.rows, total)
    if not tally.lengths:
        names = ", ".join(str(file.path) for file in files)
        why = f"all {tally.rows} rows are bad, the first: {tally.first_reason}" if tally.rows else "no rows"
        raise DataError(f"input={names} — {why} — at least one good row is needed — fix the rows")
    tally.counts, tally.shards = writer.close()
    return tally


def _write_companions(
    directory: Path,
    tally: _Tally,
    tokenizer: TextTokenizer,
    table: ModelTable,
    codec: ImageCodec | None,
    encoder: RowEncoder,
    block_tokens: int,
) -> None:
    """Tokenizer, codec and `dataset.json`, last."""
    copy_tokenizer(tokenizer.directory, directory / "tokenizer")
    identity = None
    if codec is not None and tally.images:
        codec.save(directory / CODEC_DIR)
        identity = {"kind": codec.kind, "identity": codec.identity}
    meta = make_meta(
        counts=tally.counts,
        shards=tally.shards,
        spec=table.spec,
        tokenizer_identity=tokenizer.identity,
        codec=identity,
        system_prompts={task: encoder.system_prompts[task] for task in sorted(tally.counts)},
        block_tokens=block_tokens,
    )
    write_meta(directory, meta)


def _summary(cfg: BuildConfig, files: list[InputFile], tally: _Tally, codec: ImageCodec | None) -> dict[str, Any]:
    lengths = np.array(tally.lengths)
    packs = plan_packs(lengths, cfg.max_sample_tokens, "best_fit", cfg.seed)
    return {
        "output": str(cfg.output),
        "rows": tally.rows,
        "samples": len(lengths),
        "tasks": dict(sorted(tally.counts.items())),
        "images": tally.images,
        "truncated_images": len(tally.repaired),
        "quarantined": tally.quarantined,
        "tokens": int(lengths.sum()),
        "longest_sample": int(lengths.max()),
        "packing": {
            "method": "best_fit",
            "max_tokens": cfg.max_sample_tokens,
            "packs": len(packs),
            "token_use": round(token_use(packs, lengths, cfg.max_sample_tokens), 6),
        },
        "codec": codec.kind if codec is not None and tally.images else None,
        "formats": {str(file.path): file.format for file in files},
    }


def _encoded(work: Iterator[Work], encoder: RowEncoder, workers: int) -> Generator[tuple[Work, RowResult], None, None]:
    """Results in the order of the work, by this process or by `workers` others (0: one per core)."""
    workers = workers or len(os.sched_getaffinity(0))
    if workers == 1:
        for line, file in work:
            yield (line, file), encoder.encode(line, file)
        return
    # spawn: a fork would copy the tokenizer's and BLAS' threads in an unknown state.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (encoder,))
    pending: deque[tuple[list[Work], Future[list[RowResult]]]] = deque()
    try:
        for chunk in _chunks(work):
            pending.append((chunk, pool.submit(_encode_chunk, chunk)))
            if len(pending) >= 4 * workers:
                yield from _take(pending)
        while pending:
            yield from _take(pending)
    except BrokenProcessPool as exc:
        raise RunError(f"workers={workers} — a worker process died, perhaps for lack of memory — use fewer") from exc
    finally:
        pool.shutdown(cancel_futures=True)


def _take(pending: deque[tuple[list[Work], Future[list[RowResult]]]]) -> Iterable[tuple[Work, RowResult]]:
    chunk, future = pending.popleft()
    return zip(chunk, future.result(), strict=True)


def _chunks(work: Iterator[Work]) -> Iterator[list[Work]]:
    while chunk := list(islice(work, CHUNK_ROWS)):
        yield chunk


_worker_encoder: RowEncoder | None = None


def _start_worker(encoder: RowEncoder) -> None:
    global _worker_encoder
    _worker_encoder = encoder


def _encode_chunk(chunk: list[Work]) -> list[RowResult]:
    assert _worker_encoder is not None
    return [_worker_encoder.encode(line, file) for line, file in chunk]


def _quarantine(path: Path, line: RawLine, result: RowResult) -> None:
    entry = {"source": result.source, "reason": result.reason, "row": line.data.decode("utf-8", errors="replace")}
    # A path in the reason may hold a lone surrogate, which JSON spells as the same escape.
    with path.open("a", encoding="utf-8", errors="backslashreplace") as stream:
        stream.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _input_files(cfg: BuildConfig) -> list[InputFile]:
    if cfg.media_dir is not None and not cfg.media_dir.is_dir():
        raise ConfigError(f"media_dir={cfg.media_dir} — no such directory — image paths start there — fix the path")
    # Stored sources are relative, so that a dataset doesn't depend on where its input lay.
    common = Path(os.path.commonpath([path.absolute().parent for path in cfg.input]))
    files = []
    for path in cfg.input:
        fmt = cfg.format
        if fmt == "auto":
            fmt = detect_format(path)
            log.info("%s: format %s", path, fmt)
        media_dir = cfg.media_dir if cfg.media_dir is not None else path.parent
        files.append(InputFile(path, fmt, media_dir, path.absolute().relative_to(common).as_posix()))
    return files


def _check_tokenizer(tokenizer: TextTokenizer, table: ModelTable) -> None:
    check_text_ids(text_ids(tokenizer), table.spec.text, directory=tokenizer.directory, model_source=table.source)
    if tokenizer.vocab_rows > table.vocab_rows:
        raise DataError(
            f"tokenizer={tokenizer.directory} — ids up to {tokenizer.vocab_rows - 1} — the model in {table.source} has "
            f"{table.vocab_rows} text rows — use the tokenizer that belongs to the model"
        )


def _check_output(cfg: BuildConfig) -> None:
    """Refuse an output that exists, or whose replacement would destroy something that is no dataset or an input."""
    output = cfg.output
    if not (output.exists() or output.is_symlink()):
        return
    if not cfg.overwrite:
        raise ConfigError(f"output={output} — exists — must be a new directory — remove it or set overwrite=true")
    if not output.is_dir() or output.is_symlink():
        raise ConfigError(f"output={output} — not a directory — overwrite=true replaces datasets only — remove it")
    if any(output.iterdir()) and not (output / META_FILE).is_file():
        raise ConfigError(
            f"output={output} — holds no {META_FILE} — overwrite=true replaces datasets only — choose another directory"
        )
    inner = [path for path in (*cfg.input, cfg.codec.path, cfg.media_dir) if path is not None]
    for path in inner:
        if path.resolve().is_relative_to(output.resolve()):
            raise ConfigError(f"output={output} — holds {path}, which this build reads — choose another directory")


@contextmanager
def _aside(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """A fresh directory next to `output` that becomes it at the end, or vanishes on any error."""
    made = [parent for parent in output.absolute().parents if not parent.exists()]
    target = output.absolute().parent / f".{output.name}.{os.getpid()}.partial"
    try:
        target.mkdir(parents=True)
    except OSError as exc:
        raise ConfigError(f"output={output} — {exc.strerror} — must be writable — choose another directory") from exc
    try:
        yield target
        _move_into_place(target, output, overwrite=overwrite)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        for parent in made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        raise


def _move_into_place(target: Path, output: Path, *, overwrite: bool) -> None:
    if not (overwrite and output.exists()):
        os.rename(target, output)
        return
    old = target.with_suffix(".old")
    os.rename(output, old)
    os.rename(target, output)
    shutil.rmtree(old)
