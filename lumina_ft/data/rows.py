"""One raw row to one sample: parse, read images, tokenise, check the length."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lumina_ft.data.codecs import CodeGrid, ImageCodec
from lumina_ft.data.formats import Format, ImageRef, RawConversation, RawLine, Turn, parse_row, to_conversation
from lumina_ft.data.images import open_image
from lumina_ft.data.layout import sample_length
from lumina_ft.data.segments import Kind, Role, Sample, Segment
from lumina_ft.data.tokenizer import PlainEncoder
from lumina_ft.errors import DataError

UNNUMBERED = 0
"""Index of a sample before it has a row in the dataset."""


@dataclass(frozen=True)
class InputFile:
    """A JSONL file.

    Attributes:
        path: where it is.
        format: of its rows.
        media_dir: where relative image paths start.
        label: short name that samples carry as their source.
    """

    path: Path
    format: Format
    media_dir: Path
    label: str


@dataclass(frozen=True)
class RowResult:
    """What became of a row.

    Attributes:
        source: `file:line`.
        sample: without its row number; None for a bad row.
        length: rows of the sample once laid out.
        images: files read.
        repaired: truncated JPEGs among them.
        reason: one-line error of a bad row, starting with `source`.
    """

    source: str
    sample: Sample | None
    length: int = 0
    images: tuple[str, ...] = ()
    repaired: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class RowEncoder:
    """Everything that a row needs; picklable, so that worker processes can hold one.

    Attributes:
        encoder: for text.
        codec: for images; None when no row had a readable one.
        system_prompts: default per task.
        task: of the build, or `auto`.
        num_codebooks: C.
        block_tokens: L, for lengths.
        max_sample_tokens: longer samples are bad rows.
    """

    encoder: PlainEncoder
    codec: ImageCodec | None
    system_prompts: dict[str, str]
    task: str
    num_codebooks: int
    block_tokens: int
    max_sample_tokens: int

    def encode(self, line: RawLine, file: InputFile) -> RowResult:
        """Encode one line; a user's mistake becomes a result with a reason, never an exception."""
        try:
            conversation = to_conversation(parse_row(line.data), file.format, self.task)
            grids = [(path, self._read(path)) for path in image_paths(conversation, file)]
            sample = conversation_sample(
                conversation,
                [grid for _, grid in grids],
                encode_text=self.encoder.encode,
                system_prompts=self.system_prompts,
                num_codebooks=self.num_codebooks,
                source=f"{file.label}:{line.number}",
            )
            length = sample_length(sample, block_tokens=self.block_tokens, answer_tail="eoa")
            if length > self.max_sample_tokens:
                raise DataError(
                    f"{length} tokens — must be at most max_sample_tokens={self.max_sample_tokens} — shorten the row "
                    "or raise the limit"
                )
        except DataError as exc:
            # Layout errors start with the sample's own source.
            text = " ".join(str(exc).split()).removeprefix(f"{file.label}:{line.number} — ")
            return RowResult(line.source, None, reason=f"{line.source} — {text}")
        return RowResult(
            line.source,
            sample,
            length,
            images=tuple(str(path) for path, _ in grids),
            repaired=tuple(str(path) for path, grid in grids if grid.repaired),
        )

    def _read(self, path: Path) -> CodeGrid:
        if self.codec is None:
            # No image of the build could be opened when the codec was to be fitted: say why this one can't.
            open_image(path, "rgb")
            raise DataError(f"image {path} — readable now, but not when the codec was fitted — build again")
        return self.codec.read(path)


def conversation_sample(
    conversation: RawConversation,
    grids: Sequence[CodeGrid],
    *,
    encode_text: Callable[[str], NDArray[np.int32]],
    system_prompts: Mapping[str, str],
    num_codebooks: int,
    source: str,
) -> Sample:
    """The segments of a conversation, as training and sampling both lay them out.

    Args:
        grids: codes of the conversation's images, in order.
        encode_text: text to ids, without control ids.
        system_prompts: per task, for conversations without a system turn.
        num_codebooks: C.
        source: of the sample, for messages.
    """

    def text(role: Role, turn: int, content: str) -> Segment:
        return Segment(role, turn, Kind.TEXT, encode_text(content), np.zeros((0, num_codebooks), dtype=np.uint16))

    prompt = system_prompts[conversation.task] if conversation.system is None else conversation.system
    segments = [text(Role.SYSTEM, 0, prompt)]
    queue = iter(grids)
    for number, turn in enumerate(conversation.turns):
        for part in merged(turn):
            if isinstance(part, str):
                segments.append(text(turn.role, number, part))
                continue
            grid = next(queue)
            empty = np.zeros(0, dtype=np.int32)
            segments.append(Segment(turn.role, number, Kind.IMAGE, empty, grid.codes, (grid.height, grid.width)))
    return Sample(index=UNNUMBERED, task=conversation.task, segments=tuple(segments), source=source)


def image_paths(conversation: RawConversation, file: InputFile) -> list[Path]:
    """Files of a conversation's images, in order."""
    return [file.media_dir / ref.path for turn in conversation.turns for ref in turn.images]


def merged(turn: Turn) -> list[str | ImageRef]:
    """Parts of a turn with neighbouring texts joined, so that tokens may span them as in one string."""
    parts: list[str | ImageRef] = []
    for part in turn.parts:
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        else:
            parts.append(part)
    return parts
