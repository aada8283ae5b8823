"""A page of memory that other processes on this machine can read while its owner is stopped or stuck.

It has no name and leaves nothing behind: others reach it through the owner's open file.
"""

import mmap
import os
import sys
from contextlib import suppress
from typing import NamedTuple

_NUM_NUMBERS = 8
_TEXT_AT = 8 * _NUM_NUMBERS
_SIZE = mmap.PAGESIZE


class PageContent(NamedTuple):
    """What the owner has written last."""

    numbers: list[int]
    text: str


class Page:
    """This process's page.

    Attributes:
        fd: what others need besides the process id; -1 where the system has no such memory, so that nobody can read it.
        numbers: int64, to be assigned to; an assignment takes about as long as one of an attribute.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("lumina_ft progress") if sys.platform == "linux" else -1
        if self.fd >= 0:
            os.ftruncate(self.fd, _SIZE)
        self._memory = mmap.mmap(self.fd, _SIZE)
        self.numbers = memoryview(self._memory)[:_TEXT_AT].cast("q")

    def write_text(self, text: str) -> None:
        """Replace the text; what doesn't fit is cut off."""
        data = text.encode()[: _SIZE - _TEXT_AT - 1] + b"\0"
        self._memory[_TEXT_AT : _TEXT_AT + len(data)] = data

    def close(self) -> None:
        """Let nobody read it any more; it can still be written."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def read_page(pid: int, fd: int) -> PageContent | None:
    """The page of a process on this machine; None if it can't be read, as when the process is gone."""
    with suppress(OSError):
        with open(f"/proc/{pid}/fd/{fd}", "rb") as file:
            data = file.read(_SIZE)
        numbers = memoryview(data[:_TEXT_AT]).cast("q").tolist()
        return PageContent(numbers, data[_TEXT_AT:].split(b"\0", 1)[0].decode(errors="replace"))
    return None
