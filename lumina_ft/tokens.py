"""The token contract of InternLumina-U2 (spec §2): token types, special ids, media-table ids.

Ids are never hard-coded in code: text ids come from a tokenizer, media ids from the model's config.
"""

from dataclasses import dataclass, fields

TYPE_TEXT = 1
"""Text and special tokens of a prompt, and separators."""
TYPE_MEDIA = 2
"""Prompt media rows."""
TYPE_ANSWER_TEXT = 3
TYPE_ANSWER_MEDIA = 4

IGNORE = -100
"""Label value of a position that is not supervised."""


@dataclass(frozen=True)
class TextIds:
    """Ids of the control tokens in the text vocabulary. Field order follows the table of spec §2."""

    mask: int
    system: int
    end_system: int
    user: int
    uncondition: int
    end_user: int
    context_3d: int
    context_image: int
    context_video: int
    boa: int
    eoa: int
    boi: int
    eoi: int
    bo3d: int
    eo3d: int
    bov: int
    eov: int
    pad: int


TOKEN_STRINGS: dict[str, str] = {
    "mask": "<|mask|>",
    "system": "<system>",
    "end_system": "</system>",
    "user": "<user>",
    "uncondition": "<uncondition>",
    "end_user": "</user>",
    "context_3d": "<3D_CONTEXT>",
    "context_image": "<IMG_CONTEXT>",
    "context_video": "<VIDEO_CONTEXT>",
    "boa": "<answer>",
    "eoa": "</answer>",
    "boi": "<BOI>",
    "eoi": "<EOI>",
    "bo3d": "<BO3d>",
    "eo3d": "<EO3d>",
    "bov": "<BOV>",
    "eov": "<EOV>",
}
"""Token string of each `TextIds` field that the tokenizer must hold as one token (`pad` comes from pad_token_id)."""

PUBLISHED_TEXT_IDS = TextIds(
    mask=156895,
    system=157153,
    end_system=157154,
    user=157155,
    uncondition=157156,
    end_user=157157,
    context_3d=157158,
    context_image=157160,
    context_video=157161,
    boa=157165,
    eoa=157166,
    boi=157167,
    eoi=157168,
    bo3d=157169,
    eo3d=157170,
    bov=157171,
    eov=157172,
    pad=156892,
)


@dataclass(frozen=True)
class MediaIds:
    """Ids in the image tables: codes are `0..codebook_size-1`, the rest are control rows."""

    codebook_size: int
    mask: int
    newline: int
    line_3d: int
    layer_3d: int
    line_video: int
    frame_video: int


PUBLISHED_MEDIA_IDS = MediaIds(
    codebook_size=4096, mask=5000, newline=5001, line_3d=5002, layer_3d=5003, line_video=5004, frame_video=5005
)


@dataclass(frozen=True)
class TokenSpec:
    """All that data code needs to know of a model: its ids and its number of codebooks (C)."""

    text: TextIds
    media: MediaIds
    num_codebooks: int


def control_ids(text: TextIds) -> frozenset[int]:
    """Every control id of the text vocabulary."""
    return frozenset(getattr(text, f.name) for f in fields(text))
