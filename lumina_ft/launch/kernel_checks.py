"""What can be known to be wrong with the choice of kernels before a process is started."""

from collections.abc import Iterator
from pathlib import Path

from lumina_ft.config.schema import RunConfig
from lumina_ft.errors import ConfigError


def kernel_problems(cfg: RunConfig, model: Path | str | None, *, gpu: bool) -> Iterator[str]:
    """Why `model.kernels` can't run this model on this machine.

    Args:
        model: where its `config.json` is found; None if there is none.
        gpu: the ranks will use NVIDIA GPUs. What these can do is checked in the ranks, before they read weights: to ask
            here would hold memory of a GPU as long as the run lasts.
    """
    spread = cfg.parallel.expert_parallel_size > 1
    # Alone, `auto` finds something for any model.
    if model is None or (cfg.model.kernels == "auto" and not spread):
        return
    import torch

    from lumina_ft.models.u2_config import U2Config, kernels_for

    try:
        kernels = kernels_for(U2Config.load(model), cfg.model.kernels, spread=spread)
        kernels.check(None if gpu else torch.device("cpu"), getattr(torch, cfg.model.dtype))
    except ConfigError as error:
        yield str(error)
