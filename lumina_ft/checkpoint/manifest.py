"""What a complete checkpoint consists of: size and hash of every file, kept in its marker. No torch here.

The marker is written last, so a checkpoint that has one was whole at that time; the manifest in it tells whether it
still is.
"""

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import xxhash

from lumina_ft.errors import CheckpointError
from lumina_ft.monitor.progress import counted

MARKER = "COMPLETE"

_CHUNK_BYTES = 16 << 20
_MAX_THREADS = 8
_QUIET_SECONDS = 3.0
_POLL_SECONDS = 0.2


class FileEntry(NamedTuple):
    """One file of a checkpoint: bytes, and xxh3 (128 bits, hex) of its content."""

    bytes: int
    xxh3: str


Manifest = dict[str, FileEntry]
"""By path relative to the checkpoint, with forward slashes."""


def hash_file(path: Path, on_bytes: list[int] | None = None) -> FileEntry:
    """Read a file in chunks; the hash releases the interpreter lock, so threads do several files at once.

    Args:
        on_bytes: its first element is increased by what has been read.
    """
    digest = xxhash.xxh3_128()
    buffer = bytearray(_CHUNK_BYTES)
    total = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            total += count
            if on_bytes is not None:
                on_bytes[0] += count
    return FileEntry(total, digest.hexdigest())


def hash_files(folder: Path, names: Iterable[str], *, said: str | None = None) -> Manifest:
    """Entries of several files, read in threads.

    Args:
        names: relative to `folder`.
        said: description of a progress display that appears when this takes longer than 3 s; None shows nothing.

    Raises:
        OSError: a file can't be read.
    """
    names = sorted(names)
    sizes = {name: (folder / name).stat().st_size for name in names}
    read = {name: [0] for name in names}
    with ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0)))) as pool, ExitStack() as stack:
        show = None if said is None else stack.enter_context(counted(said, quiet_seconds=_QUIET_SECONDS))
        # The largest first, so that none is left over for the end.
        order = sorted(names, key=lambda name: -sizes[name])
        jobs: dict[str, Future[FileEntry]] = {n: pool.submit(hash_file, folder / n, read[n]) for n in order}
        waiting = set(jobs.values())
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
                for job in done:
                    job.result()
                if show is not None:
                    show(sum(r[0] for r in read.values()) >> 20, sum(sizes.values()) >> 20)
        except BaseException:
            # Leaving the pool waits for what has been submitted: hundreds of GB, after Ctrl-C or a file that is gone.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return {name: jobs[name].result() for name in names}


def format_manifest(entries: Mapping[str, FileEntry]) -> str:
    """The marker's content: JSON, a line per file."""
    return json.dumps({name: entry._asdict() for name, entry in sorted(entries.items())}, indent=1) + "\n"


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest in a checkpoint's marker.

    Raises:
        CheckpointError: the marker can't be read, or holds something else.
    """
    path = checkpoint / MARKER
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = {str(name): FileEntry(int(e["bytes"]), str(e["xxh3"])) for name, e in content.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} — {error} — must list each file with its bytes and xxh3 — "
            "the checkpoint is damaged or of an older version: resume from another one"
        ) from error
    if not entries:
        raise CheckpointError(f"{path} — lists no file — must list every file — resume from another checkpoint")
    return entries


def find_damage(checkpoint: Path, *, hashes: bool, say: bool = False) -> str | None:
    """Compare a checkpoint with its manifest.

    Args:
        hashes: read and hash every file; else only look at sizes.
        say: show progress on stderr when that takes long.

    Returns:
        What is wrong, naming the file; None if nothing is.
    """
    if not (checkpoint / MARKER).is_file():
        return f"no {MARKER}: never finished"
    try:
        manifest = read_manifest(checkpoint)
        for name, entry in manifest.items():
            if not (checkpoint / name).is_file():
                return f"{name} is missing"
            size = (checkpoint / name).stat().st_size
            if size != entry.bytes:
                return f"{name} has {size} bytes, was written with {entry.bytes}"
        if hashes:
            found = hash_files(checkpoint, manifest, said=f"MiB of {checkpoint.name} verified" if say else None)
            for name, entry in manifest.items():
                if found[name] != entry:
                    return f"{name} has hash {found[name].xxh3}, was written with {entry.xxh3}"
    except (CheckpointError, OSError) as error:
        return str(error)
    return None
