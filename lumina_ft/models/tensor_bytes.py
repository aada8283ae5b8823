"""Bytes of tensors into files, from any number of threads."""

import os
import threading

import torch
from torch import Tensor

_BUFFER_BYTES = 2 << 20


class _Buffer(threading.local):
    """Memory of this thread to write from: straight from a mapped file, writing takes the kernel four times as long."""

    def __init__(self) -> None:
        self.memory = torch.empty(_BUFFER_BYTES, dtype=torch.uint8)


_BUFFER = _Buffer()


def write_at(handle: int, offset: int, tensor: Tensor) -> int:
    """Write a tensor's bytes at a place in a file, whatever other threads write elsewhere in it.

    Args:
        handle: of an open file. offset: in bytes.

    Returns:
        Bytes written: all of them.
    """
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    buffer = _BUFFER.memory
    for at in range(0, len(raw), _BUFFER_BYTES):
        part = buffer[: min(_BUFFER_BYTES, len(raw) - at)]
        part.copy_(raw[at : at + len(part)])
        view, done = part.numpy().data, 0
        while done < len(view):
            done += os.pwrite(handle, view[done:], offset + at + done)
    return len(raw)
