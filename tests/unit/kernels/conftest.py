"""Fixtures of this folder."""

import pytest
import torch


@pytest.fixture
def nan_filled_buffers():
    """Uninitialised memory is NaN: a result read from it would show."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
