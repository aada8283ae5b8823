"""Reference router: independent sigmoid scores, group-limited top-k (M1-M4, spec §1 "Router").

Shape legend: T tokens, H hidden, E experts, K chosen experts per token, G expert groups.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Routing(NamedTuple):
    """Result of one router call.

    Attributes:
        topk_idx: [T, K] int64, in descending order of biased score.
        topk_weight: [T, K] float32 combine weights; they sum to `scaling` per token.
        logits: [T, E] float32, before the sigmoid.
    """

    topk_idx: Tensor
    topk_weight: Tensor
    logits: Tensor


def route(
    hidden: Tensor,
    weight: Tensor,
    expert_bias: Tensor | None,
    *,
    num_groups: int,
    kept_groups: int,
    top_k: int,
    scaling: float,
) -> Routing:
    """Choose K experts per token.

    Everything runs in float32 whatever the dtype of the model: bfloat16 scores tie and reorder the top-k.

    Args:
        hidden: [T, H] float.
        weight: [E, H] float.
        expert_bias: [E] float32, added for the selection only; None selects by the plain scores.
        num_groups: G; experts are grouped in order, E / G each. A group scores the sum of its two best experts.
        kept_groups: groups that stay eligible.
        top_k: K.
        scaling: factor on the normalised weights of the chosen experts.

    Returns:
        Routing; gradients flow through `topk_weight` and `logits`, never into `expert_bias`.
    """
    logits = F.linear(hidden.float(), weight.float())
    scores = logits.sigmoid()
    with torch.no_grad():
        biased = scores if expert_bias is None else scores + expert_bias
        topk_idx = select_experts(biased, num_groups=num_groups, kept_groups=kept_groups, top_k=top_k)
    chosen = scores.gather(-1, topk_idx)
    topk_weight = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scaling
    return Routing(topk_idx, topk_weight, logits)


def select_experts(biased_scores: Tensor, *, num_groups: int, kept_groups: int, top_k: int) -> Tensor:
    """Group-limited top-k (M2).

    Args:
        biased_scores: [T, E] float32.

    Returns:
        [T, K] int64.
    """
    tokens, experts = biased_scores.shape
    grouped = biased_scores.view(tokens, num_groups, experts // num_groups)
    if kept_groups < num_groups:
        group_score = grouped.topk(2, dim=-1).values.sum(-1)
        kept = group_score.topk(kept_groups, dim=-1, sorted=False).indices
        dropped = torch.ones_like(group_score, dtype=torch.bool).scatter_(1, kept, False)
        grouped = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf"))
    return grouped.reshape(tokens, experts).topk(top_k, dim=-1).indices
