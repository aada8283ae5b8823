"""A tiny random model and prompts for it."""

from collections.abc import Sequence

import pytest
import torch

from lumina_ft.generate.prompt import Prompt, begin_image_answer, begin_text_answer
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.tokens import TokenSpec


class Tiny:
    """A model of the shipped demo size class, its ids, and prompt builders."""

    def __init__(self) -> None:
        config = U2Config.load("u2-tiny")
        config.num_hidden_layers, config.hidden_size, config.head_dim = 2, 32, 8
        config.initializer_range = 0.3
        self.model = U2ForDiffusion(config).eval()
        self.model.init_weights_(seed=4)
        self.spec: TokenSpec = config.token_spec()

    def prefix(self, ids: Sequence[int]) -> Prompt:
        """A clean user turn of plain text ids."""
        count = len(ids)
        return Prompt(
            input_ids=torch.tensor(ids)[:, None].expand(count, self.spec.num_codebooks),
            type_ids=torch.ones(count, dtype=torch.uint8),
            position_ids=torch.arange(count),
            turn_ids=torch.zeros(count, dtype=torch.int64),
            block_ids=torch.full((count,), -1),
            is_clean=torch.ones(count, dtype=torch.bool),
        )

    def text(self, ids: Sequence[int]) -> Prompt:
        return begin_text_answer(self.prefix(ids), self.spec)

    def image(self, ids: Sequence[int], height: int, width: int) -> Prompt:
        return begin_image_answer(self.prefix(ids), self.spec, height, width)


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    return Tiny()
