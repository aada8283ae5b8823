"""`lumina-ft sample`: one prompt, answered or drawn by a checkpoint, a run, or a model with an adapter."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from lumina_ft.errors import ConfigError
from lumina_ft.generate.load import locate_model, open_sampler

Task = Literal["text", "understand", "t2i"]


def run_sample(
    model: Path,
    *,
    task: Task,
    prompt: str,
    adapter: Path | None = None,
    with_adapter: bool = True,
    images: Sequence[Path] = (),
    output: Path | None = None,
    seed: int = 0,
    temperature: float | None = None,
    guidance: float = 3.0,
    steps: int | None = None,
    num_images: int = 1,
    grid: tuple[int, int] | None = None,
    max_new_tokens: int = 1024,
    data: Path | None = None,
) -> dict[str, Any]:
    """The command: one prompt, one answer or `num_images` PNG files.

    Args:
        model, adapter, with_adapter: see `locate_model`.
        task: `text`, `understand` (needs `images`) or `t2i` (needs `output`).
        output: PNG to write; several get `-0`, `-1`, … before the suffix.
        temperature: default 0 for answers, 1 for images.
        steps: calls per text block, or rounds of an image; default: one per token, or 96.
        data: see `open_sampler`.

    Returns:
        `task`, `model` and `adapter` (directories used, the latter may be None), `seconds`, and `text` or `images`
        (paths).

    Raises:
        ConfigError: options that don't go together.
        CheckpointError: see `locate_model` and `open_sampler`.
        DataError: see `open_sampler`; an image that can't be read.
    """
    _check_options(task, images, output, num_images)
    source = locate_model(model, adapter=adapter, with_adapter=with_adapter)
    sampler = open_sampler(source, data=data)
    result: dict[str, Any] = {
        "task": task,
        "model": str(source.model_dir),
        "adapter": None if source.adapter_dir is None else str(source.adapter_dir),
    }
    start = time.perf_counter()
    if task == "t2i":
        assert output is not None
        pictures = sampler.images(
            [prompt] * num_images,
            grid,
            seed=seed,
            temperature=1.0 if temperature is None else temperature,
            guidance=guidance,
            rounds=96 if steps is None else steps,
        )
        result["images"] = [str(p) for p in _write_images(pictures, output)]
    else:
        (result["text"],) = sampler.text(
            [prompt],
            [images],
            seed=seed,
            temperature=0.0 if temperature is None else temperature,
            max_new_tokens=max_new_tokens,
            steps_per_block=steps,
        )
    return {**result, "seconds": round(time.perf_counter() - start, 3)}


def _check_options(task: Task, images: Sequence[Path], output: Path | None, num_images: int) -> None:
    if (task == "understand") != bool(images):
        raise ConfigError(
            f"image — {len(images)} given for task={task} — understand needs some, others take none — fix it"
        )
    if task == "t2i" and (output is None or output.suffix.lower() != ".png"):
        raise ConfigError(f"output — {output} — t2i writes a PNG — pass a path ending in .png")
    if output is not None:
        _check_writable(output)
    if task != "t2i" and output is not None:
        raise ConfigError(f"output — {output} — answers of task={task} are printed — leave it out")
    if num_images < 1 or (task != "t2i" and num_images > 1):
        raise ConfigError(f"num_images — {num_images} — must be at least 1, and 1 unless task=t2i — fix it")


def _check_writable(output: Path) -> None:
    """Find out before the work is done that it can't be saved."""
    parents = output.absolute().parents
    nearest_existing = next(parent for parent in parents if parent.exists())
    if output.is_dir():
        raise ConfigError(f"output — {output} — is a directory — t2i writes a file — pass another path")
    if not nearest_existing.is_dir() or not os.access(nearest_existing, os.W_OK):
        raise ConfigError(f"output — {output} — {nearest_existing} — must be a writable directory — pass another path")


def _write_images(pictures: Sequence[Image.Image], output: Path) -> list[Path]:
    single = len(pictures) == 1
    paths = [output if single else output.with_stem(f"{output.stem}-{i}") for i in range(len(pictures))]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        for path, picture in zip(paths, pictures, strict=True):
            picture.save(path, format="PNG")
    except OSError as exc:
        raise ConfigError(f"output — {output} — {exc.strerror} — must be writable — pass another path") from exc
    return paths
