"""Identity of a model directory: a hash per tensor, the same for every layout and sharding of the same weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from lumina_ft.models.hf_keys import CHANNEL_MASK
from lumina_ft.models.native import NativeReader, for_each_tensor
from lumina_ft.models.tensor_files import TensorSpec


class BaseIdentity(NamedTuple):
    """What an adapter remembers of its base.

    Attributes:
        digest: of all tensors together, 32 hex digits.
        tensors: native name -> xxh3_128 of its name, dtype, shape and bytes, 32 hex digits.
    """

    digest: str
    tensors: dict[str, str]


def model_identity(directory: Path) -> BaseIdentity:
    """Hash the weights of a checkpoint directory, reading them once through memory maps.

    Tensors that may be absent from a checkpoint because their values follow from elsewhere don't count: the channel
    mask, and an expert bias of zeros.

    Args:
        directory: split or packed, single file or shards.

    Raises:
        CheckpointError: see `NativeReader`.
    """
    with NativeReader(directory) as reader:
        hashes = for_each_tensor(lambda name: _hash_stored(reader, name), reader.tensors)
        found = dict(zip(reader.tensors, hashes, strict=True))
    return identity_of({name: value for name, value in found.items() if value is not None})


def identity_of(tensors: Mapping[str, str]) -> BaseIdentity:
    """The identity that consists of these hashes. tensors: native name -> hash."""
    ordered = dict(sorted(tensors.items()))
    whole = xxhash.xxh3_128("".join(f"{name} {value}\n" for name, value in ordered.items()).encode())
    return BaseIdentity(whole.hexdigest(), ordered)


def _hash_stored(reader: NativeReader, name: str) -> str | None:
    hasher = TensorHasher(name, reader.tensors[name].spec)
    for _, piece in reader.pieces(name):
        hasher.update(piece)
    return hasher.result()


class TensorHasher:
    """Hashes one native tensor whose rows arrive in order, in pieces of any size.

    Args:
        name: native name. spec: of the whole tensor.
    """

    def __init__(self, name: str, spec: TensorSpec) -> None:
        self._hash = xxhash.xxh3_128(f"{name}\0{spec.dtype}\0{spec.shape}\0".encode())
        self._never_counts = name == CHANNEL_MASK
        self._only_zeros = name.endswith(".mlp.gate.expert_bias")

    def update(self, piece: Tensor) -> None:
        """Add the next rows. piece: contiguous, on the CPU."""
        if self._never_counts:
            return
        self._only_zeros = self._only_zeros and not bool(piece.any())
        # The hash lets go of the interpreter lock while it reads.
        self._hash.update(piece.detach().reshape(-1).view(torch.uint8).numpy().data)

    def result(self) -> str | None:
        """32 hex digits; None for a tensor that doesn't count."""
        return None if self._never_counts or self._only_zeros else self._hash.hexdigest()
