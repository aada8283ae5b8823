"""T14: what a rank notes about itself, and what it makes of it when asked."""

import os
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed import distributed_c10d

from lumina_ft.batch import Batch
from lumina_ft.parallel.collectives import count_collectives
from lumina_ft.parallel.page import read_page
from lumina_ft.parallel.position import describe_batch
from lumina_ft.parallel.progress import Progress


def make_batch() -> Batch:
    """A text sample of 4 rows (2 supervised), an image sample of 3 (2 supervised), one row of padding; 2 codebooks."""
    labels = torch.full((8, 2), -100)
    labels[2:4] = 7
    labels[5:7] = 3
    return Batch(
        input_ids=torch.zeros(8, 2, dtype=torch.int64),
        labels=labels,
        type_ids=torch.tensor([1, 1, 3, 3, 1, 4, 4, 0], dtype=torch.uint8),
        position_ids=torch.zeros(8, dtype=torch.int64),
        turn_ids=torch.zeros(8, dtype=torch.int64),
        block_ids=torch.zeros(8, dtype=torch.int64),
        is_clean=torch.zeros(8, dtype=torch.bool),
        noised=torch.zeros(8, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, 4, 7], dtype=torch.int32),
        valid=torch.tensor([True] * 7 + [False]),
        sample_ids=torch.tensor([90, 12]),
        task_ids=torch.tensor([1, 0]),
    )


def test_T14_batch_composition_counts_samples_tokens_and_supervised_positions():
    shape = describe_batch(make_batch(), ("t2i", "text"))
    assert (shape.samples, shape.tokens, shape.valid, shape.text, shape.image) == (2, 8, 7, 2, 2)
    assert shape.rows == [90, 12]
    assert shape.tasks == {"text": 1, "t2i": 1}


def test_T14_the_last_module_is_the_one_that_hangs():
    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert go.wait(10)
            return x

    inside, go = threading.Event(), threading.Event()
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Slow(), nn.Linear(2, 2)))
    progress = Progress()
    undo = progress.follow(model)
    thread = threading.Thread(target=model, args=(torch.zeros(1, 2),))
    thread.start()
    assert inside.wait(10)
    assert progress.module == "1.0"
    go.set()
    thread.join()
    assert progress.module == "1.1"
    marks = progress.marks
    undo()
    model(torch.zeros(1, 2))
    assert progress.marks == marks


def test_a_step_begins_outside_any_micro_batch():
    progress, batch = Progress(), make_batch()
    progress.begin_stage("heads", 9, ("t2i", "text"))
    progress.mark("data", step=4)
    progress.mark("forward", micro_batch=2, batch=batch)
    progress.mark("backward")
    position = progress.position(1, 2.5)
    assert (position.stage, position.step, position.steps, position.micro_batch) == ("heads", 4, 9, 2)
    assert (position.phase, position.idle_seconds, position.marks) == ("backward", 2.5, 4)
    assert position.batch == describe_batch(batch, ("t2i", "text"))
    assert "test_progress.py" in position.stack[0] or "progress.py" in position.stack[0]
    progress.mark("data", step=5)
    assert progress.position(1, 0.0).micro_batch == 0


@pytest.fixture
def group():
    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    yield
    torch_dist.destroy_process_group()


def test_T14_collectives_are_counted_once_and_put_back(group):
    before = {name: getattr(torch_dist, name) for name in ("all_reduce", "all_gather_object", "barrier")}
    wait = torch_dist.Work.wait
    progress = Progress()
    undo = count_collectives(progress)
    torch_dist.all_reduce(torch.ones(2))
    assert (progress.collectives, progress.collective, progress.inside) == (1, "all_reduce", "")
    # Built from others, which its module looks up itself: still one.
    torch_dist.all_gather_object([None], {"a": 1})
    assert (progress.collectives, progress.collective) == (2, "all_gather_object")
    # DeepSpeed calls this one in the module that defines it.
    distributed_c10d.all_gather_into_tensor(torch.empty(2), torch.ones(2))
    assert progress.collectives == 3
    work = torch_dist.all_reduce(torch.ones(2), async_op=True)
    assert work is not None
    work.wait()
    assert progress.collectives == 4
    undo()
    torch_dist.all_reduce(torch.ones(2))
    assert progress.collectives == 4
    assert {name: getattr(torch_dist, name) for name in before} == before and torch_dist.Work.wait is wait


def test_T14_a_rank_held_up_on_the_way_into_a_collective_says_so(group, monkeypatch):
    entered, go = threading.Event(), threading.Event()
    real = torch_dist.all_reduce

    def slow(tensor: torch.Tensor) -> None:
        entered.set()
        assert go.wait(10)
        real(tensor)

    monkeypatch.setattr(torch_dist, "all_reduce", slow)
    progress = Progress()
    undo = count_collectives(progress)
    thread = threading.Thread(target=lambda: torch_dist.all_reduce(torch.ones(2)))
    thread.start()
    assert entered.wait(10)
    time.sleep(0.05)
    position = progress.position(0, 0.0)
    go.set()
    thread.join()
    undo()
    assert (position.inside, position.collectives, position.held_up) == ("all_reduce", 1, True)
    assert position.stack[0].startswith("python3") or "threading.py" in position.stack[0]


def test_an_error_inside_a_collective_leaves_it(group):
    progress = Progress()
    undo = count_collectives(progress)
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        torch_dist.all_reduce("no tensor")  # pyright: ignore
    undo()
    assert progress.inside == ""


NEIGHBOUR = """
import os, sys, torch
from torch import nn
from lumina_ft.parallel.page import read_page
from lumina_ft.parallel.progress import Progress

progress = Progress()
page = progress.publish()
model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
progress.follow(model)
progress.begin_stage("heads", 9, ("t2i",))
progress.mark("forward", step=4, micro_batch=2)
model(torch.zeros(1, 2))
progress.enter_collective(7)
print(page.fd, flush=True)
os.kill(os.getpid(), 19)
"""


def test_T14_the_place_of_a_stopped_process_is_read_by_its_neighbour():
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        fd = int(process.stdout.readline())
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        progress = Progress()
        progress.module_names = ["0", "1", "1.0", "1.1"]
        position = progress.neighbour(3, process.pid, fd)
    finally:
        process.kill()
        process.communicate()
    assert position is not None
    assert (position.rank, position.stage, position.step, position.steps, position.micro_batch) == (3, "heads", 4, 9, 2)
    assert (position.phase, position.module, position.state) == ("forward", "1.1", "stopped")
    assert (position.collectives, position.collective, position.inside) == (1, "all_reduce", "all_reduce")
    assert progress.neighbour(3, process.pid, fd) is None


def test_a_page_keeps_what_fits_and_what_was_noted_before_it():
    progress = Progress()
    progress.enter_collective(2)
    progress.begin_stage("x" * 10_000, 9, ())
    page = progress.publish()
    assert progress.collectives == 1
    content = read_page(os.getpid(), page.fd)
    assert content is not None and content.numbers[1] == 1 and 3000 < len(content.text) < 4096
    page.close()
    progress.mark("forward")
    assert progress.phase == "forward"
