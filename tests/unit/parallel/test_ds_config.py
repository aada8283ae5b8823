"""DeepSpeed JSON: presets, automatic values, contradictions."""

import json

import pytest

from lumina_ft.errors import ConfigError
from lumina_ft.parallel.ds_config import ZeroSettings, read_ds_config, resolve_ds_config
from lumina_ft.parallel.engine import check_zero_block


def settings(**changes) -> ZeroSettings:
    values = dict(
        world_size=2, micro_batches=4, dtype="bfloat16", max_grad_norm=1.0, trainable_numel=10**9, overlap=True
    )
    return ZeroSettings(**{**values, **changes})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_presets_resolve_without_any_auto_left(stage):
    config = resolve_ds_config(read_ds_config(f"zero{stage}"), settings())
    assert "auto" not in json.dumps(config)
    assert config["zero_optimization"]["stage"] == stage
    assert config["train_batch_size"] == 8
    assert config["gradient_accumulation_steps"] == 4
    assert config["gradient_clipping"] == 1.0
    assert config["bf16"]["enabled"] is True


def test_fp32_has_no_mixed_precision_block():
    assert "bf16" not in resolve_ds_config(read_ds_config("zero3"), settings(dtype="float32"))


def test_buckets_are_no_larger_than_what_is_trained():
    zero = resolve_ds_config(read_ds_config("zero2"), settings(trainable_numel=12_345, overlap=False))
    assert zero["zero_optimization"]["reduce_bucket_size"] == 12_345
    assert zero["zero_optimization"]["overlap_comm"] is False


def test_given_numbers_stay():
    raw = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 77}}
    zero = resolve_ds_config(raw, settings())["zero_optimization"]
    assert zero["stage3_param_persistence_threshold"] == 0
    assert zero["reduce_bucket_size"] == 77


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"optimizer": {"type": "Adam"}}, r"optimizer — block present .* set optim\.\*"),
        ({"scheduler": {}}, r"scheduler .* optim\.schedule"),
        ({"fp16": {"enabled": True}}, r"fp16 .* model\.dtype"),
        ({"bf16": {"enabled": True}}, r"bf16 .* model\.dtype decides"),
        ({"gradient_clipping": 0.3}, r"gradient_clipping — 0\.3 — must be 1\.0 \(optim\.max_grad_norm\)"),
        ({"train_batch_size": 64}, r"train_batch_size — 64 — must be 8 \(train\.packs_per_step\)"),
        ({"gradient_acumulation_steps": 4}, r"not supported; did you mean 'gradient_accumulation_steps'"),
        ({"zero_optimization": {"stage": 4}}, r"stage — 4 — must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2, "sub_group_size": "auto"}}, r"sub_group_size — 'auto' — .*no automatic"),
        ({"zero_optimization": {"stage": 1, "round_robin_gradients": True}}, r"round_robin_gradients — .* mix them up"),
    ],
)
def test_contradictions_name_the_key_and_the_fix(raw, message):
    with pytest.raises(ConfigError, match=message):
        resolve_ds_config(raw, settings())


@pytest.mark.parametrize(
    ("raw", "keys"),
    [
        ({}, ["parallel.expert_parallel_size"]),
        ({"zero_optimization": {"stage": 0}}, ["parallel.expert_parallel_size"]),
        (
            {"zero_optimization": {"stage": 2, "reduce_scatter": False, "contiguous_gradients": False}},
            ["zero_optimization.reduce_scatter", "zero_optimization.contiguous_gradients"],
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2, "zero_quantized_gradients": True}},
            ["zero_optimization.zero_hpz_partition_size", "zero_optimization.zero_quantized_gradients"],
        ),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, ["zero_optimization.zenflow"]),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
            ["zero_optimization.offload_optimizer.super_offload"],
        ),
        ({"gradient_predivide_factor": 2.0, "zero_optimization": {"stage": 1}}, ["gradient_predivide_factor"]),
        (
            {
                "prescale_gradients": True,
                "zero_optimization": {"stage": 2, "use_multi_rank_bucket_allreduce": False},
            },
            ["prescale_gradients", "zero_optimization.use_multi_rank_bucket_allreduce"],
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "zero_quantized_weights": True,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "disk"},
                    "offload_param": {"device": "nvme", "nvme_path": "disk"},
                }
            },
            [
                "zero_optimization.offload_optimizer.device",
                "zero_optimization.offload_param.device",
                "zero_optimization.zero_quantized_weights",
            ],
        ),
    ],
)
def test_what_rules_out_expert_parallelism_is_named_and_only_then_refused(raw, keys):
    resolve_ds_config(raw, settings())
    with pytest.raises(ConfigError) as caught:
        resolve_ds_config(raw, settings(expert_parallel_size=2))
    lines = str(caught.value).splitlines()
    assert len(lines) == len(keys)
    for line, key in zip(lines, keys, strict=True):
        assert key in line.split(" — ")[0]
        assert "expert_parallel_size" in line


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_presets_and_offload_work_with_expert_parallelism(stage):
    raw = read_ds_config(f"zero{stage}")
    raw["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    assert resolve_ds_config(raw, settings(expert_parallel_size=2))["zero_optimization"]["stage"] == stage


def test_agreeing_values_are_accepted():
    raw = {"gradient_clipping": 1.0, "train_batch_size": "auto", "zero_optimization": {"stage": 2}}
    assert resolve_ds_config(raw, settings())["train_batch_size"] == 8


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_accepts_what_the_presets_resolve_to(stage):
    check_zero_block(resolve_ds_config(read_ds_config(f"zero{stage}"), settings()))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"stage3_param_persistance_threshold": 1}, r"did you mean 'stage3_param_persistence_threshold'\? — fix"),
        ({"reduce_bucket_size": "many"}, r"zero_optimization\.reduce_bucket_size — 'many' — .*valid integer"),
        ({"offload_optimizer": {"device": "gpu"}}, r"zero_optimization\.offload_optimizer\.device — 'gpu' — .*'cpu'"),
    ],
)
def test_what_deepspeed_refuses_inside_its_block_is_an_error_of_the_users(block, message):
    with pytest.raises(ConfigError, match=message):
        check_zero_block(resolve_ds_config({"zero_optimization": {"stage": 3, **block}}, settings()))


def test_unknown_preset_is_suggested():
    with pytest.raises(
        ConfigError, match=r"'zeri3' — must be one of zero0, zero1, zero2, zero3 .* did you mean 'zero3'"
    ):
        read_ds_config("zeri3")


def test_broken_json_names_the_file(tmp_path):
    path = tmp_path / "my.json"
    path.write_text("{,}")
    with pytest.raises(ConfigError, match=r"my\.json: .* must be readable JSON"):
        read_ds_config(str(path))
