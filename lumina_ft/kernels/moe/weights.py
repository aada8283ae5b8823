"""Weights of routed experts, as the implementations take them.

Shape legend: E experts, O outputs, I inputs, r rank. Of a single expert the same types hold matrices, without E.
"""

from typing import NamedTuple

from torch import Tensor


class Lora(NamedTuple):
    """A low-rank term that is added to a projection: scale B A drop(x).

    Attributes:
        a: [E, r, I]. b: [E, O, r].
        scale: factor of B A.
        dropout: probability with which an input of A is dropped where rows come with keys, see `moe.dropout`.
        stream: number of this projection among its expert's, so that each drops other inputs.
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0
    stream: int = 0


class Projection(NamedTuple):
    """weight: [E, O, I]. lora: added to it."""

    weight: Tensor
    lora: Lora | None = None

    def unbind(self) -> list["Projection"]:
        """One projection per expert.

        Unbinding stacks all gradients once in backward; indexing would write gradients of all experts for each of them.
        """
        weights = self.weight.unbind(0)
        if self.lora is None:
            return [Projection(weight) for weight in weights]
        pairs = zip(self.lora.a.unbind(0), self.lora.b.unbind(0), strict=True)
        return [Projection(w, self.lora._replace(a=a, b=b)) for w, (a, b) in zip(weights, pairs, strict=True)]


class Experts(NamedTuple):
    """down(silu(gate x) * up x)."""

    gate: Projection
    up: Projection
    down: Projection

    def unbind(self) -> list["Experts"]:
        """The experts one by one."""
        return [Experts(*parts) for parts in zip(*(part.unbind() for part in self), strict=True)]
