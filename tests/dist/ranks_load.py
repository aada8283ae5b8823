"""Rank script: what each rank reads of a checkpoint, and what its model then holds. Arguments: work directory, EP size.

Writes `load.json` on rank 0, which `test_load.py` judges.
"""

import json
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.initialization import no_init_weights

from lumina_ft.models.tensor_files import CheckpointReader
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.models.weights import Fill, load_weights
from lumina_ft.parallel.dist import init_distributed
from lumina_ft.parallel.ds_config import ZeroSettings, resolve_ds_config
from lumina_ft.parallel.expert_parallel import join_experts, share_experts, sharing_of
from lumina_ft.parallel.zero3 import (
    FlatReader,
    fill_tensor,
    full_shape,
    gathered,
    init_context,
    is_partitioned,
    write_tensor,
)

WORK = Path(sys.argv[1])
CONFIG = U2Config.load(WORK / "packed")
WORLD = init_distributed("load", 5.0)
EXPERTS = join_experts(int(sys.argv[2]))
torch.set_num_threads(1)


def resolved(zero: int, **block: object) -> dict[str, Any]:
    settings = ZeroSettings(WORLD.size, 1, "float32", 1.0, 5000, overlap=False)
    return resolve_ds_config({"zero_optimization": {"stage": zero, **block}}, settings)


def empty_model(
    zero: int, dtype: torch.dtype, *, spread: bool, config: U2Config = CONFIG, **block: object
) -> U2ForDiffusion:
    with init_context(resolved(zero, **block), dtype), no_init_weights():
        model = U2ForDiffusion(config, expert_parallel=EXPERTS if spread else None)
    return model if zero == 3 else model.to(dtype)


def whole_and_written(target: torch.Tensor, read: FlatReader) -> None:
    """Every rank reads everything, and the ranks divide it among them afterwards."""
    shape = full_shape(target)
    write_tensor(target, torch.cat(list(read(0, shape.numel()))).view(shape))


@contextmanager
def counted_reads() -> Iterator[list[tuple[str, int, int]]]:
    """(key, start, stop) of everything that is read of the files' tensors inside the block."""
    reads: list[tuple[str, int, int]] = []
    elements, everything = CheckpointReader.read_elements, CheckpointReader.read

    def note_elements(self: CheckpointReader, key: str, start: int, stop: int) -> torch.Tensor:
        reads.append((key, start, stop))
        return everything(self, key).view(-1)[start:stop]

    def note_everything(self: CheckpointReader, key: str) -> torch.Tensor:
        reads.append((key, 0, math.prod(self.tensors[key].shape)))
        return everything(self, key)

    CheckpointReader.read_elements, CheckpointReader.read = note_elements, note_everything
    try:
        yield reads
    finally:
        CheckpointReader.read_elements, CheckpointReader.read = elements, everything


def kept(model: nn.Module) -> dict[str, torch.Tensor]:
    """What this rank has of every tensor: its partition without padding, or the tensor."""
    stored = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        managed: Any = tensor
        if is_partitioned(tensor):
            start = managed.ds_tensor.ds_numel * torch.distributed.get_rank(managed.ds_process_group)
            tensor = managed.ds_tensor[: max(0, managed.ds_numel - start)]
        stored[name] = tensor.detach().clone()
    return stored


def load(model: U2ForDiffusion, layout: str, fill: Fill = fill_tensor) -> list[tuple[str, int, int]]:
    with counted_reads() as reads:
        assert load_weights(model, WORK / layout, fill=fill) == layout
    return reads


def compare(zero: int, dtype: torch.dtype, layout: str, *, spread: bool, **block: object) -> dict[str, Any]:
    """Load by slice, and whole tensor by whole tensor."""
    model = empty_model(zero, dtype, spread=spread, **block)
    reads = load(model, layout)
    by_slice = kept(model)
    again = empty_model(zero, dtype, spread=spread, **block)
    load(again, layout, whole_and_written)
    written = kept(again)
    different = [
        name
        for name, tensor in written.items()
        if tensor.dtype != by_slice[name].dtype or not torch.equal(tensor, by_slice[name])
    ]
    return {
        "zero": zero,
        "spread": spread,
        "layout": layout,
        "dtype": str(dtype),
        "different": WORLD.gather_objects(different),
        "kept": WORLD.gather_objects(sum(by_slice[name].numel() for name, _ in model.named_parameters())),
        "reads": WORLD.gather_objects(reads),
    }


def odd_sizes() -> list[bool]:
    """Tensors that two ranks can't halve: the last partition is padded, or holds nothing at all."""
    with init_context(resolved(3), torch.float32):
        module = nn.ParameterList([nn.Parameter(torch.empty(shape)) for shape in ((3, 3), (1,), (2, 5))])
    found = []
    for param in module:
        value = torch.arange(1.0, full_shape(param).numel() + 1)
        fill_tensor(param, lambda start, stop, value=value: (value[i : i + 1] for i in range(start, stop)))
        with gathered([param]):
            found.append(torch.equal(param.detach().view(-1), value))
    return found


def doubled_partitions() -> list[bool]:
    """ZeRO++'s second partitions, which a forward pass gathers instead of the first ones, are filled too."""
    model = empty_model(3, torch.float32, spread=False, zero_hpz_partition_size=2)
    load(model, "packed")
    found = []
    with CheckpointReader(WORK / "packed") as reader:
        for name, param in model.named_parameters():
            managed: Any = param
            managed.all_gather_coalesced([param]).wait()
            found.append(torch.equal(param, reader.read(name)))
            managed.partition()
    return found


def marked_parameter() -> list[float]:
    """An adapter's expert tensor [E, 3] gets its own rows, without ZeRO."""
    assert EXPERTS is not None
    param = nn.Parameter(torch.empty(4 // EXPERTS.size, 3))
    share_experts(param, EXPERTS)
    assert sharing_of(param) is EXPERTS
    value = torch.arange(12.0)
    fill_tensor(param, lambda start, stop: [value[start:stop]])
    return param.detach().view(-1).tolist()


def mapped_bytes() -> dict[str, Any]:
    """Bytes of the checkpoint that this process has in memory at the end of loading, as the kernel counts them."""
    resident: list[int] = []

    def fill(target: torch.Tensor, read: FlatReader) -> None:
        fill_tensor(target, read)
        resident.append(_resident("model.safetensors"))

    directory = WORK / "wide"
    model = empty_model(3, torch.float32, spread=True, config=U2Config.load(directory))
    load_weights(model, directory, fill=fill)
    return {
        "resident": WORLD.gather_objects(resident[-1]),
        "file": (directory / "model.safetensors").stat().st_size,
        "kept": WORLD.gather_objects(sum(t.numel() * t.itemsize for t in kept(model).values())),
    }


def _resident(name: str) -> int:
    """Bytes of mappings of a file that are in memory, read from the process's own page tables."""
    total, counting = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counting = line.endswith(name)
        elif counting and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def main() -> None:
    cases = [
        compare(zero, dtype, layout, spread=spread)
        for zero, dtype, layout, spread in (
            (2, torch.float32, "packed", False),
            (3, torch.bfloat16, "packed", False),
            (3, torch.float32, "split", False),
            (2, torch.float32, "packed", True),
            (2, torch.bfloat16, "split", True),
            (3, torch.bfloat16, "packed", True),
            (3, torch.float32, "split", True),
        )
    ]
    offloaded = compare(3, torch.float32, "packed", spread=True, offload_param={"device": "cpu"})
    record = {
        "cases": cases,
        "offloaded": offloaded,
        "odd_sizes": WORLD.gather_objects(odd_sizes()),
        "doubled": WORLD.gather_objects(all(doubled_partitions())),
        "marked": WORLD.gather_objects(marked_parameter()),
        "mapped": mapped_bytes(),
    }
    if WORLD.is_main:
        (WORK / "load.json").write_text(json.dumps(record))
    WORLD.close()


main()
