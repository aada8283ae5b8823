"""Does the merged model answer as the base with its adapter attached? On random tokens, in float32, for small models.

Shape legend: T tokens, H hidden, C codebooks, V text rows, K image codes.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lumina_ft.adapters.lora import load_adapter
from lumina_ft.errors import RunError
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.tokens import TYPE_ANSWER_MEDIA, TYPE_ANSWER_TEXT

MAX_PARAMETERS = 250_000_000
"""Of models that are compared: 1 GB in float32, built one at a time."""

BOUNDS = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.15}
"""Largest relative difference by dtype of the merged weights. The rounding of every weight has been proved by then, so
this is about the meaning of the adapter: another scale, layer or orientation differs by about its whole effect."""

_TEXT_TOKENS, _MEDIA_TOKENS, _SAMPLES = 48, 32, 2


@dataclass(frozen=True)
class LogitsCheck:
    """Differences are ||a - b|| / ||a|| over a token's logits.

    Attributes:
        largest: of all tokens that both models send to the same experts; bound: what it must stay below.
        effect: the largest between the base without and with its adapter, to compare with.
        tokens: compared. rerouted: left out, because a tie between experts fell the other way in some layer.
    """

    largest: float
    bound: float
    effect: float
    tokens: int
    rerouted: int


class _Run(NamedTuple):
    """logits: per token, [V] or [C * K]. routes: [T, layers * experts per token], sorted in each layer."""

    logits: list[Tensor]
    routes: Tensor


def compare_logits(base: Path, adapter: Path, merged: Path, dtype: torch.dtype) -> LogitsCheck:
    """Run both models on the same tokens: two samples, text and (in models with image parts) image codes.

    Args:
        base, merged: model directories. adapter: attached to the base with weight 1.
        dtype: of the merged weights; both models compute in float32.

    Raises:
        RunError: the difference exceeds the bound, or too few tokens could be compared.
    """
    model = U2ForDiffusion.from_pretrained(base, dtype=torch.float32)
    off = _run(model)
    load_adapter(model, adapter)
    on = _run(model.eval())
    del model
    got = _run(U2ForDiffusion.from_pretrained(merged, dtype=torch.float32))
    same = (on.routes == got.routes).all(dim=1).tolist()
    differences = [_relative(a, b) for a, b, kept in zip(on.logits, got.logits, same, strict=True) if kept]
    effect = max(_relative(a, b) for a, b in zip(on.logits, off.logits, strict=True))
    largest = max(differences, default=math.nan)
    if not largest <= BOUNDS[dtype]:
        raise RunError(
            f"verification — logits of the merged model differ by {largest:.2e} from those of the base with the "
            f"adapter attached ({len(differences)} of {len(same)} tokens compared) — must be at most "
            f"{BOUNDS[dtype]:g} with {str(dtype).removeprefix('torch.')} weights (the adapter changes them by "
            f"{effect:.2e}) — nothing is kept; --dtype float32 tells rounding from a defect"
        )
    return LogitsCheck(largest, BOUNDS[dtype], effect, len(differences), len(same) - len(differences))


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / a.norm())


@torch.no_grad()
def _run(model: U2ForDiffusion) -> _Run:
    config = model.config
    ids, types = _tokens(config)
    bounds = torch.tensor([i * ids.shape[0] // _SAMPLES for i in range(_SAMPLES + 1)])
    out = model(ids, type_ids=types, cu_seqlens=bounds)
    assert out.hidden is not None and out.router_topk is not None
    text = types == TYPE_ANSWER_TEXT
    logits = list(model.text_logits(out.hidden[text]))
    order = [text.nonzero().flatten()]
    if config.has_image:
        logits += list(model.image_logits(out.hidden[~text], ids[~text]).flatten(1))
        order.append((~text).nonzero().flatten())
    routes = [topk.sort(dim=1).values for topk in out.router_topk]
    table = torch.cat(routes, dim=1) if routes else torch.zeros(ids.shape[0], 1)
    return _Run(logits, table[torch.cat(order)])


def _tokens(config: U2Config) -> tuple[Tensor, Tensor]:
    """ids [T, C], types [T]: random, the same for every model of these sizes."""
    draw = torch.Generator().manual_seed(0)
    text = torch.zeros(_TEXT_TOKENS, config.id_columns, dtype=torch.int64)
    text[:, 0] = torch.randint(config.text_rows or 1, (_TEXT_TOKENS,), generator=draw)
    ids, types = [text], [torch.full((_TEXT_TOKENS,), TYPE_ANSWER_TEXT)]
    if config.has_image:
        ids.append(torch.randint(config.image_head_classes, (_MEDIA_TOKENS, config.id_columns), generator=draw))
        types.append(torch.full((_MEDIA_TOKENS,), TYPE_ANSWER_MEDIA))
    return torch.cat(ids * _SAMPLES), torch.cat(types * _SAMPLES)
