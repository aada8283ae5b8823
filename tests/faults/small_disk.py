"""A file system of a few megabytes that only one run sees, mounted without privileges where that is needed.

The mount lives in a namespace of its own, held by one process that ends with this one: then the kernel takes the mount
down, however the test has ended.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_UNSHARE = (
    ("unshare", "--mount", "--propagation", "private"),
    ("unshare", "--user", "--map-root-user", "--mount", "--propagation", "private"),
)


@dataclass(frozen=True)
class SmallDisk:
    """A mounted tmpfs.

    Attributes:
        path: where processes in the namespace see it.
        seen_at: where this process sees it.
        prefix: command that runs another one in the namespace.
    """

    path: Path
    seen_at: Path
    prefix: tuple[str, ...]

    def run(self, command: str) -> None:
        """Run a shell command in the namespace."""
        subprocess.run([*self.prefix, "sh", "-c", command], check=True, capture_output=True)


@contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[SmallDisk | None]:
    """Mount a tmpfs of a size on a new directory; None where this system allows no mounts."""
    path.mkdir()
    for unshare in _UNSHARE:
        script = f"mount -t tmpfs -o size={num_bytes} tmpfs '{path}' && echo mounted && exec cat"
        pipe = subprocess.PIPE
        holder = subprocess.Popen([*unshare, "sh", "-c", script], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        try:
            assert holder.stdout is not None
            if holder.stdout.readline() == b"mounted\n":
                enter = ["nsenter", f"--target={holder.pid}", "--mount"]
                enter += ["--user", "--preserve-credentials"] if "--user" in unshare else []
                yield SmallDisk(path, Path(f"/proc/{holder.pid}/root{path}"), tuple(enter))
                return
        finally:
            holder.kill()
            holder.communicate()
    yield None
