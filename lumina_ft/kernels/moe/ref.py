"""Reference routed experts: one expert at a time (M5).

Shape legend: T tokens, H hidden, I expert width, E experts, K chosen experts per token, n rows of one expert.

Weights come as one set of matrices per expert, those of stacked parameters through `Experts.unbind`. Both functions
read sizes on the host, so they are for reading, checking and small runs. They know nothing of expert parallelism: every
expert must be here.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lumina_ft.kernels.moe.dropout import drop_
from lumina_ft.kernels.moe.weights import Experts, Projection


def project(x: Tensor, projection: Projection, keys: Tensor | None = None) -> Tensor:
    """W x + scale B A drop(x) of one expert.

    Args:
        x: [n, I]. projection: weight [O, I].
        keys: [n, 1] int64, see `moe.dropout`; None: nothing is dropped.

    Returns:
        [n, O].
    """
    y = F.linear(x, projection.weight)
    lora = projection.lora
    if lora is None:
        return y
    if keys is not None and lora.dropout:
        mask = drop_(torch.ones_like(x, requires_grad=False), keys, lora.dropout, lora.stream)
        x = x * mask / (1.0 - lora.dropout)
    return y + lora.scale * F.linear(F.linear(x, lora.a), lora.b)


def expert_mlp(x: Tensor, expert: Experts, keys: Tensor | None = None) -> Tensor:
    """down(silu(gate x) * up x) of one expert. x: [n, H]. keys: see `project`. Returns [n, H]."""
    hidden = F.silu(project(x, expert.gate, keys)) * project(x, expert.up, keys)
    return project(hidden, expert.down, keys)


def expert_loop(
    x: Tensor, experts: Sequence[Experts], topk_idx: Tensor, topk_weight: Tensor, keys: Tensor | None = None
) -> Tensor:
    """Weighted sum over each token's experts, looping over all experts. Used in training.

    Every expert is called, with zero rows if it must be, so that each weight takes part in the backward pass.

    Args:
        x: [T, H] float.
        experts: E of them.
        topk_idx: [T, K] int64.
        topk_weight: [T, K] float32.
        keys: [T, K] int64, see `moe.dropout`; None: no dropout.

    Returns:
        [T, H] in the dtype of `x`.
    """
    out = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for number, expert in enumerate(experts):
        token, slot = (topk_idx == number).nonzero(as_tuple=True)
        y = expert_mlp(x[token], expert, None if keys is None else keys[token, slot].unsqueeze(-1))
        out = out.index_add(0, token, y.to(out.dtype) * topk_weight[token, slot].unsqueeze(-1))
    return out.to(x.dtype)


def expert_buckets(
    x: Tensor, experts: Sequence[Experts], topk_idx: Tensor, topk_weight: Tensor, keys: Tensor | None = None
) -> Tensor:
    """The same sum with the (token, slot) pairs sorted into one bucket per expert. Used in eval mode.

    Experts without tokens are skipped. Gradients are kept: eval mode is not a reason to drop them.

    Args and returns as `expert_loop`.
    """
    flat_expert = topk_idx.reshape(-1)
    order = flat_expert.argsort(stable=True)
    sizes = torch.bincount(flat_expert, minlength=len(experts)).tolist()
    out = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for number, rows in enumerate(order.split(sizes)):
        if rows.numel() == 0:
            continue
        token = rows // topk_idx.shape[1]
        y = expert_mlp(x[token], experts[number], None if keys is None else keys.reshape(-1, 1)[rows])
        out = out.index_add(0, token, y.to(out.dtype) * topk_weight.reshape(-1)[rows].unsqueeze(-1))
    return out.to(x.dtype)
