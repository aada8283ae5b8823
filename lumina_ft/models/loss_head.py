"""An output layer that can compute its own loss, so that its logits needn't exist all at once.

Shape legend: m rows, H hidden, V classes, r rank of an adapter.
"""

from typing import overload

import torch.nn.functional as F
from torch import Tensor, nn

from lumina_ft.kernels import LinearLoss, linear_cross_entropy


class LossHead(nn.Linear):
    """A linear layer without bias, called once in each forward pass whatever the number of rows.

    ZeRO-3 gathers and frees a weight around each call of its module, on all ranks at once: a loss that called the layer
    once per chunk would need as many chunks on every rank.

    Attributes:
        impl: value of `model.kernels`; see `kernels.linear_cross_entropy`.
    """

    computes_loss = True

    def __init__(self, hidden_size: int, classes: int) -> None:
        super().__init__(hidden_size, classes, bias=False)
        self.impl = "auto"

    @overload
    def forward(self, input: Tensor) -> Tensor: ...

    @overload
    def forward(self, input: Tensor, targets: Tensor, low_rank: tuple[Tensor, Tensor] | None = None) -> LinearLoss: ...

    def forward(
        self, input: Tensor, targets: Tensor | None = None, low_rank: tuple[Tensor, Tensor] | None = None
    ) -> Tensor | LinearLoss:
        """Logits; or, with targets, the sum of their cross-entropies.

        Args:
            input: [..., H]; [m, H] with targets.
            targets: [m] int64.
            low_rank: z [m, r] and b [V, r] of an adapter, for which `z @ b.T` is added to the logits.
        """
        if targets is None:
            return F.linear(input, self.weight)
        return linear_cross_entropy(input, self.weight, targets, low_rank, impl=self.impl)
