"""The directory that a merge writes: made aside and renamed, and completed with what belongs to a model."""

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from filecmp import cmp, dircmp
from pathlib import Path

from lumina_ft.data.codecs import CODEC_DIR
from lumina_ft.data.tokenizer import copy_tokenizer
from lumina_ft.errors import CheckpointError, ConfigError, RunError
from lumina_ft.models.tensor_files import INDEX_FILE, SINGLE_FILE
from lumina_ft.models.weights import CONFIG_FILE

_SETTINGS_FILE = "sampling.json"


def check_output(output: Path, inputs: Sequence[Path], *, overwrite: bool) -> None:
    """Refuse an output that would destroy something.

    Raises:
        CheckpointError: it exists and `overwrite` isn't given, or it isn't a model directory and nothing else.
        ConfigError: it is one of the inputs, or holds one.
    """
    for path in inputs:
        if path.resolve().is_relative_to(output.resolve()):
            raise ConfigError(f"--output — {output} — holds {path}, which is merged — choose another directory")
    _, replaced = _beside(output)
    if replaced.exists() and not output.exists():
        # An earlier --overwrite was killed between its two renames.
        replaced.rename(output)
    if not output.exists() and not output.is_symlink():
        return
    if not overwrite:
        raise CheckpointError(
            f"{output} — exists — a merge writes a new directory — remove it, choose another, or pass --overwrite"
        )
    weights = (output / SINGLE_FILE).is_file() or (output / INDEX_FILE).is_file()
    if output.is_symlink() or not (weights and (output / CONFIG_FILE).is_file()):
        raise CheckpointError(
            f"{output} — is not a model directory ({CONFIG_FILE} and safetensors) — --overwrite replaces only those — "
            "remove it, or choose another"
        )
    foreign = sorted(path.name for path in output.iterdir() if path.is_dir() and path.name != CODEC_DIR)
    if foreign:
        raise CheckpointError(
            f"{output} — holds {', '.join(foreign)} beside the model — --overwrite would delete that too — move it "
            "away, or choose another directory"
        )


def _beside(output: Path) -> tuple[Path, Path]:
    """Where an output is while it is written, and where the one that it replaces is meanwhile."""
    # `.` has no name of its own.
    absolute = Path(os.path.abspath(output))
    return absolute.with_name(f".{absolute.name}.partial"), absolute.with_name(f".{absolute.name}.replaced")


@contextmanager
def written_aside(output: Path, needed_bytes: int, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill. On success it takes the place of `output` at once; on failure it is removed.

    Args:
        output: see `check_output`. overwrite: replace what is there; else a directory that appeared in the meantime
            is refused.
        needed_bytes: refused beforehand if the disk has less.

    Raises:
        RunError: the disk is full or fails.
        ConfigError: the folder can't be created.
        CheckpointError: `output` appeared in the meantime.
    """
    output = Path(os.path.abspath(output))
    aside, replaced = _beside(output)
    for leftover in (aside, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--output — {output} — {error.strerror} — must be writable — choose another") from error
    try:
        free = shutil.disk_usage(aside).free
        if free < needed_bytes:
            raise RunError(
                f"{output} — {free / 1e9:.1f} GB free — the merged model takes {needed_bytes / 1e9:.1f} GB — make room"
            )
        yield aside
        if output.exists():
            if not overwrite:
                raise CheckpointError(
                    f"{output} — appeared while the merge was running — a merge writes a new directory — choose another"
                )
            output.rename(replaced)
        aside.rename(output)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if replaced.exists() and not output.exists():
            replaced.rename(output)
        if isinstance(error, OSError):
            raise RunError(
                f"{output} — {error.strerror or error} — nothing of it is kept — make room or repair the disk, then "
                "merge again"
            ) from error
        raise
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def flushed_meanwhile(folder: Path) -> Iterator[None]:
    """Flush every file of a folder to the disk while the block runs; done when it ends."""
    stopped = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        flushing = pool.submit(_flush, folder, stopped)
        try:
            yield
        except BaseException:
            stopped.set()
            raise
        flushing.result()


def _flush(folder: Path, stopped: threading.Event) -> None:
    for path in (*sorted(folder.rglob("*")), folder):
        if stopped.is_set():
            return
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def add_companions(output: Path, adapters: Sequence[Path]) -> list[str]:
    """Give a merged model the codec, system prompts and (if the base has none) tokenizer of its adapters.

    Those that a model was trained with last are right, so an adapter's replace the base's.

    Returns:
        Warnings.

    Raises:
        CheckpointError: two adapters with different codecs.
    """
    warnings: list[str] = []
    codecs = [path for path in adapters if (path / CODEC_DIR).is_dir()]
    for other in codecs[1:]:
        if not _same_tree(codecs[0] / CODEC_DIR, other / CODEC_DIR):
            raise CheckpointError(
                f"{other / CODEC_DIR} — differs from {codecs[0] / CODEC_DIR} — image codes of one model have one "
                "meaning — merge adapters that were trained with the same codec"
            )
    if codecs:
        shutil.rmtree(output / CODEC_DIR, ignore_errors=True)
        shutil.copytree(codecs[0] / CODEC_DIR, output / CODEC_DIR)
    settings = [path / _SETTINGS_FILE for path in adapters if (path / _SETTINGS_FILE).is_file()]
    if settings:
        shutil.copyfile(settings[-1], output / _SETTINGS_FILE)
    if any(not cmp(settings[-1], other, shallow=False) for other in settings[:-1]):
        warnings.append(f"system prompts of the adapters differ; the merged model keeps those of {settings[-1].parent}")
    if not (output / "tokenizer.json").exists():
        copy_tokenizer(adapters[-1], output)
    return warnings


def _same_tree(a: Path, b: Path) -> bool:
    found = dircmp(a, b)
    if found.left_only or found.right_only or found.common_funny:
        return False
    return all(cmp(a / name, b / name, shallow=False) for name in found.common_files) and all(
        _same_tree(a / name, b / name) for name in found.common_dirs
    )
