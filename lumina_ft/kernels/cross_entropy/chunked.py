"""Cross-entropy of a linear layer's outputs, a few rows at a time: memory is that of one chunk of logits.

The logits of 8192 rows over 157,184 words take 10 GB as log-probabilities and gradients. Here a chunk's logits exist
only while its loss, and in backward its gradients, are computed; backward computes them again. Rows that fit into one
chunk keep their log-probabilities instead, and give the same bits as the reference's loss.

Shape legend: m rows, H hidden, V classes, r rank of an adapter, R rows of a chunk.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lumina_ft.kernels.cross_entropy.ref import LinearLoss, all_finite

CHUNK_BYTES = 1 << 30
"""Of logits in float32 and their log-probabilities: 853 rows of 157,184 words. Fewer rows would read and write the
gradient of the weight (1.3 GB in float32) more often than the matrix products can hide."""

_ROW_MULTIPLE = 128
"""Rows of a chunk are a multiple of the tiles of matrix products, if a chunk has that many."""


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    low_rank: tuple[Tensor, Tensor] | None = None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> LinearLoss:
    """Loss of logits `hidden @ weight.T`, plus `z @ b.T` with a low-rank term.

    Sums go from the first chunk to the last: the same inputs give the same bits.

    Args:
        hidden: [m, H] float, m >= 1. weight: [V, H] float. targets: [m] int64 in 0..V-1.
        low_rank: z [m, r] and b [V, r] of an adapter, scale and dropout included in z.
        chunk_bytes: most bytes of a chunk's logits and log-probabilities; a chunk has one row at least.
    """
    z, b = (None, None) if low_rank is None else low_rank
    trained = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, z, b))
    rows = chunk_rows(weight.shape[0], chunk_bytes)
    keep = trained and hidden.shape[0] <= rows
    total, finite, _ = _chunked_cross_entropy(hidden, weight, targets, z, b, rows, keep)
    return LinearLoss(total, finite)


def chunk_rows(classes: int, chunk_bytes: int) -> int:
    """Rows of a chunk. Depends on nothing but its arguments, so a resumed run sums in the same order."""
    rows = max(1, chunk_bytes // (2 * torch.float32.itemsize * classes))
    return rows - rows % _ROW_MULTIPLE if rows > _ROW_MULTIPLE else rows


def _chunks(rows: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _log_probs(hidden: Tensor, weight: Tensor, z: Tensor | None, b: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities [R, V] in float32, and whether the logits are finite."""
    logits = hidden @ weight.t()
    if z is not None and b is not None:
        logits += z @ b.t()
    return F.log_softmax(logits.float(), dim=-1), all_finite(logits)


@torch.library.custom_op("lumina_ft::chunked_cross_entropy", mutates_args=())
def _chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, z: Tensor | None, b: Tensor | None, rows: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Total, finite, and log-probabilities: [m, V] with `keep`, which one chunk allows, otherwise [0, V]."""
    total = hidden.new_zeros((), dtype=torch.float32)
    finite = torch.ones((), dtype=torch.bool, device=hidden.device)
    kept = hidden.new_empty((0, weight.shape[0]), dtype=torch.float32)
    for part in _chunks(hidden.shape[0], rows):
        log_probs, sane = _log_probs(hidden[part], weight, None if z is None else z[part], b)
        total += F.nll_loss(log_probs, targets[part], reduction="sum")
        finite &= sane
        if keep:
            kept = log_probs
        # Not beside the next chunk's.
        del log_probs
    return total, finite, kept


@_chunked_cross_entropy.register_fake
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, z: Tensor | None, b: Tensor | None, rows: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    kept = hidden.new_empty((hidden.shape[0] if keep else 0, weight.shape[0]), dtype=torch.float32)
    return hidden.new_empty((), dtype=torch.float32), hidden.new_empty((), dtype=torch.bool), kept


@torch.library.custom_op("lumina_ft::chunked_cross_entropy_backward", mutates_args=())
def _chunked_cross_entropy_backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    z: Tensor | None,
    b: Tensor | None,
    kept: Tensor,
    rows: int,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight, z and b from that of the total; [0] where not needed."""
    one_chunk = hidden.shape[0] <= rows
    terms = [_Term(hidden, weight, needed[0], needed[1], one_chunk)]
    if z is not None and b is not None:
        terms.append(_Term(z, b, needed[2], needed[3], one_chunk))
    for part in _chunks(hidden.shape[0], rows):
        if kept.shape[0]:
            gradient = kept.exp()
        else:
            gradient = _log_probs(hidden[part], weight, None if z is None else z[part], b)[0].exp_()
        gradient *= grad
        columns = targets[part].unsqueeze(1)
        gradient.scatter_(1, columns, gradient.gather(1, columns) - grad)
        gradient = gradient.to(weight.dtype)
        for term in terms:
            term.add(part, gradient)
        del gradient
    grads = [g for term in terms for g in term.gradients()]
    while len(grads) < len(needed):
        grads.append(hidden.new_empty(0))
    return grads[0], grads[1], grads[2], grads[3]


@_chunked_cross_entropy_backward.register_fake
def _(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    z: Tensor | None,
    b: Tensor | None,
    kept: Tensor,
    rows: int,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = [
        torch.empty_like(x) if x is not None and need else hidden.new_empty(0)
        for x, need in zip((hidden, weight, z, b), needed, strict=True)
    ]
    return grads[0], grads[1], grads[2], grads[3]


class _Term:
    """x [m, I] and w [V, I] of a part `x @ w.T` of the logits, and their gradients.

    The gradient of w is a sum over chunks; it is taken in float32.
    """

    def __init__(self, x: Tensor, w: Tensor, needs_x: bool, needs_w: bool, one_chunk: bool) -> None:
        self.x, self.w, self.needs_w = x, w, needs_w
        self.grad_x = torch.empty_like(x) if needs_x else None
        self.grad_w = None if one_chunk or not needs_w else torch.zeros_like(w, dtype=torch.float32)

    def add(self, rows: slice, gradient: Tensor) -> None:
        """gradient: [R, V] of the logits of some rows."""
        if self.grad_x is not None:
            torch.mm(gradient, self.w, out=self.grad_x[rows])
        if not self.needs_w:
            return
        if self.grad_w is None:
            self.grad_w = gradient.t() @ self.x
        elif gradient.is_cuda and gradient.dtype != torch.float32:
            # The CPU has no such product.
            torch.addmm(self.grad_w, gradient.t(), self.x[rows], out_dtype=torch.float32, out=self.grad_w)
        else:
            self.grad_w.addmm_(gradient.t().float(), self.x[rows].float())

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Of x and w; [0] where not needed."""
        grad_x = self.x.new_empty(0) if self.grad_x is None else self.grad_x
        grad_w = self.w.new_empty(0) if self.grad_w is None else self.grad_w.to(self.w.dtype)
        return grad_x, grad_w


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """The weight is saved itself, no view of it: see `moe.products`."""
    hidden, weight, targets, z, b, ctx.rows, _ = inputs
    ctx.save_for_backward(hidden, weight, targets, z, b, output[2])
    # The log-probabilities are an output that nobody uses; their gradient would be a chunk of zeros.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, _finite: None, _kept: None) -> tuple[Tensor | None, ...]:
    hidden, weight, targets, z, b, kept = ctx.saved_tensors
    needed = [ctx.needs_input_grad[i] for i in (0, 1, 3, 4)]
    found = _chunked_cross_entropy_backward(grad, hidden, weight, targets, z, b, kept, ctx.rows, needed)
    hidden_grad, weight_grad, z_grad, b_grad = (g if need else None for g, need in zip(found, needed, strict=True))
    return hidden_grad, weight_grad, None, z_grad, b_grad, None, None


_chunked_cross_entropy.register_autograd(_backward, setup_context=_save)
