"""A rank's batches are a function of the step, made ahead or not."""

from types import SimpleNamespace

import pytest

from lumina_ft.data.dataset import PackedDataset
from lumina_ft.parallel.progress import Progress
from lumina_ft.train.batches import stage_batches


class Packs:
    """Numbers in place of packs; the last step of an epoch of 7 packs is filled up."""

    rank_packs = staticmethod(PackedDataset.rank_packs)

    def packs_of_step(self, step, packs_per_step):
        first = step * packs_per_step
        return [number if number < 7 else None for number in range(first, first + packs_per_step)]

    def batch(self, pack):
        if pack == 6:
            raise ValueError("broken sample")
        return f"batch {pack}"


def steps(rank, size, *, ahead, stop=2):
    world = SimpleNamespace(rank=rank, size=size, progress=Progress())
    return list(stage_batches(Packs(), range(stop), 4, world, ahead=ahead))  # pyright: ignore


@pytest.mark.parametrize("ahead", [False, True])
def test_ranks_share_each_step_without_loss_or_repetition(ahead):
    one = steps(0, 1, ahead=ahead, stop=1)
    two = [steps(rank, 2, ahead=ahead, stop=1) for rank in (0, 1)]
    assert one == [(0, ["batch 0", "batch 1", "batch 2", "batch 3"])]
    assert sorted(two[0][0][1] + two[1][0][1]) == one[0][1]


@pytest.mark.parametrize("ahead", [False, True])
def test_an_error_in_the_data_reaches_the_loop(ahead):
    with pytest.raises(ValueError, match="broken sample"):
        steps(0, 1, ahead=ahead)
