"""Plants one fault in the ranks of a run. Every Python process loads this, because its folder is on PYTHONPATH.

`LUMINA_FT_TEST_PLANT` is a JSON object: `trace`, a file that every arrival at a point is noted in; and, if there is a
fault, `point`, `rank` and `arrival` (which time, from 1) that it waits for, `landed`, a file that is made when it
happens, and `acts`, what happens: `[["kill", "rank" | "ranks" | "run"], ["signal", N], ["signal_rank", N],
["sleep", S], ["shell", CMD], ["limit", N]]`.

Points are those of the checkpoint protocol; `step`: a training step is about to begin; and, if the fault waits for it,
`loss`: a micro-batch is between its forward and its backward pass.
"""

import functools
import importlib.machinery
import json
import os
import signal
import subprocess
import sys
import time

COMMIT = "lumina_ft.checkpoint.commit"
LOOP = "lumina_ft.train.loop"


class Plant:
    """What this rank does where."""

    def __init__(self, orders: dict) -> None:
        self.orders = orders
        self.rank = int(os.environ["RANK"])
        self.arrivals = 0

    def arrive(self, point: str) -> None:
        """Note the arrival, and act if this is the moment."""
        with open(self.orders["trace"], "a") as trace:
            trace.write(f"{self.rank} {point}\n")
        if (point, self.rank) != (self.orders.get("point"), self.orders.get("rank")):
            return
        self.arrivals += 1
        if self.arrivals == self.orders["arrival"]:
            with open(self.orders["landed"], "w") as landed:
                landed.write(f"{point}\n")
            for verb, value in self.orders["acts"]:
                getattr(self, verb)(value)

    def kill(self, whom: str) -> None:
        """SIGKILL for this rank, for all ranks, or for the whole family from the launcher down."""
        import psutil

        agent = psutil.Process(os.getppid())
        victims = [] if whom == "rank" else [child for child in agent.children() if child.pid != os.getpid()]
        if whom == "run":
            victims = [agent.parent(), agent, *victims]
        for victim in victims:
            victim.kill()
        os.kill(os.getpid(), signal.SIGKILL)

    def signal(self, number: int) -> None:
        """A signal for the launcher, as from a terminal or a batch system."""
        import psutil

        psutil.Process(os.getppid()).parent().send_signal(number)

    def signal_rank(self, number: int) -> None:
        """A signal for this rank alone."""
        os.kill(os.getpid(), number)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def shell(self, command: str) -> None:
        subprocess.run(["sh", "-c", command], check=False)

    def limit(self, num_bytes: int) -> None:
        """No file of this rank may grow beyond a size from now on."""
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

    def patch_commit(self, module) -> None:
        real = module.reached

        @functools.wraps(real)
        def reached(point: str) -> None:
            assert point in module.POINTS, f"{point} is not in POINTS"
            self.arrive(point)
            real(point)

        module.reached = reached

    def patch_loop(self, module) -> None:
        real = module.train_step

        @functools.wraps(real)
        def train_step(*args, **kwargs):
            self.arrive("step")
            return real(*args, **kwargs)

        module.train_step = train_step
        if self.orders.get("point") != "loss":
            return
        judge = module._find_nonfinite

        @functools.wraps(judge)
        def find_nonfinite(*args):
            self.arrive("loss")
            return judge(*args)

        module._find_nonfinite = find_nonfinite


class Finder:
    """Lets the plant change a module as soon as it has been executed, before anyone imports names from it."""

    def __init__(self, patches: dict) -> None:
        self.patches = patches

    def find_spec(self, name: str, path, target=None):
        patch = self.patches.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if patch else None
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


if "RANK" in os.environ and "LUMINA_FT_TEST_PLANT" in os.environ:
    plant = Plant(json.loads(os.environ["LUMINA_FT_TEST_PLANT"]))
    sys.meta_path.insert(0, Finder({COMMIT: plant.patch_commit, LOOP: plant.patch_loop}))
