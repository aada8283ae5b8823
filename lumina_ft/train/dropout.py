"""Random draws of a forward pass, as a function of what it runs on."""

import zlib

import torch

from lumina_ft.config.schema import RunConfig


def draws_dropout(cfg: RunConfig, stage_index: int) -> bool:
    """Whether forward passes of a stage draw random numbers: an adapter that is trained, with dropout."""
    return cfg.lora is not None and cfg.lora.dropout > 0 and cfg.stages[stage_index].lora == "train"


def seed_dropout(seed: int, stage_index: int, step: int, pack: int) -> None:
    """Seed torch for the forward pass of one pack, so that its draws depend on neither ranks nor earlier passes.

    Args:
        step: 0-based step of the stage.
        pack: 0-based position among the packs of the step, over all ranks.
    """
    # One 32-bit hash of all: torch's CPU generator ignores the higher bits of a seed.
    torch.manual_seed(zlib.crc32(f"{seed} dropout {stage_index} {step} {pack}".encode()))
