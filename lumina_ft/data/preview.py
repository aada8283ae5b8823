"""`lumina-ft data inspect`: what a built dataset holds, sample by sample, in readable form."""

from pathlib import Path
from typing import Any

from lumina_ft.data.segments import Kind, Segment
from lumina_ft.data.shards import open_dataset
from lumina_ft.data.tokenizer import TextTokenizer, load_tokenizer

_TEXT_CHARS = 200


def preview_dataset(directory: Path, num_samples: int) -> dict[str, Any]:
    """Describe a dataset and its first samples.

    Args:
        directory: written by `lumina-ft data build`.
        num_samples: how many samples to show.

    Returns:
        JSON-ready: num_samples, tasks (samples per task), codebooks, codec, tokenizer, identity, samples. A segment of
        a sample shows its text, or the grid and range of its codes.

    Raises:
        DataError: the directory is not a complete dataset.
    """
    reader = open_dataset(directory)
    tokenizer = load_tokenizer(directory / "tokenizer")
    samples = [reader[index] for index in range(min(num_samples, len(reader)))]
    return {
        "path": str(directory),
        "num_samples": len(reader),
        "tasks": reader.meta.counts,
        "codebooks": reader.meta.spec.num_codebooks,
        "codec": reader.meta.codec["kind"] if reader.meta.codec else None,
        "identity": reader.meta.identity,
        "samples": [
            {
                "index": sample.index,
                "task": sample.task,
                "source": sample.source,
                "segments": [_describe_segment(segment, tokenizer) for segment in sample.segments],
            }
            for sample in samples
        ],
    }


def _describe_segment(segment: Segment, tokenizer: TextTokenizer) -> dict[str, Any]:
    head = {"role": segment.role.name.lower(), "turn": segment.turn, "kind": segment.kind.name.lower()}
    if segment.kind is Kind.TEXT:
        text = tokenizer.decode(segment.text_ids)
        return head | {"tokens": len(segment.text_ids), "text": text[:_TEXT_CHARS]}
    codes = segment.codes
    return head | {
        "rows": len(codes),
        "shape": list(segment.shape),
        "code_range": [int(codes.min()), int(codes.max())] if codes.size else None,
    }
