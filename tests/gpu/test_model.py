"""A whole model with Triton kernels on the device, against the same one with PyTorch's."""

import pytest
import torch
from gpu_device import DEVICE, DTYPES, on_gpu
from torch import Tensor

from lumina_ft.bench.kernels.measure import relative_difference
from lumina_ft.bench.kernels.packs import build_pack
from lumina_ft.bench.step import draw_batch
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.parallel.zero3 import default_dtype

pytestmark = pytest.mark.gpu

LIMITS = {torch.float32: 5e-5, torch.bfloat16: 0.25}
"""Relative L2 through two layers. In bfloat16 near ties route some tokens elsewhere: a wrong factor would show here,
rounding is judged operation by operation."""


def small_config() -> U2Config:
    hidden, heads, key_heads, width = on_gpu((256, 4, 2, 128), (32, 2, 1, 16))
    return U2Config(
        vocab_size=on_gpu(4096, 320),
        pad_token_id=0,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        moe_intermediate_size=width,
        num_experts=on_gpu(32, 8),
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
    )


def build(kernels: str, dtype: torch.dtype) -> U2ForDiffusion:
    with torch.device(DEVICE), default_dtype(dtype):
        model = U2ForDiffusion(small_config(), kernels=kernels)
    model.init_weights_(0)
    return model.train()


def passes(model: U2ForDiffusion, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hidden states, losses and all gradients."""
    out = model(**batch)
    assert out.hidden is not None and out.losses is not None
    totals = {f"loss {name}": loss.total / loss.count for name, loss in out.losses.items()}
    torch.stack([value.float() for value in totals.values()]).sum().backward()
    grads = {f"grad {name}": param.grad for name, param in model.named_parameters() if param.grad is not None}
    assert out.attention == ("tiled" if model.kernels.choice == "triton" else "segmented")
    return {"hidden": out.hidden, **totals, **grads}


def batch() -> dict[str, Tensor]:
    pack = build_pack("two turns", sample_tokens=on_gpu(512, 48), samples=on_gpu(4, 1))
    return draw_batch(pack, small_config(), DEVICE)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hidden_states_losses_and_gradients_agree(dtype: torch.dtype, checkpointing: bool) -> None:
    models = {kernels: build(kernels, dtype) for kernels in ("triton", "torch")}
    if checkpointing:
        models["triton"].gradient_checkpointing_enable()
    got, want = (passes(model, batch()) for model in models.values())
    assert got.keys() == want.keys()
    differences = {name: relative_difference(got[name].detach(), want[name].detach()) for name in want}
    assert not {name: value for name, value in differences.items() if not value <= LIMITS[dtype]}


def test_auto_takes_triton_on_a_gpu() -> None:
    model = build("auto", DTYPES[-1])
    assert model(**batch()).attention == on_gpu("tiled", "segmented")


def test_two_runs_train_the_same_bits() -> None:
    def losses() -> list[Tensor]:
        model = build("triton", DTYPES[-1])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        found = []
        for _ in range(on_gpu(4, 2)):
            found.append(passes(model, batch())["loss text"].detach())
            optimizer.step()
            optimizer.zero_grad()
        return found

    first, second = losses(), losses()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and first[-1] < first[0]
