"""The turns of a sample, checked: who speaks in which order, and what an answer may hold."""

from dataclasses import dataclass

from lumina_ft.data.segments import Kind, Role, Sample, Segment
from lumina_ft.errors import DataError


@dataclass(frozen=True)
class Conversation:
    """Segments of a sample by turn.

    Attributes:
        where: names the sample in messages.
        system: text segments of the system prompt; None without one.
        turns: user turns at even places, assistant turns at odd ones; no turn is empty.
    """

    where: str
    system: tuple[Segment, ...] | None
    turns: tuple[tuple[Segment, ...], ...]

    def image_answers(self, turn: int) -> bool:
        """Whether an assistant turn answers user turn `turn` with an image."""
        return turn + 1 < len(self.turns) and self.turns[turn + 1][0].kind is Kind.IMAGE


def parse(sample: Sample) -> Conversation:
    """Group a sample's segments into turns.

    Raises:
        DataError: a turn is missing, empty or out of order, the system prompt isn't leading text, or an answer is
            neither non-empty text nor one image.
    """
    where = sample.source or f"sample {sample.index}"
    system: list[Segment] = []
    turns: list[list[Segment]] = []
    for segment in sample.segments:
        if segment.role is Role.SYSTEM:
            if turns or segment.kind is not Kind.TEXT:
                raise DataError(
                    f"{where} — system {segment.kind.name} segment after {len(turns)} turns — a system prompt is text "
                    "and comes first — reorder the messages"
                )
            system.append(segment)
            continue
        if segment.turn == len(turns):
            turns.append([])
        role = Role.ASSISTANT if segment.turn % 2 else Role.USER
        if segment.turn != len(turns) - 1 or segment.role is not role:
            raise DataError(
                f"{where} — {segment.role.name} segment with turn {segment.turn} after {len(turns)} turns — turns "
                "alternate user 0, assistant 1, user 2 … without gaps — reorder the messages"
            )
        turns[-1].append(segment)
    if not turns:
        raise DataError(f"{where} — no user turn — a sample starts with a user turn — add it")
    for answer in turns[1::2]:
        _check_answer(answer, where)
    return Conversation(where, tuple(system) or None, tuple(map(tuple, turns)))


def generates_image(sample: Sample) -> bool:
    """Whether any answer of the sample is an image; condition drop applies to these only."""
    return any(s.role is Role.ASSISTANT and s.kind is Kind.IMAGE for s in sample.segments)


def _check_answer(answer: list[Segment], where: str) -> None:
    kinds = {segment.kind for segment in answer}
    if kinds == {Kind.TEXT}:
        if not any(len(segment.text_ids) for segment in answer):
            raise DataError(
                f"{where} — empty text answer in turn {answer[0].turn} — an answer has at least one token — "
                "remove the row"
            )
    elif kinds != {Kind.IMAGE} or len(answer) > 1:
        names = ", ".join(segment.kind.name.lower() for segment in answer)
        raise DataError(
            f"{where} — answer of {names} in turn {answer[0].turn} — an answer is text or one image — "
            "split it into turns"
        )
