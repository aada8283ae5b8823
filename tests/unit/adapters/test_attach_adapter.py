"""Adapters on a model, judged against PEFT's own loading and merging (D5)."""

import json

import pytest
import torch
from lora_fixtures import answers, meta_model, save_base, train, trained

from lumina_ft.adapters.files import read_adapter, write_adapter
from lumina_ft.adapters.lora import attach_adapter, load_adapter, merged_tensors
from lumina_ft.config.lora_schema import LoraConfig
from lumina_ft.errors import CheckpointError, ConfigError
from lumina_ft.models.groups import base_name, group_of, is_adapter_name
from lumina_ft.models.u2 import U2ForDiffusion

CASES: dict[str, LoraConfig] = {
    "plain": LoraConfig(rank=4, alpha=8),
    "rslora": LoraConfig(rank=4, alpha=8, use_rslora=True),
    "gaussian": LoraConfig(rank=4, alpha=8, init="gaussian", dropout=0.3),
    "dora": LoraConfig(rank=4, alpha=8, targets=("attention", "codebook_head"), use_dora=True),
    "pissa": LoraConfig(rank=4, alpha=8, init="pissa"),
    "fast_pissa": LoraConfig(rank=4, alpha=8, init="pissa_niter_4", use_rslora=True, rank_pattern={"attention": 3}),
    "pissa_dora": LoraConfig(rank=4, alpha=8, init="pissa", use_dora=True),
    "patterns": LoraConfig(
        rank=4,
        alpha=8,
        targets=("attention", "shared_experts"),
        rank_pattern={"attention.dense": 2, "model.layers.1.attention.query_key_value": 6},
        alpha_pattern={"shared_experts": 3.5},
    ),
    "heads": LoraConfig(
        rank=4, alpha=8, targets=("attention.dense",), modules_to_save=("heads", "image_embeddings", "word_embeddings")
    ),
    "codebook_head": LoraConfig(rank=4, alpha=8, targets=("attention",), modules_to_save=("codebook_head",)),
    "experts": LoraConfig(rank=4, alpha=8, targets=("experts",)),
    "experts_down": LoraConfig(rank=3, alpha=8, targets=("experts.down_proj",), dropout=0.2),
    "experts_up_gate": LoraConfig(
        rank=4, alpha=8, targets=("experts.up_proj", "mlp.experts.gate_proj"), init="gaussian"
    ),
    "experts_rslora": LoraConfig(rank=4, alpha=8, targets=("experts", "attention"), use_rslora=True),
    "experts_patterns": LoraConfig(
        rank=4,
        alpha=8,
        targets=("attention", "shared_experts", "experts"),
        rank_pattern={"shared_experts.gate_proj": 5, "experts.gate_proj": 2, "experts.down_proj": 3, "dense": 1},
        alpha_pattern={"experts.up_proj": 6.5, "experts.gate_proj": 3, "shared_experts": 1},
    ),
    "experts_and_heads": LoraConfig(
        rank=4,
        alpha=8,
        targets=("attention", "dense_mlp", "shared_experts", "experts"),
        modules_to_save=("heads", "word_embeddings"),
    ),
}
PISSA = ("pissa", "fast_pissa", "pissa_dora")
EXPERTS = tuple(case for case in CASES if case.startswith("experts"))
ROUNDING = 1e-6
# PEFT says that it ignores patterns for parameters, and uses them.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")


@pytest.mark.parametrize("case", CASES)
def test_D5_peft_loads_our_directory_and_answers_alike(base, tmp_path, case):
    from peft import PeftModel

    model, _ = trained(base, tmp_path / "adapter", CASES[case])
    peft = PeftModel.from_pretrained(U2ForDiffusion.from_pretrained(base), str(tmp_path / "adapter"))
    # PiSSA trains on a rounded residual of the base; PEFT adds experts' pairs to the weights first.
    tolerance = ROUNDING if case in (*PISSA, *EXPERTS) else 0.0
    ours = answers(model)
    assert torch.allclose(answers(peft), ours, rtol=0, atol=tolerance)
    assert float((ours - answers(U2ForDiffusion.from_pretrained(base))).abs().max()) > 1e-2


@pytest.mark.parametrize("case", CASES)
def test_D5_merged_weights_are_those_of_peft(base, tmp_path, case):
    from peft import PeftModel

    model, adapter = trained(base, tmp_path / "adapter", CASES[case])
    peft = PeftModel.from_pretrained(U2ForDiffusion.from_pretrained(base), str(tmp_path / "adapter"))
    wanted = peft.merge_and_unload().state_dict()
    found = {name: (tensor, cosine) for name, tensor, cosine in merged_tensors(model, adapter)}
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name][0], wanted[name], rtol=0, atol=ROUNDING) for name in wanted)
    cosines = {name: cosine for name, (_, cosine) in found.items() if cosine is not None}
    assert cosines.keys() == {target.weight for target in adapter.targets}
    assert min(cosines.values()) > 0.999


@pytest.mark.parametrize("case", CASES)
def test_a_directory_of_peft_loads_here(base, tmp_path, case):
    """PEFT loads ours and writes its own; ours and the loaded one agree."""
    from peft import PeftModel

    model, _ = trained(base, tmp_path / "ours", CASES[case])
    PeftModel.from_pretrained(U2ForDiffusion.from_pretrained(base), str(tmp_path / "ours")).save_pretrained(
        str(tmp_path / "theirs")
    )
    loaded = U2ForDiffusion.from_pretrained(base)
    load_adapter(loaded, tmp_path / "theirs")
    assert torch.allclose(answers(loaded), answers(model), rtol=0, atol=ROUNDING if case in PISSA else 0.0)


@pytest.mark.parametrize("case", CASES)
def test_continuing_restores_every_bit(base, tmp_path, case):
    """Also the residual base of PiSSA, and whole modules; the seed doesn't matter any more."""
    model, before = trained(base, tmp_path / "adapter", CASES[case])
    again = U2ForDiffusion.from_pretrained(base)
    after = attach_adapter(again, CASES[case], seed=99, source=tmp_path / "adapter")
    assert after.targets == before.targets and after.start.keys() == before.start.keys()
    wanted, found = model.state_dict(), again.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    write_adapter(tmp_path / "again", again, after, base=None, base_name=str(base), changed=_groups(CASES[case]))
    names = ("adapter_config.json", "adapter_model.safetensors")
    assert all((tmp_path / "again" / n).read_bytes() == (tmp_path / "adapter" / n).read_bytes() for n in names)


def _groups(cfg: LoraConfig) -> set[str]:
    return train(U2ForDiffusion(meta_model().config), cfg, std=0.0) if cfg.modules_to_save else set()


@pytest.mark.parametrize("case", CASES)
def test_a_new_adapter_leaves_the_answers_as_they_are(base, case):
    model = U2ForDiffusion.from_pretrained(base)
    before = answers(model)
    attach_adapter(model, CASES[case], seed=3)
    assert torch.allclose(answers(model), before, rtol=0, atol=ROUNDING)


def test_initial_values_depend_on_seed_and_layer_only(base):
    def values(seed: int, **options) -> dict[str, torch.Tensor]:
        model = U2ForDiffusion.from_pretrained(base)
        torch.manual_seed(len(options))
        attach_adapter(model, LoraConfig(rank=4, alpha=8, **options), seed=seed)
        return {n: p.detach() for n, p in model.named_parameters() if is_adapter_name(n) and "lora_A" in n}

    one, same, other = values(3), values(3, targets=("attention",), use_dora=True), values(4)
    assert all(torch.equal(one[name], same[name]) for name in same)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    assert len({tuple(v.flatten().tolist()[:4]) for v in one.values()}) == len(one)
    bound = max(v.abs().max() * v.shape[1] ** 0.5 for v in one.values())
    assert 0.9 < bound <= 1.0


def test_attaching_draws_nothing_from_the_global_generator(base):
    model = U2ForDiffusion.from_pretrained(base)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    attach_adapter(model, LoraConfig(rank=4, init="pissa_niter_2", targets=("attention",)), seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_pissa_takes_the_principal_part_and_stores_twice_the_rank(base, tmp_path):
    cfg = CASES["pissa"]
    model, adapter = trained(base, tmp_path / "adapter", cfg)
    original = U2ForDiffusion.from_pretrained(base).state_dict()
    name = "model.layers.0.attention.dense"
    residual = model.state_dict()[f"{name}.base_layer.weight"]
    values = torch.linalg.svdvals(original[f"{name}.weight"])
    assert torch.allclose(torch.linalg.svdvals(residual)[:4], values[4:8], atol=1e-5)
    info = read_adapter(tmp_path / "adapter").targets[name]
    assert (info.rank, info.scale) == (8, adapter.targets[0].scale)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["init_lora_weights"] is True


def test_dora_refuses_rows_without_direction(tmp_path):
    model = U2ForDiffusion(meta_model().config)
    model.init_weights_(0)
    with pytest.raises(ConfigError, match="lora.use_dora — multi_codebook_head.*adaLN.* has rows of zeros"):
        attach_adapter(model, CASES["dora"], seed=3)


def test_a_frozen_adapter_has_no_dropout(base, tmp_path):
    cfg = CASES["gaussian"]
    trained(base, tmp_path / "adapter", cfg)
    model = U2ForDiffusion.from_pretrained(base)
    adapter = attach_adapter(model, cfg, seed=3, source=tmp_path / "adapter", frozen=True)
    model.train()
    assert not [m for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    assert adapter.dropout == 0.3, "the directory still says what it was trained with"


def test_planning_on_the_meta_device_gives_the_live_names_and_shapes(base):
    cfg = CASES["dora"]
    planned, model = meta_model(), U2ForDiffusion.from_pretrained(base)
    attach_adapter(planned, cfg, seed=0)
    attach_adapter(model, cfg, seed=3)
    shapes = {n: p.shape for n, p in planned.named_parameters()}
    assert shapes == {n: p.shape for n, p in model.named_parameters()}
    assert all(p.is_meta for p in planned.parameters())
    groups = {group_of(n) for n in shapes if is_adapter_name(n)}
    assert groups == {"lora"}
    assert {base_name(n) for n in shapes if not is_adapter_name(n)} == {n for n, _ in meta_model().named_parameters()}


def test_bf16_adapters_have_the_dtype_of_their_base(tmp_path):
    from peft import PeftModel

    base = save_base(tmp_path / "base", torch.bfloat16)
    model, _ = trained(base, tmp_path / "adapter", CASES["pissa_dora"])
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    file = read_adapter(tmp_path / "adapter")
    assert file.pair("model.layers.0.attention.dense").a.dtype == torch.bfloat16
    peft = PeftModel.from_pretrained(U2ForDiffusion.from_pretrained(base), str(tmp_path / "adapter"))
    assert torch.allclose(answers(peft).float(), answers(model).float(), rtol=0, atol=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 5}, "query_key_value: rank: 4 in the adapter, 5 in the configuration"),
        ({"alpha": 9}, "query_key_value: scale: 2.0 in the adapter, 2.25 in the configuration"),
        ({"use_dora": True}, "use_dora: False in the adapter, True in the configuration"),
        ({"targets": ("attention", "lm_head")}, "lm_head: not adapted in the adapter, adapted in the configuration"),
        ({"targets": ("attention.dense",)}, "query_key_value: adapted in the adapter, not adapted in"),
    ],
)
def test_a_stage_refuses_another_adapter_than_the_one_configured(base, tmp_path, change, message):
    options = {"rank": 4, "alpha": 8, "targets": ("attention",)}
    trained(base, tmp_path / "adapter", LoraConfig(**options))
    with pytest.raises(CheckpointError, match=message):
        attach_adapter(
            U2ForDiffusion.from_pretrained(base), LoraConfig(**options | change), seed=3, source=tmp_path / "adapter"
        )


def test_an_adapter_of_another_model_is_refused(base, tmp_path):
    trained(base, tmp_path / "adapter", CASES["plain"])
    config = meta_model().config
    config.num_hidden_layers = 1
    with pytest.raises(CheckpointError, match=r"model.layers.1.*: 16 x 16 in the adapter, absent in the model"):
        load_adapter(U2ForDiffusion(config), tmp_path / "adapter")


def test_what_an_adapter_can_store(base, tmp_path):
    _, adapter = trained(base, tmp_path / "adapter", LoraConfig(rank=4, targets=("attention", "lm_head")))
    assert adapter.can_store(()) and adapter.can_store({"image_heads", "codebook_head"})
    assert not adapter.can_store({"norms"}), "not made of whole modules"
    assert not adapter.can_store({"lm_head"}), "PEFT would put no adapter on a module that it saves whole"
