"""A tiny model with image parts, one without, and a small pack for them."""

import pytest
import torch

from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.tokens import IGNORE

TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_group": 4,
    "topk_group": 2,
    "pad_token_id": 63,
}
TINY_IMAGE = {
    "num_codebooks": 4,
    "image_embedding_rows": 14,
    "image_head_classes": 8,
    "ar_head_depth": 2,
    "ar_head_heads": 2,
}


@pytest.fixture
def tiny_config() -> U2Config:
    return U2Config(**TINY, **TINY_IMAGE)


@pytest.fixture
def text_config() -> U2Config:
    return U2Config(**TINY)


@pytest.fixture
def tiny_model(tiny_config) -> U2ForDiffusion:
    model = U2ForDiffusion(tiny_config)
    model.init_weights_(0)
    # Zero-initialised modulation would hide the codebook head's blocks from every test.
    gen = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "adaLN" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=gen) * 0.1)
    return model


@pytest.fixture
def text_model(text_config) -> U2ForDiffusion:
    model = U2ForDiffusion(text_config)
    model.init_weights_(0)
    return model


def make_pack(columns: int, *, image: bool, text: bool, tail: int = 2) -> dict[str, torch.Tensor]:
    """One text-to-image sample of 11 rows and one text sample of 13 rows, as asked, and a padding tail."""
    gen = torch.Generator().manual_seed(7)
    parts = []
    if image:
        types = torch.tensor([1] * 5 + [4] * 4 + [1] * 2)
        parts.append((types, torch.tensor([0] * 4 + [1] * 7), types * 0, torch.arange(11) < 4, torch.arange(11)))
    if text:
        types = torch.tensor([1] * 5 + [3] * 8)
        clean = (torch.arange(13) < 4) | (torch.arange(13) > 8)
        blocks = torch.tensor([-1] * 4 + [0] * 9)
        positions = torch.cat((torch.arange(9), torch.arange(5, 9)))
        parts.append((types, torch.tensor([0] * 4 + [1] * 9), blocks, clean, positions))
    lengths = torch.tensor([0, *(len(p[0]) for p in parts)])
    columns_of = [torch.cat([p[i] for p in parts]) for i in range(5)]
    types, turns, blocks, clean, positions = (torch.cat((x, torch.zeros(tail, dtype=x.dtype))) for x in columns_of)
    tokens = types.numel()
    media = (types == 4).unsqueeze(1)
    ids = torch.randint(0, 60, (tokens, 1), generator=gen).repeat(1, columns)
    ids = torch.where(media, torch.randint(0, 14, (tokens, columns), generator=gen), ids)
    labels = torch.full((tokens, columns), IGNORE)
    labels[types == 4] = torch.randint(0, 8, (int(media.sum()), columns), generator=gen)
    supervised = ((types == 3) & ~clean).nonzero().squeeze(1)[:3]
    labels[supervised] = torch.randint(0, 60, (len(supervised), 1), generator=gen)
    return {
        "input_ids": ids,
        "type_ids": types.to(torch.uint8),
        "turn_ids": turns,
        "block_ids": blocks,
        "is_clean": clean,
        "position_ids": positions,
        "labels": labels,
        "cu_seqlens": lengths.cumsum(0).to(torch.int32),
        "valid": torch.arange(tokens) < tokens - tail,
    }


@pytest.fixture
def mixed_pack():
    return make_pack(4, image=True, text=True)


@pytest.fixture
def packs():
    """Packs that lack one modality, or everything."""
    empty = {
        "input_ids": torch.full((1, 4), 63),
        "type_ids": torch.zeros(1, dtype=torch.uint8),
        "turn_ids": torch.zeros(1, dtype=torch.int64),
        "block_ids": torch.full((1,), -1),
        "is_clean": torch.zeros(1, dtype=torch.bool),
        "position_ids": torch.zeros(1, dtype=torch.int64),
        "labels": torch.full((1, 4), IGNORE),
        "cu_seqlens": torch.tensor([0, 1], dtype=torch.int32),
        "valid": torch.zeros(1, dtype=torch.bool),
    }
    return {
        "text": make_pack(4, image=False, text=True),
        "image": make_pack(4, image=True, text=False),
        "empty": empty,
    }


@pytest.fixture
def text_only_pack():
    """For models without codebooks: one id column."""
    return make_pack(1, image=False, text=True)
