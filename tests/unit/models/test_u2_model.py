"""The whole model beyond golden parity: participation, dtypes, initialisation, checkpointing (T1, T4, M4)."""

import pytest
import torch
import torch.nn.functional as F

from lumina_ft.config.groups import GROUPS_U2
from lumina_ft.errors import ConfigError
from lumina_ft.kernels import route
from lumina_ft.models.groups import group_of, row_sizes
from lumina_ft.models.u2 import U2ForDiffusion


def total_of(out):
    return sum((loss.total for loss in out.losses.values()), torch.zeros(()))


def gradients(model, pack):
    model.zero_grad()
    total_of(model(**pack)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["text", "image", "empty"])
def test_t1_every_parameter_takes_part_whatever_the_pack_holds(tiny_model, packs, name):
    grads = gradients(tiny_model, packs[name])
    assert [n for n, g in grads.items() if g is None] == []
    assert all(torch.isfinite(g).all() for g in grads.values())


def test_t1_stand_in_rows_change_neither_loss_nor_gradient(tiny_model, packs):
    """Sums over two packs, each without one modality, equal those of the pack that holds both samples."""
    out = {name: tiny_model(**packs[name]) for name in ("text", "image")}
    assert float(out["text"].losses["image"].total.detach()) == 0.0 and int(out["text"].losses["image"].count) == 0
    assert float(out["image"].losses["text"].total.detach()) == 0.0 and int(out["image"].losses["text"].count) == 0
    idle = {"text": "lm_img_head.", "image": "lm_head."}
    for name, prefix in idle.items():
        grads = gradients(tiny_model, packs[name])
        assert all(not g.any() for n, g in grads.items() if n.startswith(prefix))


def test_t1_modules_run_in_the_same_order_for_every_pack(tiny_model, packs, mixed_pack):
    order: list[str] = []
    for name, module in tiny_model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(lambda module, args, out, n=name: order.append(n))
    seen = []
    for pack in (*packs.values(), mixed_pack):
        order.clear()
        tiny_model(**pack)
        seen.append(list(order))
    assert all(other == seen[0] for other in seen)


def test_counts_equal_those_of_the_batch(tiny_model, mixed_pack):
    out = tiny_model(**mixed_pack)
    assert {name: int(loss.count) for name, loss in out.losses.items()} == {"text": 3, "image": 16, "balance": 24}


def test_text_labels_are_read_from_column_0(tiny_model, mixed_pack):
    want = tiny_model(**mixed_pack).losses["text"].total
    changed = mixed_pack["labels"].clone()
    text = mixed_pack["type_ids"] == 3
    changed[text, 1:] = 5
    got = tiny_model(**mixed_pack | {"labels": changed}).losses["text"]
    assert torch.equal(got.total, want) and int(got.count) == 3


def test_labels_on_padding_are_never_supervised(tiny_model, mixed_pack):
    out = tiny_model(**mixed_pack)
    changed = {k: v.clone() for k, v in mixed_pack.items()}
    changed["type_ids"][-1] = 3
    changed["labels"][-1] = 7
    got = tiny_model(**changed)
    assert torch.equal(got.losses["text"].total, out.losses["text"].total)
    assert int(got.losses["text"].count) == 3


def test_t5_balance_is_one_per_valid_token_when_even_and_padding_is_left_out(tiny_model, mixed_pack):
    longer = {k: v for k, v in mixed_pack.items()}
    for name in ("input_ids", "type_ids", "turn_ids", "block_ids", "is_clean", "position_ids", "labels", "valid"):
        fill = -100 if name == "labels" else 0
        shape = (9, *mixed_pack[name].shape[1:])
        longer[name] = torch.cat((mixed_pack[name], torch.full(shape, fill).to(mixed_pack[name].dtype)))
    a, b = tiny_model(**mixed_pack).losses["balance"], tiny_model(**longer).losses["balance"]
    torch.testing.assert_close(a.total, b.total, rtol=1e-6, atol=1e-6)
    assert int(a.count) == int(b.count) == 24
    assert float((a.total / a.count).detach()) >= 1.0 - 1e-4


def test_t4_every_place_is_named(tiny_model, mixed_pack, packs):
    places = {"embeddings", "embeddings.image", "backbone", "logits.text", "codebook_head", "logits.image"}
    for pack in (mixed_pack, *packs.values()):
        finite = tiny_model(**pack).finite
        assert set(finite) == places and all(bool(flag) for flag in finite.values())


@pytest.mark.parametrize(
    ("parameter", "first"),
    [
        ("model.img_embeddings.2.weight", "embeddings.image"),
        ("model.layers.1.attention.dense.weight", "backbone"),
        ("multi_codebook_head.channel_blocks.1.mlp.fc1.weight", "codebook_head"),
        ("lm_img_head.3.weight", "logits.image"),
        ("lm_head.weight", "logits.text"),
    ],
)
def test_t4_non_finite_weights_are_found_where_they_are(tiny_model, mixed_pack, parameter, first):
    with torch.no_grad():
        tiny_model.get_parameter(parameter).fill_(float("inf"))
    finite = tiny_model(**mixed_pack).finite
    assert not finite[first]
    assert finite["embeddings"] or first.startswith("embeddings")


def test_surprise_15_expert_bias_stays_float32_in_a_bfloat16_model(tiny_model, mixed_pack):
    """Near-tie fixture: two experts that differ by less than bfloat16 resolves."""
    router = tiny_model.model.layers[1].mlp.gate
    bias = torch.zeros(8)
    bias[0], bias[1] = 1.0, 1.0 - 2.0**-12
    router.expert_bias.copy_(bias)
    with torch.no_grad():
        router.weight.zero_()
    for cast in (tiny_model.to(torch.bfloat16), tiny_model.bfloat16(), tiny_model.half(), tiny_model.bfloat16()):
        buffer = cast.model.layers[1].mlp.gate.expert_bias
        assert buffer.dtype == torch.float32 and torch.equal(buffer, bias)
    assert tiny_model.lm_head.weight.dtype == torch.bfloat16
    x = torch.randn(3, 16).bfloat16()
    settings = {"num_groups": 4, "kept_groups": 2, "top_k": 2, "scaling": 2.5}
    assert router(x).topk_idx.tolist() == [[0, 1]] * 3
    swapped = bias.clone()
    swapped[0], swapped[1] = bias[1], bias[0]
    router.expert_bias.copy_(swapped)
    assert router(x).topk_idx.tolist() == [[1, 0]] * 3
    # Rounded to bfloat16 both biases are 1.0, and the order no longer depends on them.
    rounded = [route(x, router.weight, b.bfloat16().float(), **settings).topk_idx for b in (bias, swapped)]
    assert torch.equal(*rounded)
    out = tiny_model(**mixed_pack)
    assert out.hidden.dtype == torch.bfloat16 and out.router_logits[0].dtype == torch.float32


def test_surprise_16_channel_mask_keeps_its_dtype_and_is_not_read(tiny_model, mixed_pack):
    want = tiny_model(**mixed_pack).losses["image"].total
    mask = tiny_model.multi_codebook_head.channel_mask
    assert mask.dtype == torch.bfloat16 and torch.equal(mask.isinf(), torch.ones(4, 4).triu(1).bool())
    assert tiny_model.float().multi_codebook_head.channel_mask.dtype == torch.bfloat16
    mask.zero_()
    assert torch.equal(tiny_model(**mixed_pack).losses["image"].total, want)


def test_m4_expert_bias_is_no_parameter_and_can_be_switched_off(tiny_model, tiny_config, mixed_pack):
    assert not any("expert_bias" in name for name, _ in tiny_model.named_parameters())
    before = {n: b.clone() for n, b in tiny_model.named_buffers()}
    optimizer = torch.optim.SGD(tiny_model.parameters(), lr=1.0)
    total_of(tiny_model(**mixed_pack)).backward()
    optimizer.step()
    assert all(torch.equal(b, before[n]) for n, b in tiny_model.named_buffers())
    tiny_model.model.layers[1].mlp.gate.expert_bias[3] = 5.0
    biased = tiny_model(**mixed_pack).router_topk[0]
    tiny_model.model.layers[1].mlp.gate.use_bias = False
    assert not torch.equal(tiny_model(**mixed_pack).router_topk[0], biased)
    tiny_config.moe_router_enable_expert_bias = False
    assert not U2ForDiffusion(tiny_config).model.layers[1].mlp.gate.use_bias


def test_t11_code_k_is_predicted_from_codes_before_it_only(tiny_model):
    hidden, codes = torch.randn(3, 16), torch.randint(0, 8, (3, 4))
    want = tiny_model.image_logits(hidden, codes)
    for k in range(4):
        changed = codes.clone()
        changed[:, k] = (codes[:, k] + 1) % 8
        got = tiny_model.image_logits(hidden, changed)
        same = [torch.allclose(got[:, j], want[:, j], atol=1e-6) for j in range(4)]
        assert same == [j <= k for j in range(4)]


def test_surprise_19_zero_initialised_modulation_survives_construction(tiny_config):
    model = U2ForDiffusion(tiny_config)
    model.init_weights_(3)
    for name, parameter in model.named_parameters():
        if "adaLN_modulation" in name:
            assert not parameter.any(), name
    head = model.multi_codebook_head
    x = torch.randn(2, 4, 16)
    assert torch.equal(head.channel_blocks[0](x, torch.randn(2, 4, 16)), x)
    assert torch.equal(head.channel_final(x, x), F.layer_norm(x, (16,), eps=1e-6))


def test_init_depends_on_seed_and_name_alone_and_construction_draws_nothing(tiny_config):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    a = U2ForDiffusion(tiny_config)
    a.init_weights_(5)
    assert torch.equal(torch.get_rng_state(), state)
    b = U2ForDiffusion(tiny_config)
    b.init_weights_(5)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    b.init_weights_(6)
    assert not torch.equal(a.lm_head.weight, b.lm_head.weight)
    assert not torch.equal(a.model.layers[1].mlp.experts.gate_proj, a.model.layers[1].mlp.experts.up_proj)
    assert not a.model.word_embeddings.weight[63].any() and a.model.word_embeddings.weight[62].any()


@pytest.mark.parametrize("frozen", [False, True])
def test_checkpointing_gives_the_same_gradients(tiny_model, mixed_pack, frozen):
    if frozen:
        for name, parameter in tiny_model.named_parameters():
            parameter.requires_grad_(group_of(name) in ("experts", "codebook_head"))
    want = gradients(tiny_model, mixed_pack)
    tiny_model.gradient_checkpointing_enable()
    assert tiny_model.is_gradient_checkpointing
    got = gradients(tiny_model, mixed_pack)
    for name, grad in want.items():
        assert (grad is None) == (got[name] is None)
        assert grad is None or torch.equal(grad, got[name]), name
    tiny_model.gradient_checkpointing_disable()
    assert not tiny_model.is_gradient_checkpointing
    with pytest.raises(ConfigError, match="gradient_checkpointing_kwargs"):
        tiny_model.gradient_checkpointing_enable({"use_reentrant": True})


def test_checkpointing_recomputes_layers_and_codebook_blocks(tiny_model, mixed_pack):
    calls: list[str] = []
    watched = [*tiny_model.model.layers, *tiny_model.multi_codebook_head.channel_blocks]
    for module in watched:
        module.register_forward_pre_hook(lambda module, args: calls.append(type(module).__name__))
    tiny_model.gradient_checkpointing_enable()
    total_of(tiny_model(**mixed_pack)).backward()
    assert len(calls) == 2 * len(watched)


def test_unknown_kernels_are_refused(tiny_config):
    message = "model.kernels — 'flash' — must be one of auto, triton, torch, eager — use auto"
    with pytest.raises(ConfigError, match=message):
        U2ForDiffusion(tiny_config, kernels="flash")
    with pytest.raises(ConfigError, match=message):
        U2ForDiffusion(tiny_config).set_kernels("flash")


def test_every_part_follows_the_choice_of_kernels(tiny_config, mixed_pack):
    model = U2ForDiffusion(tiny_config, kernels="eager")
    model.init_weights_(0)
    assert model(**mixed_pack).attention == "dense"
    model.set_kernels("torch")
    assert model(**mixed_pack).attention == "segmented"
    held = {type(m).__name__: m.kernels.choice for m in model.modules() if hasattr(m, "kernels")}
    assert held.items() >= {"U2ForDiffusion": "torch", "Router": "torch", "PackedExperts": "torch"}.items()
    assert set(held.values()) == {"torch"}


def test_text_only_models_train(text_model, text_only_pack):
    assert not any("img" in name or "codebook" in name for name, _ in text_model.named_parameters())
    optimizer = torch.optim.Adam(text_model.parameters(), lr=1e-2)
    losses = []
    for _ in range(16):
        optimizer.zero_grad()
        out = text_model(**text_only_pack)
        assert set(out.losses) == {"text", "balance"}
        loss = out.losses["text"].total / out.losses["text"].count
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_text_only_models_take_ids_with_and_without_a_column(text_model, text_only_pack):
    want = text_model(**text_only_pack)
    flat = text_only_pack | {name: text_only_pack[name][:, 0] for name in ("input_ids", "labels")}
    got = text_model(**flat)
    assert torch.equal(got.hidden, want.hidden)
    assert torch.equal(got.losses["text"].total, want.losses["text"].total)


@pytest.mark.parametrize("layout", ["packed", "split"])
def test_text_only_models_round_trip_through_both_layouts(text_model, text_only_pack, tmp_path, layout):
    text_model.save_pretrained(tmp_path, layout=layout)
    again = U2ForDiffusion.from_pretrained(tmp_path)
    assert not again.config.has_image
    assert torch.equal(again(**text_only_pack).hidden, text_model(**text_only_pack).hidden)


def test_every_parameter_is_in_exactly_one_group(tiny_model, text_model):
    names = [name for name, _ in tiny_model.named_parameters()]
    assert {group_of(name) for name in names} == set(GROUPS_U2)
    sizes = row_sizes((name, p.numel()) for name, p in tiny_model.named_parameters())
    assert sum(sizes.values()) == sum(p.numel() for p in tiny_model.parameters())
    assert not any("im" in group_of(name)[:2] for name, _ in text_model.named_parameters())
    with pytest.raises(AssertionError, match="belongs to no group"):
        group_of("model.layers.0.mlp.other.weight")
