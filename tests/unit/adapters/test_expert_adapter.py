"""Adapters on routed experts, in PEFT's `target_parameters` format both ways (M8, D5)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_fixtures import answers, meta_model, save_base, train, trained
from merge_fixtures import tiny_config
from safetensors.torch import load_file, save_file
from small_u2 import small_config

from lumina_ft.adapters.delta import delta_cosine
from lumina_ft.adapters.expert_layout import stack_a, stack_b, unstack_a, unstack_b
from lumina_ft.adapters.files import read_adapter, write_adapter
from lumina_ft.adapters.live import live_pair
from lumina_ft.adapters.lora import attach_adapter, load_adapter, merged_weight
from lumina_ft.adapters.targets import TargetRow, plan_targets, summarise_targets
from lumina_ft.config.lora_schema import LoraConfig
from lumina_ft.errors import CheckpointError, ConfigError
from lumina_ft.models.groups import group_of, is_adapter_b, is_adapter_name
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.parallel.expert_parallel import ExpertParallel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BLOCK = "model.layers.1.mlp.experts"
KEY = f"base_model.model.{BLOCK}"
ROUNDING = 1e-6
PATTERNS: dict[str, Any] = {
    "rank_pattern": {"experts.up_proj": 2, "experts.down_proj": 5},
    "alpha_pattern": {"experts.down_proj": 3.5, "experts.gate_proj": 2},
}


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    trained(base, tmp_path / "adapter", LoraConfig(rank=3, alpha=6, targets=("experts",)))
    return tmp_path / "adapter"


def wrappers(model: Any) -> dict[str, Any]:
    """PEFT's wrappers of one layer's experts by the parameter that each adapts."""
    found, module = {}, model.get_submodule(f"base_model.model.{BLOCK}")
    while hasattr(module, "parameter_name"):
        found[module.parameter_name] = module
        module = module.base_layer
    return found


def test_D5_a_rows_are_expert_major_and_b_columns_rank_major():
    num_experts, rank = 3, 2
    a, b = torch.arange(24.0).view(num_experts, rank, 4), torch.arange(30.0).view(num_experts, 5, rank)
    flat_a, flat_b = stack_a(a), stack_b(b)
    assert flat_a.shape == (6, 4) and flat_b.shape == (5, 6)
    for expert in range(num_experts):
        for k in range(rank):
            assert torch.equal(flat_a[expert * rank + k], a[expert, k])
            assert torch.equal(flat_b[:, k * num_experts + expert], b[expert, :, k])
    assert torch.equal(unstack_a(flat_a, num_experts), a) and torch.equal(unstack_b(flat_b, num_experts), b)


def test_D5_peft_forms_the_same_update_of_every_expert(base, adapter):
    """Not only the answers, which depend on the experts that a sample reaches."""
    from peft import PeftModel

    peft = PeftModel.from_pretrained(U2ForDiffusion.from_pretrained(base), str(adapter))
    file = read_adapter(adapter)
    for projection, wrapper in wrappers(peft).items():
        pair = file.pair(f"{BLOCK}.{projection}")
        wanted = wrapper.get_delta_weight("default")
        assert torch.allclose(pair.scale * (pair.b @ pair.a), wanted, rtol=0, atol=1e-7), projection
        assert all(float(expert.abs().max()) > 1e-3 for expert in wanted)
    assert len(wrappers(peft)) == 3


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        ("stack_a", lambda a: a.transpose(0, 1).reshape(-1, a.shape[2])),
        ("stack_b", lambda b: b.permute(1, 0, 2).reshape(b.shape[1], -1)),
        ("stack_b", lambda b: stack_b(b.roll(1, 0))),
        ("wrapper_names", lambda targets: dict(zip(names := list(targets), _nested_backwards(names), strict=True))),
    ],
    ids=["a_rank_major", "b_expert_major", "experts_permuted_by_one", "nested_backwards"],
)
def test_D5_faults_of_the_layout_would_show(base, tmp_path, monkeypatch, function, fault):
    """None of them changes a shape, so PEFT loads the file without a word."""
    from peft import PeftModel

    monkeypatch.setattr(f"lumina_ft.adapters.files.{function}", fault)
    model, _ = trained(
        base, tmp_path / "a", LoraConfig(rank=3, alpha=6, targets=("experts.gate_proj", "experts.up_proj"))
    )
    peft = PeftModel.from_pretrained(U2ForDiffusion.from_pretrained(base), str(tmp_path / "a"))
    assert float((answers(peft) - answers(model)).abs().max()) > 1000 * ROUNDING


def _nested_backwards(names: list[str]) -> list[str]:
    return [names[0].rpartition(".")[0] + ".base_layer" * depth for depth in range(len(names))]


def test_D5_peft_gives_each_projection_its_own_rank_and_scale(base, tmp_path):
    from peft import PeftModel

    cfg = LoraConfig(rank=4, alpha=8, targets=("experts", "attention"), **PATTERNS)
    model, adapter = trained(base, tmp_path / "adapter", cfg)
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert config["rank_pattern"]["down_proj"] == 5 and config["r"] == 4
    # It says so although it uses them: its check looks at modules alone.
    with pytest.warns(RuntimeWarning, match="did not match any targeted module and were ignored"):
        peft = PeftModel.from_pretrained(U2ForDiffusion.from_pretrained(base), str(tmp_path / "adapter"))
    found = {name: (w.r["default"], w.scaling["default"]) for name, w in wrappers(peft).items()}
    wanted = {t.module.rpartition(".")[2]: (t.rank, t.scale) for t in adapter.targets if t.num_experts}
    assert found == wanted == {"gate_proj": (4, 0.5), "up_proj": (2, 4.0), "down_proj": (5, 0.7)}
    assert torch.allclose(answers(peft), answers(model), rtol=0, atol=ROUNDING)


def test_D5_entries_say_experts_and_patterns_are_for_the_layers(base, tmp_path):
    """PEFT warns about patterns for parameters; and `gate_proj` alone would read like the layers of that name."""
    cfg = LoraConfig(rank=4, alpha=8, targets=("experts", "attention"), rank_pattern={"experts": 2})
    trained(base, tmp_path / "adapter", cfg)
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert config["target_parameters"] == ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]
    assert config["r"] == 2 and config["rank_pattern"] == {"query_key_value": 4, "dense": 4}


def test_D5_layers_may_have_different_projections(tmp_path):
    """Nesting is a matter of each layer."""
    from peft import PeftModel

    plain = U2ForDiffusion(small_config(num_hidden_layers=4))
    plain.init_weights_(2)
    plain.save_pretrained(tmp_path / "base")
    block = "model.layers.{}.mlp.experts.{}_proj"
    names = [block.format(*at) for at in ((1, "down"), (2, "gate"), (2, "down"), (3, "up"), (3, "gate"), (3, "down"))]
    model, _ = trained(tmp_path / "base", tmp_path / "adapter", LoraConfig(rank=4, alpha=8, targets=tuple(names)))
    keys = [k for k in load_file(tmp_path / "adapter" / WEIGHTS) if k.endswith("lora_A.weight")]
    depths = {layer: sorted(key.count("base_layer") for key in keys if f".{layer}.mlp" in key) for layer in (1, 2, 3)}
    assert depths == {1: [0], 2: [0, 1], 3: [0, 1, 2]}
    assert set(read_adapter(tmp_path / "adapter").targets) == set(names)
    peft = PeftModel.from_pretrained(U2ForDiffusion.from_pretrained(tmp_path / "base"), str(tmp_path / "adapter"))
    assert torch.allclose(answers(peft), answers(model), rtol=0, atol=ROUNDING)
    loaded = U2ForDiffusion.from_pretrained(tmp_path / "base")
    load_adapter(loaded, tmp_path / "adapter")
    assert torch.equal(answers(loaded), answers(model))


@pytest.mark.filterwarnings("ignore:The following")
@pytest.mark.parametrize(
    "options",
    [
        {"target_parameters": ["mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj"]},
        {"target_parameters": ["down_proj", "up_proj"], "target_modules": [], "use_rslora": True},
        {"target_parameters": [f"{BLOCK}.gate_proj"], "target_modules": ["dense"]},
        {
            "target_parameters": ["experts.gate_proj", "experts.up_proj", "experts.down_proj"],
            "target_modules": ["query_key_value", "shared_experts.gate_proj"],
            "modules_to_save": ["lm_head"],
            **PATTERNS,
        },
    ],
)
def test_D5_an_adapter_that_peft_made_loads_here(base, tmp_path, options):
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    peft = get_peft_model(U2ForDiffusion.from_pretrained(base), PeftLoraConfig(r=4, lora_alpha=8, **options))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in peft.parameters():
            if param.requires_grad:
                param.add_(torch.randn(param.shape, generator=generator) * 0.1)
    peft.save_pretrained(str(tmp_path / "theirs"))
    loaded = U2ForDiffusion.from_pretrained(base)
    before = answers(loaded)
    adapter = load_adapter(loaded, tmp_path / "theirs")
    assert sum(bool(target.num_experts) for target in adapter.targets) == len(options["target_parameters"])
    assert torch.allclose(answers(loaded), answers(peft), rtol=0, atol=ROUNDING)
    assert float((answers(loaded) - before).abs().max()) > 1e-2


def test_bf16_answers_are_those_of_peft_within_rounding(tmp_path):
    from peft import PeftModel

    base = save_base(tmp_path / "base", torch.bfloat16)
    model, _ = trained(base, tmp_path / "adapter", LoraConfig(rank=4, alpha=8, targets=("experts", "attention")))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    peft = PeftModel.from_pretrained(U2ForDiffusion.from_pretrained(base), str(tmp_path / "adapter"))
    # PEFT rounds the merged weights to bf16, which this doesn't.
    assert torch.allclose(answers(peft).float(), answers(model).float(), rtol=0, atol=0.01)


def test_M8_dropout_is_trained_and_exported_as_none(base, tmp_path):
    cfg = LoraConfig(rank=3, alpha=6, targets=("experts", "attention"), dropout=0.25)
    model, adapter = trained(base, tmp_path / "adapter", cfg)
    experts: Any = model.get_submodule(BLOCK)
    assert {settings.dropout for settings in experts.lora.values()} == {0.25} and adapter.dropout == 0.25
    assert json.loads((tmp_path / "adapter" / CONFIG).read_text())["lora_dropout"] == 0.0
    again = U2ForDiffusion.from_pretrained(base)
    continued = attach_adapter(again, cfg, seed=1, source=tmp_path / "adapter")
    assert continued.dropout == 0.25 and again.get_submodule(BLOCK).lora == experts.lora
    frozen = U2ForDiffusion.from_pretrained(base)
    attach_adapter(frozen, cfg, seed=1, source=tmp_path / "adapter", frozen=True)
    silent: Any = frozen.get_submodule(BLOCK)
    assert {settings.dropout for settings in silent.lora.values()} == {0.0}


@pytest.mark.parametrize("use_rslora", [False, True])
def test_D5_a_loaded_adapter_is_written_as_it_was(base, tmp_path, use_rslora):
    cfg = LoraConfig(rank=4, alpha=8, targets=("experts", "attention"), use_rslora=use_rslora, **PATTERNS)
    trained(base, tmp_path / "first", cfg)
    model = U2ForDiffusion.from_pretrained(base)
    adapter = load_adapter(model, tmp_path / "first")
    write_adapter(tmp_path / "second", model, adapter, base=None, base_name=str(base), changed=())
    first, second = (read_adapter(tmp_path / name) for name in ("first", "second"))
    assert first.targets == second.targets
    assert first.targets[f"{BLOCK}.down_proj"].scale == pytest.approx(3.5 / (5**0.5 if use_rslora else 5))
    assert [target.module for target in adapter.targets] == [
        target.module for target in plan_targets(meta_model(), cfg)
    ]
    for name in (CONFIG, WEIGHTS):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_planned_names_and_sizes_are_the_live_ones(base):
    cfg = LoraConfig(rank=3, alpha=6, targets=("attention", "experts"))
    model, planned = U2ForDiffusion.from_pretrained(base), meta_model()
    adapter = attach_adapter(model, cfg, seed=1)
    attach_adapter(planned, cfg, seed=0)
    live = {name: param for name, param in model.named_parameters() if is_adapter_name(name)}
    assert {n: p.shape for n, p in planned.named_parameters() if is_adapter_name(n)} == {
        n: p.shape for n, p in live.items()
    }
    assert sum(target.numel for target in adapter.targets) == sum(p.numel() for p in live.values())
    assert {group_of(name) for name in live} == {"lora"}
    assert sum(is_adapter_b(name) for name in live) == len(adapter.targets)
    target = adapter.targets[-1]
    assert target.weight == target.module == f"{BLOCK}.down_proj" and target.num_experts == 4
    pair = live_pair(model, target)
    assert pair.weight.shape[1:] == (target.out_features, target.in_features)
    assert pair.a.shape == (4, 3, target.in_features) and pair.b.shape == (4, target.out_features, 3)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(live)


def test_M8_initial_values_dont_depend_on_who_holds_the_experts():
    """Each of two ranks gets its half of what one process draws."""
    cfg = LoraConfig(rank=3, alpha=6, targets=("experts", "attention"))
    whole = U2ForDiffusion(tiny_config())
    whole.init_weights_(1)
    attach_adapter(whole, cfg, seed=7)
    values = dict(whole.named_parameters())
    for rank in range(2):
        group: Any = None
        share = ExpertParallel(2, rank, "ep_size_2", group, group)
        part = U2ForDiffusion(tiny_config(), expert_parallel=share)
        adapter = attach_adapter(part, cfg, seed=7)
        assert {target.num_experts for target in adapter.targets} == {0, 4}
        for name, param in part.named_parameters():
            if is_adapter_name(name):
                wanted = values[name][share.local(4)] if BLOCK in name else values[name]
                assert torch.equal(param, wanted), name
    first, *others = values[f"{BLOCK}.gate_proj_lora_A"]
    assert not any(torch.equal(first, other) for other in others)
    assert (
        0.9
        < float(values[f"{BLOCK}.down_proj_lora_A"].detach().abs().max()) * tiny_config().moe_intermediate_size ** 0.5
        <= 1
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_M8_each_expert_is_merged_in_float64_and_rounded_once(tmp_path, dtype):
    base = save_base(tmp_path / "base", dtype)
    cfg = LoraConfig(rank=3, alpha=6, targets=("experts",))
    model, adapter = trained(base, tmp_path / "adapter", cfg)
    for target in adapter.targets:
        live = live_pair(model, target)
        weight, a, b = (param.detach() for param in (live.weight, live.a, live.b))
        delta = target.scale * torch.einsum("eor,eri->eoi", b.double(), a.double())
        merged = merged_weight(model, target)
        # Sums of three products: no value here is within 2^-50 of a tie.
        assert torch.equal(merged.weight, (weight.double() + delta).to(dtype))
        flat = [x.flatten(0, 1) for x in (weight, merged.weight, delta)]
        assert merged.cosine == pytest.approx(delta_cosine(*flat), abs=1e-12)


@pytest.mark.parametrize("target", ["experts", "attention"])
def test_a_model_directory_holds_no_adapter(base, tmp_path, target):
    """It would be one that nothing loads."""
    model = U2ForDiffusion.from_pretrained(base)
    attach_adapter(model, LoraConfig(rank=2, targets=(target,)), seed=1)
    with pytest.raises(CheckpointError, match="lora_A.* — a model directory holds no adapter"):
        model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_what_can_be_stored_beside_experts(base, tmp_path):
    _, adapter = trained(base, tmp_path / "adapter", LoraConfig(rank=2, targets=("experts",)))
    assert adapter.can_store({"lm_head"}) and not adapter.can_store({"experts"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"targets": ("gate_proj",)},
            r"lora.targets — 'gate_proj' — names linear layers \(model.layers.0.mlp.gate_proj, …\) and routed experts "
            rf"\({BLOCK}.gate_proj, …\).* write experts.gate_proj for the experts, and mlp.gate_proj and shared_expe",
        ),
        ({"targets": ("attention", "experts"), "use_dora": True}, "lora.use_dora — true with 'experts'"),
        ({"targets": ("experts.up_proj",), "init": "pissa"}, "lora.init — pissa with 'experts.up_proj'"),
        ({"targets": ("experts",), "rank_pattern": {"router": 2}}, "lora.rank_pattern — 'router' — this model has no"),
    ],
)
def test_D5_what_experts_cant_have_is_refused_before_any_weight_is_read(options, message):
    with pytest.raises(ConfigError, match=message):
        plan_targets(meta_model(), LoraConfig(rank=4, **options))


def test_D5_experts_are_not_the_shared_experts_nor_the_router():
    def modules(*targets: str) -> list[str]:
        return [t.module for t in plan_targets(meta_model(), LoraConfig(rank=4, targets=targets))]

    routed = [f"{BLOCK}.{part}_proj" for part in ("gate", "up", "down")]
    assert modules("experts") == modules("experts.down_proj", "experts.gate_proj", "experts.up_proj") == routed
    assert modules(f"{BLOCK}.up_proj") == modules("1.mlp.experts.up_proj") == [routed[1]]
    shared = modules("shared_experts")
    assert len(shared) == 3 and all(".shared_experts." in name for name in shared)
    cfg = LoraConfig(rank=4, targets=("experts", "shared_experts"), rank_pattern={"experts": 2})
    assert {t.module: t.rank for t in plan_targets(meta_model(), cfg)} == dict.fromkeys(routed, 2) | dict.fromkeys(
        shared, 4
    )


def test_the_table_counts_all_experts():
    cfg = LoraConfig(rank=4, targets=("experts",), rank_pattern={"experts.down_proj": 2})
    rows = summarise_targets(plan_targets(meta_model(), cfg))
    hidden, width = tiny_config().hidden_size, tiny_config().moe_intermediate_size
    assert rows == [
        TargetRow("experts", 2, hidden, width, 4, 2 * 4 * 4 * (hidden + width), 4),
        TargetRow("experts", 1, width, hidden, 2, 4 * 2 * (hidden + width), 4),
    ]


@pytest.mark.parametrize(
    ("edit", "config", "message"),
    [
        (lambda t: t, {"r": 5}, r"lora_A \[12, 16\], lora_B \[.*, 12\] — must be \[experts \* 5, inputs\]"),
        (lambda t: t, {"rank_pattern": {"experts.up_proj": 6}}, "up_proj: 2 experts of .* 4 of .* in .*gate_proj"),
        (lambda t: t, {"rank_pattern": {"experts.up_proj": 0}}, "for the configured rank 0"),
        (lambda t: t, {"target_parameters": ["experts.gate_proj", "experts.up_proj"]}, "names gate_proj, up_proj of"),
        (lambda t: t, {"target_parameters": None}, "names none of gate_proj, up_proj, down_proj"),
        (lambda t: t, {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}, "3 adapted parameter"),
        (
            lambda t: {k: v for k, v in t.items() if not k.startswith(f"{KEY}.lora")},
            {"target_parameters": ["gate_proj", "up_proj"]},
            "2 adapted parameter.* nested as",
        ),
        (
            lambda t: {k: t[_turned(k)] for k in t},
            {},
            r"up_proj: 4 experts of .* all layers have the same|down_proj: 4 experts of",
        ),
        (lambda t: {k: v for k, v in t.items() if k != f"{KEY}.lora_A.weight"}, {}, "holds lora_B"),
        (
            lambda t: {k.replace(".experts.lora_", ".experts.down_proj.lora_"): v for k, v in t.items()},
            {},
            "experts.down_proj.lora_A.weight — keys start with",
        ),
        (
            lambda t: t | {f"{KEY}.2.up_proj.lora_{part}.weight": torch.zeros(3, 3) for part in "AB"},
            {},
            rf"experts.2.up_proj — is one expert of .* split layout; .* packed layout \({BLOCK}.up_proj\)",
        ),
        (
            lambda t: t | {"base_model.model.lm_head.base_layer.lora_A.weight": torch.zeros(3, 16)},
            {},
            "lm_head.base_layer.lora_A.weight — keys start with",
        ),
    ],
)
def test_D5_layouts_that_dont_fit_are_refused(adapter, edit, config, message):
    stored = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(stored | config))
    tensors = edit(load_file(adapter / WEIGHTS))
    save_file({name: value.clone() for name, value in tensors.items()}, adapter / WEIGHTS)
    with pytest.raises(CheckpointError, match=message):
        read_adapter(adapter)


def _turned(key: str) -> str:
    """The key of the same tensor if projections were nested the other way round."""
    depth = key.count(".base_layer")
    return key.replace(".base_layer" * depth + ".lora", ".base_layer" * (2 - depth) + ".lora")


def test_an_adapter_of_another_number_of_experts_is_refused(base, tmp_path):
    config = tiny_config()
    config.num_experts, config.num_experts_per_tok = 8, 2
    other = U2ForDiffusion(config)
    other.init_weights_(1)
    other.save_pretrained(tmp_path / "other")
    cfg = LoraConfig(rank=2, targets=("experts",))
    trained(tmp_path / "other", tmp_path / "adapter", cfg)
    with pytest.raises(CheckpointError, match=rf"{BLOCK}.gate_proj: 8 experts of .* in the adapter, 4 experts of"):
        load_adapter(U2ForDiffusion.from_pretrained(base), tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=rf"{BLOCK}.gate_proj: 8 experts of .* in the adapter, 4 experts of"):
        attach_adapter(U2ForDiffusion.from_pretrained(base), cfg, seed=1, source=tmp_path / "adapter")


def test_a_wrong_rank_shows_against_the_model(base, adapter):
    """A alone can't tell 4 experts of rank 3 from 3 experts of rank 4."""
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(config | {"r": 4}))
    assert {info.num_experts for info in read_adapter(adapter).targets.values()} == {3}
    with pytest.raises(CheckpointError, match=rf"{BLOCK}.gate_proj: 3 experts of .* in the adapter, 4 experts of"):
        load_adapter(U2ForDiffusion.from_pretrained(base), adapter)


def test_a_model_without_experts_says_so(tmp_path):
    with torch.device("meta"):
        dense = U2ForDiffusion(small_config(num_hidden_layers=1))
    with pytest.raises(ConfigError, match="'experts' — this model has no routed experts"):
        plan_targets(dense, LoraConfig(targets=("experts",)))
    assert plan_targets(dense, LoraConfig(targets=("gate_proj",))), "nothing to confuse it with"


def test_experts_alone_leave_the_random_generator_alone(base):
    model = U2ForDiffusion.from_pretrained(base)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    attach_adapter(model, LoraConfig(rank=4, targets=("experts",)), seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    train(model, LoraConfig(rank=4))
