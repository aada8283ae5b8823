"""PEFT's linear layer around an output layer that computes its own loss.

Shape legend: m rows, H hidden, V classes, r rank.
"""

from typing import Any

from peft.tuners.lora import Linear
from torch import Tensor

from lumina_ft.adapters.live import ADAPTER_NAME
from lumina_ft.kernels import LinearLoss, loss_of_logits
from lumina_ft.models.loss_head import LossHead


class AdaptedHead(Linear):
    """Its low-rank term becomes part of the loss, so that no [m, V] tensor exists for it either.

    B is then read by the base layer's forward, not by its own: under ZeRO-3 the base layer has to gather it, see
    `parallel.zero3.reads_also`.
    """

    computes_loss = True

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        """Logits; or, with targets, a `LinearLoss`.

        Args:
            x: [..., H]; [m, H] with targets.
            targets: [m] int64.
        """
        return super().forward(x) if targets is None else self._loss(x, targets)

    def _loss(self, x: Tensor, targets: Tensor) -> LinearLoss:
        if self.disable_adapters or self.merged or self.lora_variant or self.active_adapters != [ADAPTER_NAME]:
            # DoRA scales whole rows of the weight; the other states belong to PEFT's own tools.
            return loss_of_logits(super().forward(x), targets)
        head = self.base_layer
        assert isinstance(head, LossHead)
        a, b = self.lora_A[ADAPTER_NAME], self.lora_B[ADAPTER_NAME]
        z = a(self.lora_dropout[ADAPTER_NAME](x)) * self.scaling[ADAPTER_NAME]
        return head(x, targets, (z, b.weight))
