"""Adapters on heads: the low-rank term is part of the loss, without logits of all rows."""

from functools import partial

import pytest
import torch
from lora_fixtures import pack, save_base, train
from torch.profiler import ProfilerActivity, profile

from lumina_ft.adapters.adapted_head import AdaptedHead
from lumina_ft.adapters.lora import attach_adapter
from lumina_ft.config.lora_schema import LoraConfig
from lumina_ft.kernels.cross_entropy import choice
from lumina_ft.kernels.cross_entropy.chunked import chunked_cross_entropy
from lumina_ft.models.groups import is_adapter_name
from lumina_ft.models.u2 import U2ForDiffusion

HEADS = ("lm_head", "image_heads")
CASES = {
    "plain": LoraConfig(rank=4, alpha=8, targets=HEADS),
    "rslora": LoraConfig(rank=3, alpha=8, targets=("lm_head",), use_rslora=True),
    "dora": LoraConfig(rank=4, alpha=8, targets=HEADS, use_dora=True),
    "dropout": LoraConfig(rank=4, alpha=8, targets=HEADS, dropout=0.4),
}


@pytest.fixture
def adapted(tmp_path, monkeypatch):
    """Build a model with an adapter whose matrices aren't zero; its heads take one row per chunk."""
    base = save_base(tmp_path / "base")
    monkeypatch.setattr(choice, "chunked_cross_entropy", partial(chunked_cross_entropy, chunk_bytes=1))

    def build(case):
        model = U2ForDiffusion.from_pretrained(base)
        attach_adapter(model, CASES[case], seed=3)
        train(model, CASES[case], std=0.3)
        return model.train()

    return build


def losses_and_gradients(model, **options):
    model.zero_grad()
    torch.manual_seed(11)
    losses = model(**pack(), **options).losses
    (losses["text"].total * 0.3 + losses["image"].total * 0.07).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if is_adapter_name(name)}
    return [losses[name].total.detach() for name in ("text", "image")], gradients


@pytest.mark.parametrize("case", ["plain", "rslora", "dora"])
def test_losses_and_gradients_are_those_of_the_logits(adapted, case):
    model = adapted(case)
    losses, gradients = losses_and_gradients(model)
    want_losses, want = losses_and_gradients(model, return_logits=True)
    torch.testing.assert_close(losses, want_losses)
    assert gradients and all(value.any() for value in gradients.values())
    torch.testing.assert_close(gradients, want, rtol=1e-4, atol=1e-6)


def test_dropout_drops_in_training_and_repeats_with_its_seed(adapted):
    model = adapted("dropout")
    losses, gradients = losses_and_gradients(model)
    again, same = losses_and_gradients(model)
    assert torch.equal(losses[0], again[0]) and all(torch.equal(gradients[n], same[n]) for n in gradients)
    undropped, _ = losses_and_gradients(model.eval())
    assert not torch.allclose(losses[0], undropped[0], rtol=1e-5)
    logits, _ = losses_and_gradients(model, return_logits=True)
    torch.testing.assert_close(undropped, logits)


def test_no_logits_of_all_rows_exist(adapted):
    model = adapted("plain")
    assert isinstance(model.lm_head, AdaptedHead)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        losses = model(**pack()).losses
        losses["text"].total.backward()
    shape = [int(losses["text"].count), model.config.text_rows]
    assert not any(shape in (event.input_shapes or []) for event in seen.events())


def test_an_adapter_that_is_switched_off_leaves_the_loss_of_the_base(adapted, tmp_path):
    model = adapted("plain")
    for module in model.modules():
        if isinstance(module, AdaptedHead):
            module.enable_adapters(False)
    got = model(**pack()).losses
    want = U2ForDiffusion.from_pretrained(tmp_path / "base")(**pack()).losses
    for name in ("text", "image"):
        torch.testing.assert_close(got[name].total, want[name].total)


def test_a_head_that_peft_itself_adapts_gives_the_loss_of_its_logits(tmp_path):
    """For users who hand the model to PEFT."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import inject_adapter_in_model

    model = U2ForDiffusion.from_pretrained(save_base(tmp_path / "base"))
    before = model(**pack()).losses["text"].total
    inject_adapter_in_model(PeftLoraConfig(r=2, target_modules=["lm_head"]), model)
    assert not isinstance(model.lm_head, AdaptedHead)
    torch.testing.assert_close(model(**pack()).losses["text"].total, before)
    with torch.no_grad():
        model.lm_head.lora_B["default"].weight.copy_(torch.randn(40, 2))
    assert not torch.allclose(model(**pack()).losses["text"].total, before)
