"""Written files, reopened: is everything there as announced, and finite? Then their hashes."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lumina_ft.checkpoint.manifest import Manifest, hash_files
from lumina_ft.errors import RunError
from lumina_ft.models.hf_keys import CHANNEL_MASK
from lumina_ft.models.tensor_files import TensorSpec

_MAX_THREADS = 4
_CHUNK_NUMEL = 1 << 24


def check_files(folder: Path, files: Mapping[str, Mapping[str, TensorSpec] | None], intact: str) -> Manifest:
    """Check the safetensors among `files` and hash all of them.

    Args:
        files: names relative to `folder`, each with the tensors that were announced for it; None: any tensors.
        intact: what is left if this fails, for the message.

    Raises:
        RunError: a tensor is missing, extra, misshapen, of another dtype, or not finite.
        OSError: a file can't be read.
    """
    weights = [name for name in files if name.endswith(".safetensors")]
    with ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for _ in pool.map(lambda name: _check_file(folder / name, files[name], intact), weights):
            pass
    return hash_files(folder, files)


def _check_file(path: Path, announced: Mapping[str, TensorSpec] | None, intact: str) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            if announced is not None and set(names) != set(announced):
                raise _damaged(path, f"tensors {sorted(set(names) ^ set(announced))[:4]} differ from", intact)
            for name in names:
                tensor = file.get_tensor(name)
                if announced is not None and (tuple(tensor.shape), tensor.dtype) != announced[name]:
                    raise _damaged(path, f"{name} {tuple(tensor.shape)} {tensor.dtype} differs from", intact)
                if not is_finite(tensor) and not (name.endswith(CHANNEL_MASK) and not bool(tensor.isnan().any())):
                    raise RunError(
                        f"{path.parent.name}/{path.name} — {name} — holds values that aren't finite, so the checkpoint "
                        f"isn't kept; {intact} — continue from there with a lower learning rate, or look at the last "
                        "steps' samples"
                    )
    except SafetensorError as error:
        raise _damaged(path, f"{error}: differs from", intact) from error


def _damaged(path: Path, what: str, intact: str) -> RunError:
    return RunError(
        f"{path} — {what} what was written — the file system or memory lost data, nothing of the checkpoint is kept; "
        f"{intact} — check the disk, then continue with --resume"
    )


def is_finite(tensor: Tensor) -> bool:
    """Whether every value of a tensor is finite; True for integers.

    A sum is finite only if its terms are, and on a CPU takes a hundredth of the time of looking at each. It may
    overflow all the same, so a sum that isn't finite is looked into.
    """
    if not tensor.is_floating_point():
        return True
    flat = tensor.reshape(-1)
    chunks = (flat[i : i + _CHUNK_NUMEL] for i in range(0, flat.numel(), _CHUNK_NUMEL))
    return all(bool(torch.isfinite(chunk.sum())) or bool(torch.isfinite(chunk).all()) for chunk in chunks)
