"""This rank's micro-batches of each step, made ahead of time while a GPU computes."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from lumina_ft.batch import Batch
from lumina_ft.data.dataset import PackedDataset
from lumina_ft.parallel.dist import World


def step_batches(data: PackedDataset, step: int, packs_per_step: int, world: World) -> list[Batch]:
    """The batches that this rank runs in `step`, a function of the step alone."""
    packs = data.packs_of_step(step, packs_per_step)
    return [data.batch(pack) for pack in data.rank_packs(packs, world.rank, world.size)]


def stage_batches(
    data: PackedDataset, steps: range, packs_per_step: int, world: World, *, ahead: bool
) -> Iterator[tuple[int, list[Batch]]]:
    """(step, batches) for every step.

    Args:
        ahead: make the next step's batches in a thread. Of no use on the CPU, where it would compete with the step.
    """
    if not ahead:
        for step in steps:
            world.progress.mark("data", step=step + 1)
            yield step, step_batches(data, step, packs_per_step, world)
        return
    with ThreadPoolExecutor(max_workers=1) as pool:
        pending: Future[list[Batch]] | None = None
        for step in steps:
            world.progress.mark("data", step=step + 1)
            batches = (pending or pool.submit(step_batches, data, step, packs_per_step, world)).result()
            pending = pool.submit(step_batches, data, step + 1, packs_per_step, world) if step + 1 in steps else None
            yield step, batches
