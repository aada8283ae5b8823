"""What can be known to be wrong with a run before a single process is started."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from lumina_ft.config.schema import RunConfig
from lumina_ft.errors import ConfigError, LuminaError, nearest
from lumina_ft.launch.expert_checks import bias_problems, expert_parallel_problems
from lumina_ft.launch.kernel_checks import kernel_problems
from lumina_ft.parallel.ds_config import ZeroSettings, read_ds_config, resolve_ds_config

SHIPPED_MODEL_CONFIGS = Path(__file__).resolve().parent.parent / "models" / "configs"


def check_run(cfg: RunConfig) -> None:
    """Check paths, data sets, tasks, the DeepSpeed JSON, the experts' placement and the kernels, everything at once.

    Raises:
        ConfigError: one line per problem.
    """
    checks: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
        _output_problems,
        _model_problems,
        _data_problems,
        _deepspeed_problems,
        _model_use_problems,
    )
    problems = list(dict.fromkeys(problem for check in checks for problem in check(cfg)))
    if problems:
        raise ConfigError("\n".join(problems))


def choose_port(requested: int) -> int:
    """A port for the ranks' rendezvous on this machine (V11).

    Args:
        requested: `parallel.master_port`; 0 takes a free one.

    Raises:
        ConfigError: the requested port is in use.
    """
    with socket.socket() as probe:
        # As the ranks' store does: a port with only connections in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", requested))
        except OSError as error:
            raise ConfigError(
                f"parallel.master_port — {requested} — {error.strerror} — must be a free port; use 0 to take any"
            ) from None
        return int(probe.getsockname()[1])


def has_gpu() -> bool:
    """Whether this process sees an NVIDIA device, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if os.environ.get("DS_ACCELERATOR") == "cpu" or visible in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*"))


def cpu_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _output_problems(cfg: RunConfig) -> Iterator[str]:
    path = cfg.output_dir
    nearest_existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not nearest_existing.is_dir():
        yield f"output_dir — {str(path)!r} — {nearest_existing} is a file — must be a directory; choose another"
        return
    for folder in (nearest_existing, path / "checkpoints"):
        if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
            yield f"output_dir — {str(path)!r} — {folder} is not writable — choose another directory"


def _model_problems(cfg: RunConfig) -> Iterator[str]:
    model = cfg.model
    if model.path is not None:
        if not model.path.is_dir():
            yield f"model.path — {str(model.path)!r} — no such directory — must hold config.json and *.safetensors"
        elif not (model.path / "config.json").is_file():
            yield f"model.path — {str(model.path)!r} — no config.json in it — must be a checkpoint directory"
        elif not any(model.path.glob("*.safetensors")):
            yield f"model.path — {str(model.path)!r} — no *.safetensors in it — must be a checkpoint directory"
    if model.config is not None and not Path(model.config).is_file():
        shipped = sorted(p.stem for p in SHIPPED_MODEL_CONFIGS.glob("*.json"))
        if model.config not in shipped:
            yield (
                f"model.config — {model.config!r} — must be a config.json or a shipped name ({', '.join(shipped)})"
                f" — check the path{nearest(model.config, shipped)}"
            )
    if model.tokenizer not in (None, "demo") and not Path(model.tokenizer).is_dir():
        yield f"model.tokenizer — {model.tokenizer!r} — must be a tokenizer directory or `demo` — check the path"


def _data_problems(cfg: RunConfig) -> Iterator[str]:
    for index in range(len(cfg.stages)):
        data = cfg.stage_data(index)
        own = cfg.stages[index].data
        for field, path in (("path", data.path), ("eval_path", data.eval_path)):
            key = f"stages.{index}.data.{field}" if field in own else f"data.{field}"
            if path is not None:
                yield from _dataset_problems(key, path, data.tasks, f"stages.{index}." if "tasks" in own else "")


def _dataset_problems(key: str, path: Path, tasks: tuple[str, ...] | None, prefix: str) -> Iterator[str]:
    if not path.is_dir():
        yield f"{key} — {str(path)!r} — no such directory — must be written by `lumina-ft data build`; build it first"
        return
    from lumina_ft.data.shards import read_meta

    try:
        known = read_meta(path).tasks
    except LuminaError as error:
        yield f"{key} — {error}"
        return
    for task in tasks or ():
        if task not in known:
            yield (
                f"{prefix}data.tasks — {task!r} — not in {path} — must be among {', '.join(known)}"
                f"{nearest(task, known)} — change the list"
            )


def _deepspeed_problems(cfg: RunConfig) -> Iterator[str]:
    settings = ZeroSettings(
        world_size=cfg.parallel.ranks,
        micro_batches=cfg.train.packs_per_step // cfg.parallel.ranks,
        dtype=cfg.model.dtype,
        max_grad_norm=cfg.optim.max_grad_norm,
        trainable_numel=1,
        overlap=False,
        expert_parallel_size=cfg.parallel.expert_parallel_size,
    )
    try:
        resolve_ds_config(read_ds_config(cfg.parallel.zero), settings)
    except LuminaError as error:
        yield str(error)


def _model_use_problems(cfg: RunConfig) -> Iterator[str]:
    # Where the model can't be read, that is said elsewhere.
    source = None if any(_model_problems(cfg)) else cfg.model.path or cfg.model.config
    yield from expert_parallel_problems(cfg, source)
    yield from bias_problems(cfg, source)
    yield from kernel_problems(cfg, source, gpu=has_gpu())
