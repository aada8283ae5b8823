"""Building a model below ZeRO-3, where nothing is partitioned."""

import pytest
import torch
from small_u2 import small_config

from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.parallel.zero3 import init_context


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_M4_weights_are_built_in_the_training_dtype_and_buffers_in_their_own(stage):
    """An fp32 copy of a 16.9 B model would take 67 GB of each rank's memory for a moment."""
    with init_context({"zero_optimization": {"stage": stage}}, torch.bfloat16):
        model = U2ForDiffusion(small_config())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    biases = [b for name, b in model.named_buffers() if name.endswith("expert_bias")]
    assert biases and {b.dtype for b in biases} == {torch.float32}
    assert torch.get_default_dtype() == torch.float32
