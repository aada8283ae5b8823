"""Native view of a checkpoint: every tensor of the model by its own name, row by row, whatever the layout on disk."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lumina_ft.errors import CheckpointError
from lumina_ft.models.hf_keys import Layout, detect_layout, parse_split
from lumina_ft.models.matching import keys_by_native_name
from lumina_ft.models.tensor_files import CheckpointReader, TensorSpec
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config

Result = TypeVar("Result")

_PIECE_ELEMENTS = 1 << 20
"""Elements of a piece of rows: small enough for caches, large enough that a call per piece costs nothing."""


class NativeTensor(NamedTuple):
    """Where a tensor lies.

    Attributes:
        spec: shape and dtype of the whole tensor.
        keys: one, or one per expert in the split layout.
        stacked: the keys are experts.
    """

    spec: TensorSpec
    keys: tuple[str, ...]
    stacked: bool


class NativeReader:
    """An open checkpoint whose tensors are read in rows: views of the mapped files, without copies.

    Attributes:
        layout: of the files.
        tensors: every tensor by native name.

    Raises:
        CheckpointError: a damaged checkpoint, experts that are missing or differ in shape or dtype.
    """

    def __init__(self, directory: Path) -> None:
        self.reader = CheckpointReader(Path(directory))
        try:
            self.layout: Layout = detect_layout(self.reader.tensors, str(directory))
            keys = keys_by_native_name(self.reader)
            self.tensors = {name: _native(self.reader, name, experts) for name, experts in keys.items()}
        except BaseException:
            self.reader.close()
            raise

    def rows(self, name: str, rows: slice) -> Tensor:
        """Some rows (of stacked experts: one expert, if the layout is split) of a tensor."""
        tensor = self.tensors[name]
        if not tensor.stacked:
            return self.reader.read(tensor.keys[0])[rows]
        assert rows.stop - rows.start == 1, f"{name}: {rows} are several files' rows"
        return self.reader.read(tensor.keys[rows.start]).unsqueeze(0)

    def pieces(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """All rows of a tensor in order, as (rows, view)."""
        for rows in row_pieces(self.tensors[name].spec.shape):
            yield rows, self.rows(name, rows)

    def __enter__(self) -> "NativeReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()


def row_pieces(shape: Sequence[int]) -> list[slice]:
    """Rows in pieces of bounded size; of stacked tensors (three or more axes) one at a time.

    Every reader of a tensor cuts it at the same places, so that pieces of two checkpoints can be compared.
    """
    elements = 1
    for size in shape[1:]:
        elements *= size
    step = 1 if len(shape) > 2 else max(1, _PIECE_ELEMENTS // max(1, elements))
    return [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def for_each_tensor(work: Callable[[str], Result], names: Iterable[str]) -> list[Result]:
    """Call `work` for tensors in threads: pages of one are read while those of another are hashed, written or compared.

    Returns:
        Results in the order of `names`. The first name whose work fails ends everything that hasn't begun.
    """
    # More threads than processors hide waiting for the disk; each holds a few pieces in memory.
    with ThreadPoolExecutor(min(8, 1 + (os.cpu_count() or 1))) as pool:
        futures = [pool.submit(work, name) for name in names]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _native(reader: CheckpointReader, name: str, experts: dict[int, str]) -> NativeTensor:
    if sorted(experts) != list(range(len(experts))):
        missing = next(expert for expert in range(len(experts)) if expert not in experts)
        raise CheckpointError(
            f"{reader.directory} — {name}: expert {missing} is missing, expert {max(experts)} is there — "
            "a checkpoint holds every expert — download or copy it again"
        )
    keys = tuple(experts[expert] for expert in range(len(experts)))
    first = reader.tensors[keys[0]]
    for key in keys[1:]:
        other = reader.tensors[key]
        if (other.dtype, other.shape) != (first.dtype, first.shape):
            raise CheckpointError(
                f"{other.file} — {key} is {other.dtype} {list(other.shape)}, expert 0 is {first.dtype} "
                f"{list(first.shape)} — the experts of a layer share shape and dtype — convert the checkpoint to one"
            )
    stacked = parse_split(keys[0]) is not None
    shape = (len(keys), *first.shape) if stacked else first.shape
    return NativeTensor(TensorSpec(shape, reader.dtype(keys[0])), keys, stacked)


class ModelTensors(NamedTuple):
    """Persistent tensors of a model that isn't there.

    Attributes:
        shapes: by native name, in the order of checkpoints.
        buffers: names of those whose dtype is fixed, whatever the dtype of the weights.
    """

    shapes: dict[str, tuple[int, ...]]
    buffers: frozenset[str]


def model_tensors(config: U2Config) -> ModelTensors:
    """Names and shapes of a model's tensors; nothing is allocated."""
    with torch.device("meta"):
        model = U2ForDiffusion(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return ModelTensors(shapes, frozenset(name for name, _ in model.named_buffers() if name in shapes))


def channel_mask(num_codebooks: int) -> Tensor:
    """The causal mask over codebooks as the published code stores it: [C, C] bf16, -inf above the diagonal."""
    return torch.full((num_codebooks, num_codebooks), -torch.inf, dtype=torch.bfloat16).triu(1)
