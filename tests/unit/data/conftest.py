"""Small samples for data tests: two codebooks of 32 codes, text ids below 200 are plain text."""

from collections.abc import Sequence

import numpy as np
import pytest

from lumina_ft.data.segments import Kind, Role, Sample, Segment
from lumina_ft.data.shards import DatasetMeta, make_meta
from lumina_ft.tokens import MediaIds, TextIds, TokenSpec

CODEBOOKS = 2
NO_CODES = np.zeros((0, CODEBOOKS), np.uint16)
NO_TEXT = np.zeros(0, np.int32)


class ListReader:
    """Samples in memory, read like a built dataset."""

    def __init__(self, samples: Sequence[Sample], meta: DatasetMeta) -> None:
        self.samples = samples
        self.meta = meta

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


class Make:
    """Builds specs, segments, samples and readers."""

    spec = TokenSpec(
        text=TextIds(
            mask=200,
            system=201,
            end_system=202,
            user=203,
            uncondition=204,
            end_user=205,
            context_3d=206,
            context_image=207,
            context_video=208,
            boa=209,
            eoa=210,
            boi=211,
            eoi=212,
            bo3d=213,
            eo3d=214,
            bov=215,
            eov=216,
            pad=217,
        ),
        media=MediaIds(codebook_size=32, mask=50, newline=51, line_3d=52, layer_3d=53, line_video=54, frame_video=55),
        num_codebooks=CODEBOOKS,
    )

    @staticmethod
    def text(turn: int, ids: Sequence[int], *, system: bool = False) -> Segment:
        role = Role.SYSTEM if system else Role(Role.USER + turn % 2)
        return Segment(role, turn, Kind.TEXT, np.array(ids, np.int32), NO_CODES)

    @staticmethod
    def image(turn: int, codes: Sequence[Sequence[int]], height: int, width: int) -> Segment:
        table = np.array(codes, np.uint16)
        return Segment(Role(Role.USER + turn % 2), turn, Kind.IMAGE, NO_TEXT, table, (height, width))

    @staticmethod
    def medium(turn: int, kind: Kind, codes: Sequence[Sequence[int]], coords: Sequence[Sequence[int]]) -> Segment:
        role = Role(Role.USER + turn % 2)
        return Segment(role, turn, kind, NO_TEXT, np.array(codes, np.uint16), (), np.array(coords, np.int32))

    @staticmethod
    def sample(*segments: Segment, index: int = 0, task: str = "text", source: str = "rows.jsonl:7") -> Sample:
        return Sample(index, task, segments, source)

    def text_sample(self, index: int, num_user: int, num_answer: int) -> Sample:
        """Length: 2 + num_user rows of prefix, BOA, and twice the padded answer."""
        ids = np.arange(max(num_user, num_answer)) % 199
        return self.sample(self.text(0, ids[:num_user]), self.text(1, ids[:num_answer]), index=index, source="")

    def t2i_sample(self, index: int, num_user: int, side: int = 2) -> Sample:
        """Length: 2 + num_user rows of prefix, four fences and side * (side + 1) grid rows."""
        codes = np.arange(side * side * CODEBOOKS).reshape(-1, CODEBOOKS) % 32
        segments = self.text(0, np.arange(num_user) % 199), self.image(1, codes.tolist(), side, side)
        return self.sample(*segments, index=index, task="t2i", source="")

    def reader(self, samples: Sequence[Sample]) -> ListReader:
        counts = {task: sum(s.task == task for s in samples) for task in {s.task for s in samples}}
        meta = make_meta(
            counts=counts,
            shards=(),
            spec=self.spec,
            tokenizer_identity="sha256:abc",
            codec={"kind": "pq", "identity": "sha256:def"},
            system_prompts={},
            block_tokens=4,
        )
        return ListReader(samples, meta)


@pytest.fixture(scope="session")
def make() -> Make:
    return Make()
