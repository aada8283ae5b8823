"""Loading by slice: what each rank reads of a checkpoint and holds afterwards. One launch for all."""

import math
from collections import Counter
from pathlib import Path

import dist_tiny
import pytest
import torch
from dist_launch import launch_ranks, read_json
from transformers.initialization import no_init_weights

from lumina_ft.models.hf_keys import parse_split
from lumina_ft.models.native import model_tensors
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.models.weights import save_model

CASES = range(8)
"""Seven combinations of ZeRO stage, dtype, layout and spreading, and one with parameters offloaded to the CPU."""

BUFFERS = ("expert_bias", "channel_mask")


def write_checkpoint(config: U2Config, directory: Path, layout: str) -> None:
    with no_init_weights():
        model = U2ForDiffusion(config)
    model.init_weights_(3)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.rand(buffer.shape, generator=torch.Generator().manual_seed(5)))
    save_model(model, directory, layout=layout)


def run_ranks(work: Path, *, ranks: int, experts: int) -> dict:
    path = dist_tiny.write_model_config(work)
    for layout in ("packed", "split"):
        write_checkpoint(U2Config.load(path), work / layout, layout)
    # 130 MB in a few large tensors: the kernel maps up to 2 MB around each place that is touched.
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "moe_intermediate_size": 2048}
    wide = U2Config(**{**dist_tiny.MODEL_CONFIG, **sizes, "num_hidden_layers": 2})
    write_checkpoint(wide, work / "wide", "packed")
    launch_ranks("ranks_load.py", work, experts, ranks=ranks)
    record = read_json(work / "load.json")
    return record | {"cases": [*record["cases"], record["offloaded"]], "config": U2Config.load(path)}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return run_ranks(tmp_path_factory.mktemp("load"), ranks=2, experts=2)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return run_ranks(tmp_path_factory.mktemp("load4"), ranks=4, experts=2)


def parameter_reads(case: dict) -> list[list[tuple[str, int, int]]]:
    """Per rank. Buffers are whole on every rank, and the channel mask is looked at before it is copied."""
    return [[read for read in reads if not read[0].endswith(BUFFERS)] for reads in case["reads"]]


def expert_shares(record: dict, case: dict, experts: int) -> None:
    """Every rank has read its experts' elements only, and all ranks together each element as often as it is kept."""
    ranks = len(case["reads"])
    spread = experts if case["spread"] else 1
    replicas = ranks // spread
    held = Counter()
    for rank, reads in enumerate(parameter_reads(case)):
        for key, start, stop in reads:
            assert start < stop, "an empty read"
            held.update((key, i) for i in range(start, stop))
            native, expert = parse_split(key) or (key, None)
            if ".mlp.experts." not in native or spread == 1:
                continue
            shape = model_tensors(record["config"]).shapes[native]
            row = math.prod(shape[1:])
            rows = {expert} if expert is not None else set(range(start // row, -(-stop // row)))
            own = shape[0] // spread
            assert rows <= set(range(rank % spread * own, (rank % spread + 1) * own)), (rank, key, start, stop)
    for (key, _), times in held.items():
        whole = replicas if ".mlp.experts." in key else ranks
        assert times == (1 if case["zero"] == 3 else whole), key
    shapes = model_tensors(record["config"]).shapes
    assert len(held) == sum(math.prod(shape) for name, shape in shapes.items() if not name.endswith(BUFFERS))


@pytest.mark.parametrize("number", CASES)
def test_loading_by_slice_gives_the_bits_of_loading_whole_tensors(record, number: int):
    assert record["cases"][number]["different"] == [[], []]


@pytest.mark.parametrize("number", CASES)
def test_a_rank_reads_its_own_experts_and_its_own_partition_and_nothing_else(record, number: int):
    case = record["cases"][number]
    expert_shares(record, case, experts=2)
    read = [sum(stop - start for _, start, stop in reads) for reads in parameter_reads(case)]
    assert read == case["kept"]


def test_tensors_that_the_ranks_cannot_halve_are_whole_again_when_gathered(record):
    assert record["odd_sizes"] == [[True] * 3] * 2


def test_second_partitions_of_a_machine_are_filled_too(record):
    assert record["doubled"] == [True, True]


def test_a_marked_parameter_gets_its_ranks_rows(record):
    assert record["marked"] == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]]


def test_a_rank_maps_no_more_of_the_files_than_it_keeps(record):
    """Counted by the kernel, at its page sizes."""
    mapped = record["mapped"]
    for resident, kept in zip(mapped["resident"], mapped["kept"], strict=True):
        assert kept < 0.51 * mapped["file"]
        assert 0.95 * kept < resident < 0.7 * mapped["file"]


@pytest.mark.slow
@pytest.mark.parametrize("number", CASES)
def test_four_ranks_with_two_replicas_of_each_expert(four_ranks, number: int):
    case = four_ranks["cases"][number]
    assert case["different"] == [[]] * 4
    expert_shares(four_ranks, case, experts=2)
    assert four_ranks["odd_sizes"] == [[True] * 3] * 4
