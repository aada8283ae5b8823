"""Reference routed experts: one expert at a time (M5).

Shape legend: T tokens, H hidden, I expert width, E experts, K chosen experts per token.

Weights come as one tensor per expert. A stacked [E, I, H] parameter is passed as `weight.unbind(0)`, whose backward
stacks all expert gradients once; indexing `weight[e]` would write an [E, I, H] gradient per expert. Both functions read
sizes on the host, so they are for reading, checking and small runs. They know nothing of expert parallelism: every
expert must be here.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def expert_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down(silu(gate x) * up x) of one expert. x: [n, H]; gate, up: [I, H]; down: [H, I]. Returns [n, H]."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def expert_loop(
    x: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    topk_idx: Tensor,
    topk_weight: Tensor,
) -> Tensor:
    """Weighted sum over each token's experts, looping over all experts. Used in training.

    Every expert is called, with zero rows if it must be, so that each weight takes part in the backward pass.

    Args:
        x: [T, H] float.
        gate, up: E tensors [I, H]; down: E tensors [H, I].
        topk_idx: [T, K] int64.
        topk_weight: [T, K] float32.

    Returns:
        [T, H] in the dtype of `x`.
    """
    out = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for expert, (w_gate, w_up, w_down) in enumerate(zip(gate, up, down, strict=True)):
        token, slot = (topk_idx == expert).nonzero(as_tuple=True)
        y = expert_mlp(x[token], w_gate, w_up, w_down)
        out = out.index_add(0, token, y.to(out.dtype) * topk_weight[token, slot].unsqueeze(-1))
    return out.to(x.dtype)


def expert_buckets(
    x: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    topk_idx: Tensor,
    topk_weight: Tensor,
) -> Tensor:
    """The same sum with the (token, slot) pairs sorted into one bucket per expert. Used in eval mode.

    Experts without tokens are skipped. Gradients are kept: eval mode is not a reason to drop them.

    Args and returns as `expert_loop`.
    """
    flat_expert = topk_idx.reshape(-1)
    order = flat_expert.argsort(stable=True)
    sizes = torch.bincount(flat_expert, minlength=len(gate)).tolist()
    out = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for expert, rows in enumerate(order.split(sizes)):
        if rows.numel() == 0:
            continue
        token = rows // topk_idx.shape[1]
        y = expert_mlp(x[token], gate[expert], up[expert], down[expert])
        out = out.index_add(0, token, y.to(out.dtype) * topk_weight.reshape(-1)[rows].unsqueeze(-1))
    return out.to(x.dtype)
