"""Memory that libraries take on the CPU, measured in the process that plans: it has imported what a rank imports."""

from functools import lru_cache

import torch

from lumina_ft.models.u2_config import U2Config
from lumina_ft.parallel.memory import anonymous_bytes
from lumina_ft.plan.activations import Workload
from lumina_ft.plan.states import StageStates

_SAMPLES = 48
_GROWN = 8


def library_bytes(config: U2Config, states: StageStates, load: Workload, dtype: str) -> int:
    """Interpreter, libraries and their tables; in bfloat16 also oneDNN's kernels of one pack's products."""
    held = anonymous_bytes()
    if dtype == "bfloat16":
        held += product_shapes(config, states, load) * kernel_bytes(config.hidden_size, config.moe_intermediate_size)
    return held


def product_shapes(config: U2Config, states: StageStates, load: Workload) -> int:
    """Different shapes of matrix products in a step.

    Linear layers of one size share theirs: forward, gradient of the input and, if trained, of the weight. An expert has
    those for each number of rows that one may get, taken as up to twice the mean, and each of an adapter's pair has
    them too. Every further size of a pack adds as many as the linear layers have.
    """
    trained = {info.name for info in states.plan.trained}
    dense: dict[tuple[int, ...], bool] = {}
    expert: dict[tuple[int, ...], bool] = {}
    for info, *_ in states.params:
        shapes = {2: dense, 3: expert}.get(len(info.shape))
        if shapes is not None:
            shapes[info.shape] = shapes.get(info.shape, False) or info.name in trained
    rows = 2 * load.tokens * config.num_experts_per_tok * states.sharing // config.num_experts
    return sum(2 + updated for updated in dense.values()) + rows * sum(2 + updated for updated in expert.values())


@lru_cache(maxsize=8)
def kernel_bytes(inputs: int, outputs: int) -> int:
    """What oneDNN keeps for good for each new shape of a bfloat16 product: its compiled kernel and description.

    Args:
        inputs, outputs: sizes of the weight; the number of rows is what changes.
    """
    weight = torch.ones(inputs, outputs, dtype=torch.bfloat16)
    rows = torch.ones(_GROWN + _SAMPLES, inputs, dtype=torch.bfloat16)
    with torch.no_grad():
        for count in range(1, _GROWN + 1):
            _ = rows[:count] @ weight
        before = anonymous_bytes()
        for count in range(_GROWN + 1, _GROWN + _SAMPLES + 1):
            _ = rows[:count] @ weight
    return max(0, anonymous_bytes() - before) // _SAMPLES
