"""Prompts in, answers and pictures out: a loaded model with its tokenizer, codec and prompt layout.

Prompts go through the tokenizer, system prompts and layout that training used; images come back through the codec that
made the training codes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lumina_ft.data.codecs import CodeGrid, ImageCodec
from lumina_ft.data.codecs.pq import PqCodec
from lumina_ft.data.formats import PLACEHOLDER, to_conversation
from lumina_ft.data.layout import layout_prefix
from lumina_ft.data.rows import conversation_sample
from lumina_ft.data.tokenizer import TextTokenizer
from lumina_ft.errors import ConfigError, DataError
from lumina_ft.generate.image import ImagePrompt, ImageSettings, decode_images
from lumina_ft.generate.prompt import Prompt, begin_image_answer, begin_text_answer, from_layout, sample_generators
from lumina_ft.generate.text import TextSettings, decode_text
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.tokens import TokenSpec

Picture = Image.Image | Path
"""An opened image, or a file that the codec reads: an image, or for `token-files` its tokens."""


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
