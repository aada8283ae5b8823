"""A run whose stages are played by a stand-in for `train_stage`, so that launching is tested without training."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from lumina_ft.data.shards import make_meta, write_meta
from lumina_ft.tokens import PUBLISHED_MEDIA_IDS, PUBLISHED_TEXT_IDS, TokenSpec

REPOSITORY = Path(__file__).resolve().parents[3]

FAKE_TRAIN = '''
"""Plays lumina_ft.train.run in every child process."""
import json, logging, os, signal, socket, sys, time, types
from contextlib import suppress
from pathlib import Path


def fds():
    for entry in list(os.scandir("/proc/self/fd")):
        with suppress(OSError):
            os.stat(entry.path)
            yield entry


def train_stage(cfg, stage_index, *, resume, run_dir, stop, **_):
    from lumina_ft.checkpoint.commit import new_checkpoint
    from lumina_ft.checkpoint.directory import TrainState
    from lumina_ft.errors import DataError, Interrupted
    from lumina_ft.monitor.metrics import MetricsWriter

    import torch

    rank = int(os.environ["RANK"])
    mode = os.environ.get("FAKE_MODE", "ok")
    stage = cfg.stages[stage_index]
    with open(run_dir / f"seen-{stage.name}-{rank}.json", "w") as file:
        names = ("WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS", "DS_ACCELERATOR", "LUMINA_FT_FOREIGN_STAGE")
        seen = {name: os.environ.get(name) for name in names}
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        os.set_inheritable(listening.fileno(), True)
        fake.kept = listening
        seen["open_sockets"] = sum(os.readlink(f"/proc/self/fd/{fd.name}").startswith("socket:") for fd in fds())
        resumed = str(resume) if resume else None
        json.dump(seen | {"pid": os.getpid(), "resume": resumed, "threads": torch.get_num_threads()}, file)
    if rank == 0:
        print(f"printed in {stage.name}")
        logging.getLogger("lumina_ft").info("logged in %s", stage.name)
    if mode == "user-error" and rank == 1:
        raise DataError("rows.jsonl:7 — 9999 — must be below 4096 — fix the label")
    if mode == "user-error":
        # A peer is gone only after it has failed.
        while not (run_dir / "errors" / "rank-1.json").exists():
            time.sleep(0.05)
        raise ConnectionError("peer gone")
    if mode == "bug" and rank == 0:
        raise ZeroDivisionError("a bug of ours")
    if mode == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "stubborn":
        with stop.heeded():
            (run_dir / f"waiting-{rank}").touch()
            time.sleep(120)
    if mode == "stoppable":
        with stop.heeded():
            (run_dir / f"waiting-{rank}").touch()
            while not stop.number and not list(run_dir.glob("stopping-*")):
                time.sleep(0.05)
            if stop.number:
                (run_dir / f"stopping-{stop.number}").touch()
            (agreed,) = run_dir.glob("stopping-*")
            # Longer than a repeated signal may take.
            time.sleep(1.5)
            state = TrainState(2, 0, stage.name, 2, stage.steps, 2, 0.0, 0, {})
            if rank == 0:
                with new_checkpoint(run_dir, state) as folder:
                    (folder / "model").mkdir()
            while not (run_dir / "checkpoints" / "checkpoint-2" / "COMPLETE").is_file():
                time.sleep(0.05)
            raise Interrupted(int(agreed.name.split("-")[1]), "stage 'one', saved after step 2 of 3")
    if mode == "hang" and stage_index == 0:
        (run_dir / f"waiting-{rank}").touch()
        time.sleep(120)
    if mode in ("killed", "bug"):
        # A collective whose other side is gone, where the connection doesn't tell.
        with stop.heeded():
            time.sleep(120)
    if rank == 0:
        done = sum(s.steps for s in cfg.stages[:stage_index])
        start = json.loads((resume / "state.json").read_text()) if resume else {"stage_index": -1}
        first = start["stage_step"] if start["stage_index"] == stage_index else 0
        writer = MetricsWriter(run_dir, tensorboard=False)
        for step in range(first + 1, stage.steps + 1):
            writer.write(step, stage.name, {"loss": 1.0 / (done + step)})
        writer.close()
        entry = {"index": stage_index, "name": stage.name, "losses": {"loss": 1.0 / (done + stage.steps)}}
        path = run_dir / "summary.json"
        entries = [e for e in json.loads(path.read_text()) if e["index"] < stage_index] if path.is_file() else []
        path.write_text(json.dumps([*entries, entry]))
        steps = stage.steps
        state = TrainState(done + steps, stage_index, stage.name, steps, steps, steps, 0.0, 0, {})
        with new_checkpoint(run_dir, state) as folder:
            (folder / "model").mkdir()
    else:
        end = sum(s.steps for s in cfg.stages[:stage_index + 1])
        while not (run_dir / f"checkpoints/checkpoint-{end}/COMPLETE").is_file():
            time.sleep(0.05)


fake = types.ModuleType("lumina_ft.train.run")
fake.train_stage = train_stage
sys.modules["lumina_ft.train.run"] = fake
'''


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A config that passes every check before launching: two stages of 3 and 2 steps on two ranks."""
    spec = TokenSpec(PUBLISHED_TEXT_IDS, PUBLISHED_MEDIA_IDS, 8)
    meta = make_meta(
        counts={"t2i": 4},
        shards=(),
        spec=spec,
        tokenizer_identity="sha256:0",
        codec=None,
        system_prompts={},
        block_tokens=32,
    )
    (tmp_path / "data").mkdir()
    write_meta(tmp_path / "data", meta)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(FAKE_TRAIN)
    path = tmp_path / "run.yaml"
    path.write_text(
        textwrap.dedent(f"""\
        output_dir: {tmp_path}/out
        model: {{path: {tmp_path}/model}}
        data: {{path: {tmp_path}/data}}
        parallel: {{ranks: 2}}
        stages:
          - {{name: one, steps: 3, train: [heads]}}
          - {{name: two, steps: 2}}
        """)
    )
    return path


@pytest.fixture
def start(run_file: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start a command line in a process, with the stand-in installed in all its children."""

    def start_process(*command: str, mode: str = "ok", **env: str) -> subprocess.Popen[str]:
        full_env = {**os.environ, "PYTHONPATH": str(run_file.parent / "site"), "FAKE_MODE": mode, **env}
        full_env.pop("OMP_NUM_THREADS", None)
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=REPOSITORY,
            env=full_env | ({"OMP_NUM_THREADS": env["OMP_NUM_THREADS"]} if "OMP_NUM_THREADS" in env else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start_process


@pytest.fixture
def seen(run_file: Path) -> Callable[[str, int], dict[str, str | int | None]]:
    """What the stand-in noted in a stage and rank."""
    return lambda stage, rank: json.loads((run_file.parent / "out" / f"seen-{stage}-{rank}.json").read_text())
