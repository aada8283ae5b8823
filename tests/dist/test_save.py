"""Checkpoints that two ranks write together: files, contents, adapters, failing disks."""

import re
from pathlib import Path

import dist_tiny
import pytest
from dist_launch import launch_ranks, read_json

PLAIN = ("3", "2", "0")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict:
    work: Path = tmp_path_factory.mktemp("save")
    dist_tiny.prepare(work, samples=30)
    launch_ranks("ranks_save.py", work)
    return read_json(work / "save.json")


@pytest.fixture(params=range(3), ids=[f"zero{zero}" for zero in PLAIN])
def plain(records, request) -> dict:
    return records["plain"][request.param]


@pytest.fixture(params=range(3), ids=["zero3", "zero3-pissa", "zero2-pissa"])
def adapted(records, request) -> dict:
    return records["adapted"][request.param]


def test_small_checkpoints_are_one_file_each_and_large_ones_are_spread_over_the_ranks(plain):
    sharded, whole = plain["files"]["checkpoint-1"], plain["files"]["checkpoint-3"]
    assert {"model/model.safetensors", "optimizer/optimizer.safetensors", "state.json"} <= set(whole)
    for folder in ("model", "optimizer"):
        shards = [name for name in sharded if re.fullmatch(rf"{folder}/{folder}-\d{{5}}-of-\d{{5}}\.safetensors", name)]
        assert len(shards) > 4 and f"{folder}/{folder}.safetensors.index.json" in sharded
    assert plain["owners"] == [0, 1]


def test_shards_of_two_writers_hold_what_the_engine_holds(plain):
    assert plain["same_weights"] == plain["same_state"] == [True, True] and plain["keys"]


def test_saving_a_step_twice_writes_it_once(plain):
    assert plain["untouched"]


def test_a_full_disk_of_one_rank_ends_all_with_the_same_error_and_costs_nothing_else(plain):
    for rank, told in zip((1, 0, 0), plain["errors"], strict=False):
        assert told[0] == told[1]
        assert re.match(rf"rank {rank} — \S*/\w+-\d+-of-\d+\.safetensors — No space left on device — ", told[0])
        assert "checkpoint-2 needs" in told[0] and "checkpoint-1 is intact" in told[0]
    assert plain["left"] == ["checkpoint-1", "checkpoint-3"] and plain["intact"] == []


def test_a_weight_that_is_not_finite_is_named_on_every_rank(records):
    for plain in records["plain"][1:]:
        told = plain["errors"][-1]
        assert told[0] == told[1]
        assert re.search(
            r"^model/model.*\.safetensors — lm_head\.weight — holds values .*checkpoint-3 is intact", told[0]
        )


def test_D5_an_adapter_brings_its_base_along_only_where_there_is_none_on_disk(adapted):
    random, kept, unstorable = adapted["random"], adapted["kept"], adapted["unstorable"]
    assert random["folders"] == unstorable["folders"] == ["adapter", "model", "optimizer"]
    assert (random["base"], random["changed_groups"], random["modules"]) == (None, [], [])
    assert kept["folders"] == ["adapter", "optimizer"]
    assert kept["base"] == "checkpoints/checkpoint-1/model"
    assert (kept["changed_groups"], kept["modules"]) == (["lm_head"], ["lm_head"])
    assert adapted["base_is_original"] and adapted["reads_back"]


def test_D5_every_adapter_names_its_base_by_hash_and_can_be_sampled_with_it(adapted):
    for name in ("random", "kept", "unstorable", "dropped", "alone"):
        assert adapted[name]["identity"], name
        assert {"tokenizer.json", "sampling.json", "adapter_config.json", "adapter_model.safetensors"} <= set(
            adapted[name]["companions"]
        )


def test_D5_a_merge_leaves_a_plain_model(adapted):
    assert adapted["merged"]["folders"] == ["model", "optimizer"]
    assert (adapted["merged"]["adapter"], adapted["merged"]["base"]) == ("none", None)
    assert adapted["merged_equal"] and adapted["merged_differs"]


def test_D5_a_dropped_adapter_stays_on_disk_and_takes_no_trained_head_with_it(adapted):
    assert (adapted["dropped"]["adapter"], adapted["alone"]["adapter"]) == ("dropped", "dropped")
    assert adapted["dropped"]["folders"] == ["adapter", "model", "optimizer"]
    assert adapted["alone"]["folders"] == ["adapter", "optimizer"]
    assert adapted["alone"]["base"].endswith("checkpoint-1/model")
    assert adapted["dropped_layout"] == "packed"
