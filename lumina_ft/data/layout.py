"""From a stored sample to rows: the table of spec §2 "Sample layout", for every task and any number of turns.

Order of rows: user turns (clean) and answers (to be noised) as the conversation goes, then the clean memory: a second,
clean copy of each text answer and of each image answer that is not the last turn. A copy shares the positions of its
original, because a decoded block keeps its place when it turns clean. The memory holds no BOA.

Shape legend: n rows of one sample, C columns (the model's codebooks, at least 1), L block_tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lumina_ft.data.conversation import Conversation, parse
from lumina_ft.data.media_rows import media_row_count, media_rows
from lumina_ft.data.segments import Kind, Sample, Segment
from lumina_ft.errors import DataError
from lumina_ft.tokens import (
    TYPE_ANSWER_MEDIA,
    TYPE_ANSWER_TEXT,
    TYPE_MEDIA,
    TYPE_TEXT,
    TextIds,
    TokenSpec,
    control_ids,
)

AnswerTail = Literal["eoa", "pad", "short"]
"""How the last block of a text answer is filled, see `DataConfig.answer_tail`."""

_NO_BLOCK = -1


@dataclass(frozen=True)
class Layout:
    """Rows of one sample before noise.

    Attributes:
        ids: [n, C] int32; text rows repeat one id in all columns.
        type_ids: [n] uint8, as in `tokens`.
        position_ids, turn_ids: [n] int32.
        block_ids: [n] int32: block of a text answer row, 0 in image answers, and in user turns as spec §2 has it (-1
            before a text answer; 0, unused, before an image).
        is_clean: [n] bool.
        supervisable: [n] bool, rows that noise may mask: text answers with EOA and tail, codes of image answers.
        sample_index, task, source: of the sample.
    """

    ids: NDArray[np.int32]
    type_ids: NDArray[np.uint8]
    position_ids: NDArray[np.int32]
    turn_ids: NDArray[np.int32]
    block_ids: NDArray[np.int32]
    is_clean: NDArray[np.bool_]
    supervisable: NDArray[np.bool_]
    sample_index: int
    task: str
    source: str

    def __len__(self) -> int:
        """n, the number of rows."""
        return len(self.ids)

    @property
    def next_position(self) -> int:
        """Position of the row that follows; in a prefix, that of BOA."""
        return int(self.position_ids.max()) + 1

    @property
    def next_turn(self) -> int:
        """Turn of the answer that follows a prefix."""
        return int(self.turn_ids.max()) + 1


def layout_sample(
    sample: Sample, spec: TokenSpec, *, block_tokens: int, answer_tail: AnswerTail, drop_condition: bool
) -> Layout:
    """Lay out a training sample.

    Args:
        sample: its turns alternate user, assistant and end with an assistant turn of text or of one image.
        spec: ids and codebooks of the model.
        block_tokens: L.
        answer_tail: fill of the last block of a text answer.
        drop_condition: replace each user turn that an image answers by `<uncondition>`, source media included (the
            negative prefix of spec §2); without image answers it changes nothing.

    Raises:
        DataError: turns out of order, an empty or mixed answer, control ids inside text, or bad media.
    """
    talk = _training_conversation(sample)
    rows = _Rows(spec, talk.where)
    memory: list[_Piece] = []
    for turn in range(0, len(talk.turns), 2):
        by_image = talk.image_answers(turn)
        _add_user(rows, talk, turn, block=0 if by_image else _NO_BLOCK, drop=drop_condition and by_image)
        content = _add_answer(rows, talk.turns[turn + 1], turn + 1, block_tokens, answer_tail)
        if not by_image or turn + 2 < len(talk.turns):
            memory.append(_clean_copy(content))
    rows.pieces.extend(memory)
    return rows.finish(sample)


def layout_prefix(
    sample: Sample,
    spec: TokenSpec,
    *,
    negative: Literal["none", "uncondition"],
    block_tokens: int = 32,
    answer_tail: AnswerTail = "eoa",
) -> Layout:
    """Rows that a generated answer is conditioned on: system and user turns and the clean memory of earlier answers.

    Stops before BOA: the answer starts at `next_position` in turn `next_turn`. A last assistant turn is left out, so a
    training sample gives the prefix of its own answer. Rows go by position; all are clean and none is supervisable.

    Args:
        sample: a conversation; its turns alternate user, assistant.
        spec: ids and codebooks of the model.
        negative: `uncondition`: the negative prefix of classifier-free guidance, where the last user turn, and each
            earlier one that an image answers, reads `<uncondition>` and has no source media.
        block_tokens, answer_tail: as in training; they only shape the memory of earlier text answers.

    Raises:
        DataError: as in `layout_sample`.
    """
    talk = parse(sample)
    last_user = (len(talk.turns) - 1) // 2 * 2
    rows = _Rows(spec, talk.where)
    for turn in range(0, last_user + 1, 2):
        by_image = turn < last_user and talk.image_answers(turn)
        drop = negative == "uncondition" and (by_image or turn == last_user)
        _add_user(rows, talk, turn, block=0 if by_image else _NO_BLOCK, drop=drop)
        if turn < last_user:
            # Only the clean copy stays; the begin and end ids leave their gap in the positions, as in training.
            start = len(rows.pieces)
            content = _add_answer(rows, talk.turns[turn + 1], turn + 1, block_tokens, answer_tail)
            rows.pieces[start:] = [_clean_copy(content)]
    return rows.finish(sample)


def sample_length(sample: Sample, *, block_tokens: int, answer_tail: AnswerTail, drop_condition: bool = False) -> int:
    """Rows that `layout_sample` will make, without making them.

    Raises:
        DataError: turns out of order, an empty or mixed answer, or media whose shape doesn't fit.
    """
    talk = _training_conversation(sample)
    total = 0 if talk.system is None else 2 + _content_length(talk.system, talk.where)
    for turn in range(0, len(talk.turns), 2):
        answer = talk.turns[turn + 1]
        if not talk.image_answers(turn):
            total += 2 + _content_length(talk.turns[turn], talk.where)
            total += 1 + 2 * _padded(sum(len(s.text_ids) for s in answer) + 1, block_tokens, answer_tail)
            continue
        grid = media_row_count(answer[0], talk.where)
        total += 3 if drop_condition else 2 + _content_length(talk.turns[turn], talk.where)
        total += 4 + (grid if turn + 2 == len(talk.turns) else 2 * grid)
    return total


@dataclass(frozen=True)
class _Piece:
    """A run of rows with equal attributes. `block_tokens` > 0 counts blocks up from 0, else all rows are in `block`."""

    rows: NDArray[np.int32]
    type_id: int
    turn: int
    position: int
    clean: bool
    block: int
    block_tokens: int
    supervisable: NDArray[np.bool_] | bool


def _clean_copy(piece: _Piece) -> _Piece:
    return replace(piece, clean=True, supervisable=False)


class _Rows:
    """Collects runs of rows and keeps the position of the next one."""

    def __init__(self, spec: TokenSpec, where: str) -> None:
        self.spec = spec
        self.where = where
        self.controls = _control_array(spec.text)
        self.pieces: list[_Piece] = []
        self.position = 0

    def add(
        self,
        rows: NDArray[np.int32] | Sequence[int],
        type_id: int,
        turn: int,
        *,
        clean: bool,
        block: int,
        block_tokens: int = 0,
        supervisable: NDArray[np.bool_] | bool = False,
    ) -> _Piece:
        """Append [m, C] media rows or [m] text ids."""
        rows = np.asarray(rows, np.int32)
        piece = _Piece(rows, type_id, turn, self.position, clean, block, block_tokens, supervisable)
        self.pieces.append(piece)
        self.position += len(rows)
        return piece

    def text(self, segments: Sequence[Segment]) -> NDArray[np.int32]:
        """[m] ids of text segments, checked for control ids."""
        ids = np.concatenate([segment.text_ids for segment in segments])
        # Compared one by one: np.isin sorts, which takes longer than the rest of the layout.
        bad = (ids[:, None] == self.controls).any(1) | (ids < 0)
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            raise DataError(
                f"{self.where} — id {int(ids[at])} at text token {at} — text holds no control ids — rebuild the dataset"
            )
        return ids

    def media(self, segment: Segment) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Rows of a medium and which of them are codes."""
        return media_rows(segment, self.spec.media, self.spec.num_codebooks, self.where)

    def finish(self, sample: Sample) -> Layout:
        """Join the runs."""
        lengths = np.array([len(p.rows) for p in self.pieces])
        ends = np.cumsum(lengths)
        ids = np.empty((int(ends[-1]), max(self.spec.num_codebooks, 1)), np.int32)
        supervisable = np.zeros(len(ids), np.bool_)
        for piece, start, end in zip(self.pieces, (ends - lengths).tolist(), ends.tolist(), strict=True):
            ids[start:end] = piece.rows if piece.rows.ndim == 2 else piece.rows[:, None]
            supervisable[start:end] = piece.supervisable
        table = [(p.type_id, p.turn, p.position, p.clean, p.block, p.block_tokens) for p in self.pieces]
        types, turns, firsts, clean, blocks, block_tokens = np.array(table, np.int32).T.repeat(lengths, axis=1)
        offsets = np.arange(len(ids), dtype=np.int32) - (ends - lengths).astype(np.int32).repeat(lengths)
        return Layout(
            ids=ids,
            type_ids=types.astype(np.uint8),
            position_ids=firsts + offsets,
            turn_ids=turns,
            block_ids=np.where(block_tokens > 0, offsets // np.maximum(block_tokens, 1), blocks),
            is_clean=clean.astype(np.bool_),
            supervisable=supervisable,
            sample_index=sample.index,
            task=sample.task,
            source=sample.source,
        )


def _add_user(rows: _Rows, talk: Conversation, turn: int, *, block: int, drop: bool) -> None:
    """`<system>S</system>` (first turn only) and `<user>U</user>`; media sit between their begin and end ids."""
    ids = rows.spec.text
    text: list[int] = []
    if turn == 0 and talk.system is not None:
        text += [ids.system, *rows.text(talk.system).tolist(), ids.end_system]
    text.append(ids.user)
    if drop:
        text.append(ids.uncondition)
    for segment in () if drop else talk.turns[turn]:
        if segment.kind is Kind.TEXT:
            text += rows.text([segment]).tolist()
            continue
        begin, end = _media_fence(ids, segment.kind)
        rows.add([*text, begin], TYPE_TEXT, turn, clean=True, block=block)
        rows.add(rows.media(segment)[0], TYPE_MEDIA, turn, clean=True, block=block)
        text = [end]
    rows.add([*text, ids.end_user], TYPE_TEXT, turn, clean=True, block=block)


def _add_answer(
    rows: _Rows, answer: Sequence[Segment], turn: int, block_tokens: int, answer_tail: AnswerTail
) -> _Piece:
    """Append an answer, begin and end ids included. Returns the run of its content, which noise will hit."""
    ids = rows.spec.text
    if answer[0].kind is Kind.IMAGE:
        grid, is_code = rows.media(answer[0])
        rows.add([ids.boa, ids.boi], TYPE_TEXT, turn, clean=False, block=0)
        content = rows.add(grid, TYPE_ANSWER_MEDIA, turn, clean=False, block=0, supervisable=is_code)
        rows.add([ids.eoi, ids.eoa], TYPE_TEXT, turn, clean=False, block=0)
        return content
    text = rows.text(answer)
    fill = ids.pad if answer_tail == "pad" else ids.eoa
    tokens = np.full(_padded(len(text) + 1, block_tokens, answer_tail), fill, np.int32)
    tokens[: len(text)] = text
    tokens[len(text)] = ids.eoa
    rows.add([ids.boa], TYPE_TEXT, turn, clean=False, block=0)
    return rows.add(tokens, TYPE_ANSWER_TEXT, turn, clean=False, block=0, block_tokens=block_tokens, supervisable=True)


def _training_conversation(sample: Sample) -> Conversation:
    talk = parse(sample)
    if len(talk.turns) % 2:
        raise DataError(
            f"{talk.where} — ends with a user turn — a training sample ends with an assistant turn — add the answer"
        )
    return talk


def _content_length(content: Sequence[Segment], where: str) -> int:
    """Rows of a user turn or system prompt between its begin and end ids."""
    return sum(len(s.text_ids) if s.kind is Kind.TEXT else 2 + media_row_count(s, where) for s in content)


def _padded(num_tokens: int, block_tokens: int, answer_tail: AnswerTail) -> int:
    """Rows of a text answer; a short last block would reveal the answer's length by its number of masks."""
    return num_tokens if answer_tail == "short" else -(-num_tokens // block_tokens) * block_tokens


def _media_fence(ids: TextIds, kind: Kind) -> tuple[int, int]:
    """Begin and end id of a medium in a prompt."""
    fences = {Kind.IMAGE: (ids.boi, ids.eoi), Kind.VIDEO: (ids.bov, ids.eov), Kind.OBJECT_3D: (ids.bo3d, ids.eo3d)}
    return fences[kind]


@lru_cache
def _control_array(text: TextIds) -> NDArray[np.int32]:
    return np.array(sorted(control_ids(text)), np.int32)
