"""From the positions of all ranks to a text that says who is missing. Pure: reports in, text out."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple

from lumina_ft.parallel.position import WAIT, BatchShape, Position, is_communication
from lumina_ft.parallel.rendezvous import Peer

_MAX_RANKS_SHOWN = 16
_FRAMES_SHOWN = 3


class Missing(NamedTuple):
    """Ranks that the others wait for, and what tells so. No ranks if none stands out."""

    ranks: list[int]
    reason: str


def find_missing(reports: Mapping[int, Position], size: int) -> Missing:
    """Name the ranks that hold up the others.

    Args:
        reports: of the ranks that could still say where they are.

    In this order: ranks that say nothing; ranks that have entered fewest collectives; ranks that have entered the
    others' collective, but run something else than communication in it; ranks that are outside of it.
    """
    silent = [rank for rank in range(size) if rank not in reports]
    if silent:
        return Missing(silent, "wrote no report: dead, stopped, or in native code that doesn't let go of Python's lock")
    counts = {rank: report.collectives for rank, report in reports.items()}
    fewest, most = min(counts.values()), max(counts.values())
    last = Counter(r.collective or "none" for r in reports.values() if r.collectives == most).most_common(1)[0][0]
    if fewest < most:
        behind = [rank for rank, count in counts.items() if count == fewest]
        return Missing(behind, f"entered {fewest} collectives, where others have entered {most}, the last one {last}")
    inside = [rank for rank, report in reports.items() if report.inside]
    held_up = [rank for rank, report in reports.items() if report.held_up]
    if held_up and len(held_up) < size:
        return Missing(held_up, f"held up on the way into collective {most} ({last}), in which the others are already")
    if inside and len(inside) < size:
        outside = [rank for rank in reports if rank not in inside]
        return Missing(outside, f"outside of collective {most} ({last}), in which the others still wait")
    if inside:
        return Missing(
            [], f"every rank waits in collective {most} ({last}): the network, or tensors of different sizes"
        )
    return Missing([], f"no rank waits in a collective, all have entered {most}: something that all ranks use stands")


def diagnose(
    reports: Mapping[int, Position],
    last_seen: Mapping[int, Position],
    peers: Sequence[Peer],
    *,
    limit_seconds: float,
    folder: Path,
) -> str:
    """The message that a hanging run ends with.

    Args:
        reports: positions of the ranks that answered, at the end.
        last_seen: positions of ranks as they were, or as others see them; used for those that didn't answer.
        peers: every rank's process.
        folder: where the full reports lie.
    """
    size = len(peers)
    missing = find_missing(reports, size)
    limit = f"parallel.timeout_minutes={limit_seconds / 60:g}"
    if missing.ranks:
        names = _listed([f"rank {rank} ({peers[rank]})" for rank in missing.ranks])
        head = f"hang — {names} missing: {missing.reason}"
    else:
        head = f"hang — no single rank stands out: {missing.reason}"
    head += (
        f" — every rank must make progress within {limit} — look at the places below (docs/hangs.md says how to read "
        f"them); raise the limit only if a step, or reading its data, may take that long; full reports: {folder}"
    )
    order = missing.ranks + [rank for rank in range(size) if rank not in missing.ranks]
    blocks = [
        _describe(rank, peers[rank], reports.get(rank), last_seen.get(rank), missing=rank in missing.ranks)
        for rank in order[:_MAX_RANKS_SHOWN]
    ]
    if len(order) > _MAX_RANKS_SHOWN:
        blocks.append(f"  and {len(order) - _MAX_RANKS_SHOWN} ranks more")
    return "\n".join([head, *blocks])


def _describe(rank: int, peer: Peer, report: Position | None, seen: Position | None, *, missing: bool) -> str:
    """One rank: its place, its frames, its batch."""
    name = f"  rank {rank}{', missing' if missing else ''}"
    position = report or seen
    if position is None:
        return f"{name} ({peer}): never said where it is"
    heading = f"{name}: "
    if report is None:
        process = f"its process, {position.state}, is in " if position.state else "last heard of in "
        heading = f"{name} ({peer}): no report; {process}"
    lines = [heading + _place(position)]
    if report is not None:
        lines[0] += f"; no progress for {report.idle_seconds:.0f} s"
        # How the communication library waits is of no interest; who called it is.
        frames = list(dropwhile(is_communication, report.stack)) or report.stack
        if frames:
            lines.append("    at " + " < ".join(frames[:_FRAMES_SHOWN]))
    lines.append("    " + (_batch(position.batch) if position.batch else "no batch yet"))
    return "\n".join(lines)


def _place(position: Position) -> str:
    step = f"step {position.step} of {position.steps}" if position.step else "before the first step"
    micro = f", micro-batch {position.micro_batch}" if position.micro_batch else ""
    module = position.module or "none yet"
    if not position.collectives:
        collective = "no collective entered"
    elif position.inside == WAIT:
        collective = f"waiting after collective {position.collectives} ({position.collective})"
    elif position.inside:
        collective = f"inside collective {position.collectives} ({position.collective})"
    else:
        collective = f"outside collectives, {position.collectives} entered, the last one {position.collective}"
    stage = f"stage {position.stage!r}" if position.stage else "no stage yet"
    return f"{stage}, {step}{micro}, {position.phase}; last module {module}; {collective}"


def _batch(batch: BatchShape) -> str:
    tasks = ", ".join(f"{task} {count}" for task, count in batch.tasks.items())
    rows = ", ".join(map(str, batch.rows)) + (", …" if batch.samples > len(batch.rows) else "")
    return (
        f"batch: samples {batch.samples} (dataset rows {rows}; {tasks}), tokens {batch.valid} of {batch.tokens}, "
        f"supervised positions: text {batch.text}, image {batch.image}"
        if batch.samples
        else f"batch: empty, {batch.tokens} tokens of padding"
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_RANKS_SHOWN} more" if len(names) > _MAX_RANKS_SHOWN else ""
    return ", ".join(names[:_MAX_RANKS_SHOWN]) + more
