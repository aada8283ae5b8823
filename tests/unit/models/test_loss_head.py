"""Heads that compute their own loss: as their logits would, and in one call whatever the number of chunks."""

from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lumina_ft.kernels.cross_entropy import choice
from lumina_ft.kernels.cross_entropy.chunked import chunked_cross_entropy
from lumina_ft.models.loss_head import LossHead


@pytest.fixture
def one_row_per_chunk(monkeypatch):
    monkeypatch.setattr(choice, "chunked_cross_entropy", partial(chunked_cross_entropy, chunk_bytes=1))


def losses_and_gradients(model, pack, **options):
    """Gradients of the text and the image loss, each scaled as the loop would."""
    model.zero_grad()
    losses = model(**pack, **options).losses
    (losses["text"].total * 0.3 + losses["image"].total * 0.07).backward()
    kept = {name: loss.total.detach() for name, loss in losses.items()}
    return kept, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_alike(got, want):
    for mine, reference in zip(got, want, strict=True):
        assert mine.keys() == reference.keys()
        for name, value in reference.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kernels", ["auto", "torch", "eager"])
def test_losses_and_gradients_are_those_of_the_logits(tiny_model, mixed_pack, kernels):
    tiny_model.set_kernels(kernels)
    assert {m.impl for m in tiny_model.modules() if isinstance(m, LossHead)} == {kernels}
    want = losses_and_gradients(tiny_model, mixed_pack, return_logits=True)
    assert_alike(losses_and_gradients(tiny_model, mixed_pack), want)


def test_losses_and_gradients_in_many_chunks(tiny_model, mixed_pack, one_row_per_chunk):
    want = losses_and_gradients(tiny_model, mixed_pack, return_logits=True)
    assert_alike(losses_and_gradients(tiny_model, mixed_pack), want)


def test_t1_a_head_is_called_once_however_many_chunks_its_rows_take(tiny_model, mixed_pack, packs, one_row_per_chunk):
    """ZeRO-3 gathers a head's weight around each call, on all ranks: ranks with other packs have other chunks."""
    calls = []
    heads = [(name, module) for name, module in tiny_model.named_modules() if isinstance(module, LossHead)]
    for name, head in heads:
        head.register_forward_hook(lambda *_, n=name: calls.append(n))
    for pack in (mixed_pack, *packs.values()):
        calls.clear()
        tiny_model(**pack)
        assert calls == ["lm_head", *(f"lm_img_head.{k}" for k in range(4))]


def test_a_pack_without_text_keeps_the_heads_in_the_graph(tiny_model, packs, one_row_per_chunk):
    losses, gradients = losses_and_gradients(tiny_model, packs["image"])
    assert float(losses["text"]) == 0.0
    assert not gradients["lm_head.weight"].any()


@pytest.mark.parametrize(("kernels", "whole"), [("torch", False), ("eager", True)])
def test_logits_of_all_rows_exist_in_the_reference_only(tiny_model, mixed_pack, one_row_per_chunk, kernels, whole):
    tiny_model.set_kernels(kernels)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        losses = tiny_model(**mixed_pack).losses
        losses["text"].total.backward()
    rows, words = int(losses["text"].count), tiny_model.config.text_rows
    assert any([rows, words] in (event.input_shapes or []) for event in seen.events()) is whole


def test_logits_are_those_of_a_linear_layer():
    head = LossHead(8, 21)
    x = torch.randn(2, 3, 8)
    assert torch.equal(head(x), torch.nn.functional.linear(x, head.weight))
    assert isinstance(head, torch.nn.Linear) and list(head.state_dict()) == ["weight"]
