"""What is known about a step with a non-finite value, and the file that keeps it (T4)."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lumina_ft.batch import Batch


@dataclass(frozen=True)
class NonFinite:
    """One rank's view of the step.

    Attributes:
        places: checked places that weren't finite on this rank; empty if the value arose elsewhere.
        sample_ids: dataset rows of each of this rank's micro-batches.
    """

    places: tuple[str, ...]
    sample_ids: tuple[tuple[int, ...], ...] = ()

    def with_batches(self, batches: Sequence[Batch]) -> "NonFinite":
        """The same, with the ids of the samples that the rank was working on."""
        return NonFinite(self.places, tuple(tuple(b.sample_ids.tolist()) for b in batches))


def write_report(run_dir: Path, stage: str, step: int, reports: Sequence[NonFinite]) -> Path:
    """Write all ranks' views to `nonfinite/STAGE-step-N.json`.

    Args:
        step: counted from 1.
        reports: by rank.
    """
    path = run_dir / "nonfinite" / f"{stage}-step-{step}.json"
    path.parent.mkdir(exist_ok=True)
    content = [{"rank": rank, **asdict(report)} for rank, report in enumerate(reports)]
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def describe_nonfinite(stage: str, step: int, reports: Sequence[NonFinite], path: str) -> str:
    """One line naming stage, step, ranks and places."""
    where = "; ".join(f"rank {rank}: {', '.join(r.places)}" for rank, r in enumerate(reports) if r.places)
    return f"stage {stage!r} step {step} — non-finite values ({where}) — sample ids are in {path}"
