"""`lumina-ft sample`: answers and images from a checkpoint or a run directory.

A run directory stands for its newest complete checkpoint. Prompts go through the tokenizer, system prompts and layout
that training used; images come back through the codec that made the training codes.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from lumina_ft.checkpoint.companions import SamplingSettings, read_settings
from lumina_ft.checkpoint.directory import MARKER, MODEL_DIR, checkpoints_dir, newest_checkpoint
from lumina_ft.data.codecs import CODEC_DIR, CodeGrid, ImageCodec, load_codec
from lumina_ft.data.codecs.pq import PqCodec
from lumina_ft.data.formats import PLACEHOLDER, to_conversation
from lumina_ft.data.layout import layout_prefix
from lumina_ft.data.prompts import SYSTEM_PROMPTS
from lumina_ft.data.rows import conversation_sample
from lumina_ft.data.shards import read_meta
from lumina_ft.data.tokenizer import TextTokenizer, check_text_ids, load_tokenizer, text_ids
from lumina_ft.errors import CheckpointError, ConfigError, DataError
from lumina_ft.generate.image import ImagePrompt, ImageSettings, decode_images
from lumina_ft.generate.prompt import Prompt, begin_image_answer, begin_text_answer, from_layout, sample_generators
from lumina_ft.generate.text import TextSettings, decode_text
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.tokens import TokenSpec

Picture = Image.Image | Path
"""An opened image, or a file that the codec reads: an image, or for `token-files` its tokens."""

Task = Literal["text", "understand", "t2i"]
_DEFAULT_BLOCK_TOKENS = 32


def locate_model(path: Path) -> Path:
    """Resolve a run directory, one of its checkpoints, that checkpoint's `model/`, or any checkpoint directory.

    Raises:
        CheckpointError: nothing of that kind, or a run without a complete checkpoint.
    """
    path = Path(path)
    if checkpoints_dir(path).is_dir():
        newest = newest_checkpoint(path)
        if newest is None:
            raise CheckpointError(
                f"model={path} — has no complete checkpoint — a run is sampled from its newest one — train it further"
            )
        return newest.model_dir
    if (path / MARKER).is_file():
        return path / MODEL_DIR
    if (path / "config.json").is_file():
        return path
    raise CheckpointError(
        f"model={path} — no config.json and no checkpoints/ — must be a run or a checkpoint directory — check the path"
    )


@dataclass(frozen=True)
class Sampler:
    """A model with all that its prompts and answers need.

    Attributes:
        model: in eval mode.
        tokenizer: of the model.
        spec: ids of the model.
        codec: of the training images; None where none was found, and for a text-only model.
        codec_places: where a codec was looked for, for the message.
        system_prompts: per task, as the training data had them.
        block_tokens: L of training.
    """

    model: U2ForDiffusion
    tokenizer: TextTokenizer
    spec: TokenSpec
    codec: ImageCodec | None
    codec_places: tuple[Path, ...]
    system_prompts: dict[str, str]
    block_tokens: int

    def text(
        self,
        prompts: Sequence[str],
        images: Sequence[Sequence[Picture]] | None = None,
        *,
        seed: int = 0,
        temperature: float = 0.0,
        max_new_tokens: int = 1024,
        steps_per_block: int | None = None,
    ) -> list[str]:
        """Answer prompts, all in shared packs.

        Args:
            prompts: user messages; `<image>` places an image, else images come first.
            images: per prompt its images (task `understand`); default: none (task `text`).
            seed: with the number of the prompt decides every draw.
            temperature: 0 takes the most likely tokens.
            max_new_tokens: longest answer.
            steps_per_block: model calls per block; default: one per token.

        Raises:
            DataError: placeholders that don't match the images, or an empty prompt.
            ConfigError: images without a codec, or a setting out of range.
        """
        images = [()] * len(prompts) if images is None else images
        rows = []
        for number, (prompt, pictures) in enumerate(zip(prompts, images, strict=True)):
            row = {"prompt": prompt, "response": "-", "images": [str(i) for i in range(len(pictures))]}
            prefix = self._prefix(number, row, pictures, uncondition=False)
            rows.append(begin_text_answer(prefix, self.spec))
        settings = TextSettings(
            max_new_tokens=max_new_tokens,
            block_tokens=self.block_tokens,
            steps_per_block=self.block_tokens if steps_per_block is None else steps_per_block,
            temperature=temperature,
            stop_id=self.spec.text.eoa,
            ban_mask_id=True,
        )
        generators = sample_generators(seed, len(rows))
        answers = decode_text(self.model, rows, mask_id=self.spec.text.mask, settings=settings, generators=generators)
        return [self.tokenizer.decode(answer.tolist()) for answer in answers]

    def image_codes(
        self,
        prompts: Sequence[str],
        grid: tuple[int, int] | None = None,
        *,
        seed: int = 0,
        temperature: float = 1.0,
        guidance: float = 3.0,
        rounds: int = 96,
    ) -> list[NDArray[np.int64]]:
        """Codes of one image per prompt, [height * width, C] in raster order, all in shared packs.

        Args:
            prompts: what to draw.
            grid: height and width in code places; default: that of the codec's training images.
            seed: with the number of the prompt decides every draw.
            temperature: 0 takes the most likely codes.
            guidance: strength of classifier-free guidance; 0 needs half the work.
            rounds: model calls; more than one per place are never made.

        Raises:
            ConfigError: a text-only model, a missing grid, or a setting out of range.
            DataError: a prompt that is empty or holds `<image>`.
        """
        self._need_image_parts()
        height, width = self._grid(grid)
        rows = []
        for number, prompt in enumerate(prompts):
            if PLACEHOLDER in prompt:
                raise DataError(
                    f"prompt {number} — holds {PLACEHOLDER} — task=t2i takes no image in its prompt — remove it"
                )
            row = {"prompt": prompt, "image": "0"}
            cond, uncond = (self._prefix(number, row, (), uncondition=u) for u in (False, True))
            rows.append(ImagePrompt(*(begin_image_answer(p, self.spec, height, width) for p in (cond, uncond))))
        settings = ImageSettings(rounds=rounds, guidance=guidance, temperature=temperature)
        generators = sample_generators(seed, len(rows))
        codes = decode_images(self.model, rows, spec=self._drawn(), settings=settings, generators=generators)
        return [c.numpy() for c in codes]

    def images(
        self,
        prompts: Sequence[str],
        grid: tuple[int, int] | None = None,
        *,
        seed: int = 0,
        temperature: float = 1.0,
        guidance: float = 3.0,
        rounds: int = 96,
    ) -> list[Image.Image]:
        """`image_codes`, decoded to pictures.

        Raises:
            ConfigError: also when no codec was found, or it can't decode.
        """
        codec = self._need_codec()
        # Before the work is done: a codec may have no decoder.
        codec.decode(np.zeros((1, codec.num_codebooks), np.int64), 1, 1)
        height, width = self._grid(grid)
        codes = self.image_codes(
            prompts, (height, width), seed=seed, temperature=temperature, guidance=guidance, rounds=rounds
        )
        return [codec.decode(c, height, width) for c in codes]

    def _drawn(self) -> TokenSpec:
        """Ids with as many codes as the codec has: the model may have room for more, which no training row used."""
        if self.codec is None:
            return self.spec
        return replace(self.spec, media=replace(self.spec.media, codebook_size=self.codec.codes_per_codebook))

    def _need_image_parts(self) -> None:
        if not self.model.config.has_image:
            raise ConfigError(
                "model — has no image parts, num_codebooks is null — images need them — use a U2 checkpoint"
            )

    def _need_codec(self) -> ImageCodec:
        self._need_image_parts()
        if self.codec is None:
            places = ", ".join(str(p) for p in self.codec_places)
            raise ConfigError(
                f"data — no codec found in {places} — images need the codec of their dataset — pass --data"
            )
        return self.codec

    def _grid(self, grid: tuple[int, int] | None) -> tuple[int, int]:
        if grid is None:
            if not isinstance(self.codec, PqCodec):
                raise ConfigError(
                    "grid — not given — only a pq codec has one size — pass height and width in code places"
                )
            grid = (self.codec.grid, self.codec.grid)
        height, width = grid
        if height < 1 or width < 1:
            raise ConfigError(f"grid — {height} x {width} — both must be at least 1 — pass the size in code places")
        return height, width

    def _prefix(self, number: int, row: dict[str, Any], pictures: Sequence[Picture], *, uncondition: bool) -> Prompt:
        """Prompt rows before the answer, laid out as a training row with the same content would be."""
        raw = to_conversation(row, "pairs", "auto")
        question = replace(raw, turns=raw.turns[:1])
        sample = conversation_sample(
            question,
            [self._codes_of(pictures[int(ref.path)]) for ref in question.turns[0].images],
            encode_text=self.tokenizer.encode_text,
            system_prompts=self.system_prompts,
            num_codebooks=self.spec.num_codebooks,
            source=f"prompt {number}",
        )
        return from_layout(layout_prefix(sample, self.spec, negative="uncondition" if uncondition else "none"))

    def _codes_of(self, picture: Picture) -> CodeGrid:
        codec = self._need_codec()
        return codec.read(picture) if isinstance(picture, Path) else codec.encode([picture])[0]


def load_sampler(
    path: Path, *, data: Path | None = None, dtype: torch.dtype | None = None, device: str | None = None
) -> Sampler:
    """Load what `--model` names.

    Args:
        path: see `locate_model`.
        data: built dataset whose codec and system prompts to use; default: those that training left in the model
            directory, or the published prompts.
        dtype: of the weights; default: as stored.
        device: default: the GPU if there is one.

    Raises:
        CheckpointError: no such model, or a damaged one.
        DataError: a tokenizer or codec that doesn't belong to the model.
    """
    model_dir = locate_model(Path(path))
    model = U2ForDiffusion.from_pretrained(model_dir, dtype=dtype)
    torch.nn.Module.to(model, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    spec = model.config.token_spec()
    tokenizer = load_tokenizer(model_dir)
    check_text_ids(
        text_ids(tokenizer), spec.text, directory=tokenizer.directory, model_source=str(model_dir / "config.json")
    )
    settings = read_settings(model_dir) or SamplingSettings(dict(SYSTEM_PROMPTS), _DEFAULT_BLOCK_TOKENS)
    prompts = settings.system_prompts
    if data is not None:
        prompts = prompts | read_meta(data).system_prompts
    places = (model_dir / CODEC_DIR,) if data is None else (data / CODEC_DIR, model_dir / CODEC_DIR)
    codec = _find_codec(places, spec) if model.config.has_image else None
    return Sampler(model, tokenizer, spec, codec, places, prompts, settings.block_tokens)


def _find_codec(places: tuple[Path, ...], spec: TokenSpec) -> ImageCodec | None:
    """The codec of the first place that has one, after a check that it is the model's.

    Raises:
        DataError: it has other codebooks or more codes than the model, or two places hold different codecs.
    """
    found = [(place, load_codec(place)) for place in places if place.is_dir()]
    if not found:
        return None
    place, codec = found[0]
    if codec.num_codebooks != spec.num_codebooks or codec.codes_per_codebook > spec.media.codebook_size:
        raise DataError(
            f"codec {place} — {codec.num_codebooks} codebooks of {codec.codes_per_codebook} codes — the model has "
            f"{spec.num_codebooks} of {spec.media.codebook_size} — use the codec of the training data"
        )
    for other_place, other in found[1:]:
        if other.identity != codec.identity:
            raise DataError(
                f"codec {place} — is not the one in {other_place}, which the model was trained with — equal codes "
                "would mean other pixels — leave out --data, or pass the training data"
            )
    return codec


def run_sample(
    model: Path,
    *,
    task: Task,
    prompt: str,
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
        model: see `locate_model`.
        task: `text`, `understand` (needs `images`) or `t2i` (needs `output`).
        output: PNG to write; several get `-0`, `-1`, … before the suffix.
        temperature: default 0 for answers, 1 for images.
        steps: calls per text block, or rounds of an image; default: one per token, or 96.
        data: see `load_sampler`.

    Returns:
        `task`, `model` (directory used), `seconds`, and `text` or `images` (paths).

    Raises:
        ConfigError: options that don't go together.
        CheckpointError: see `load_sampler`.
        DataError: see `load_sampler`; an image that can't be read.
    """
    _check_options(task, images, output, num_images)
    sampler = load_sampler(model, data=data)
    result: dict[str, Any] = {"task": task, "model": str(locate_model(model))}
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
