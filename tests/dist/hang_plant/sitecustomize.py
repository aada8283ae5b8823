"""Makes one rank hang in a training step. Every Python process loads this, because its folder is on PYTHONPATH.

`LUMINA_FT_TEST_HANG` is a JSON object: `rank` and 0-based `step`; `how`, one of the functions below; `touch`, a file
that is made at that moment. Paths in the diagnosis name this file: it stands for whatever holds a rank up.
"""

import ctypes
import functools
import importlib.machinery
import json
import os
import signal
import sys
import time
from pathlib import Path

LOOP = "lumina_ft.train.loop"
BATCH_SECONDS, TENSOR_SECONDS = 1.5, 0.16
FOREVER = 3600


class Plant:
    """What this rank does, and when."""

    def __init__(self, rank: int, step: int, how: str, touch: str) -> None:
        self.mine = int(os.environ["RANK"]) == rank
        self.step, self.how, self.touch = step, how, touch
        self.armed = False

    def strike(self) -> None:
        """The moment; once."""
        self.armed = False
        Path(self.touch).touch()
        getattr(self, self.how)()

    def collective(self) -> None:
        time.sleep(FOREVER)

    def forward(self) -> None:
        time.sleep(FOREVER)

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def lock(self) -> None:
        """A function of C that doesn't let go of Python's lock."""
        ctypes.PyDLL(None).sleep(FOREVER)

    def slow_down(self) -> None:
        """Not a hang: from this step on, every rank evaluates slowly, and whoever writes the model takes its time."""
        import lumina_ft.checkpoint.writers as writers
        import lumina_ft.train.evaluate as evaluate

        Path(self.touch).touch()
        real_batches, real_write = evaluate.step_batches, writers.Lane._write

        def step_batches(*args, **kwargs):
            for batch in real_batches(*args, **kwargs):
                time.sleep(BATCH_SECONDS)
                yield batch

        def write(lane, *args, **kwargs) -> None:
            time.sleep(TENSOR_SECONDS if lane._plan.stem == "model" else 0.0)
            real_write(lane, *args, **kwargs)

        evaluate.step_batches, writers.Lane._write = step_batches, write

    def patch(self, loop) -> None:
        """Change the training loop's module as soon as it exists."""
        import torch.distributed as torch_dist

        real_step, real_reduce = loop.train_step, torch_dist.all_reduce

        @functools.wraps(real_step)
        def train_step(run, step, *args, **kwargs):
            if self.how == "slow" and step == self.step:
                self.slow_down()
            elif self.mine and step == self.step:
                self.armed = True
                if self.how != "collective":
                    layer = run.objective.model.get_submodule("model.layers.1.mlp")
                    layer.register_forward_pre_hook(lambda *_: self.strike() if self.armed else None)
            return real_step(run, step, *args, **kwargs)

        @functools.wraps(real_reduce)
        def all_reduce(*args, **kwargs):
            # The first one of a step counts positions; by the second one the model has run.
            if self.armed and self.how == "collective" and sys._getframe(2).f_code.co_name == "max":
                self.strike()
            return real_reduce(*args, **kwargs)

        loop.train_step = train_step
        torch_dist.all_reduce = all_reduce


class Finder:
    """Hands a module to the plant after it has been executed."""

    def __init__(self, plant: Plant) -> None:
        self.plant = plant

    def find_spec(self, name: str, path, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == LOOP else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module) -> None:
            execute(module)
            self.plant.patch(module)

        spec.loader.exec_module = exec_module
        return spec


if "RANK" in os.environ and "LUMINA_FT_TEST_HANG" in os.environ:
    sys.meta_path.insert(0, Finder(Plant(**json.loads(os.environ["LUMINA_FT_TEST_HANG"]))))
