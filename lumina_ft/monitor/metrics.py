"""The run's numbers: one JSON line per record in `metrics.jsonl`, and TensorBoard events beside it.

A line holds `stage`, `step` (counted from 1 in each stage), `time` (unix seconds) and the values of the record.
Non-finite values are the strings "nan", "inf", "-inf": `float()` reads them and the file stays valid JSON.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
"""One entry per finished stage, beside the metrics."""

WALL_TIME_KEYS = ("time", "seconds", "tokens_per_second")
"""Fields that may differ between two runs of the same config and seed."""


class MetricsWriter:
    """Appends records to `metrics.jsonl`; use on one rank only.

    Args:
        run_dir: the run directory, which exists.
        tensorboard: also write events under `tensorboard/<stage>/`.
        resume_at: `(stage, step)` that the run continues from. Records written after it by the interrupted run are
            cut, so that the file ends up equal to that of an uninterrupted run; a torn last line is dropped.
    """

    def __init__(self, run_dir: Path, tensorboard: bool, resume_at: tuple[str, int] | None = None) -> None:
        self._run_dir = run_dir
        self._tensorboard = tensorboard
        self._resume_at = resume_at
        self._events: dict[str, EventFileWriter] = {}
        path = run_dir / METRICS_FILE
        if resume_at is not None:
            cut_after(path, *resume_at)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, stage: str, values: dict[str, float]) -> None:
        """Append one record and flush it; several records may share a step (training, evaluation)."""
        now = time.time()
        record = {"stage": stage, "step": step, "time": round(now, 3)}
        record |= {name: _plain(value) for name, value in values.items()}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        if self._tensorboard:
            summary = Summary(value=[Summary.Value(tag=k, simple_value=float(v)) for k, v in values.items()])
            self._stage_events(stage).add_event(Event(wall_time=now, step=step, summary=summary))

    def close(self) -> None:
        """Write everything to disk and close the files."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        for events in self._events.values():
            events.close()

    def _stage_events(self, stage: str) -> EventFileWriter:
        if stage not in self._events:
            events = EventFileWriter(str(self._run_dir / "tensorboard" / stage))
            if self._resume_at is not None and self._resume_at[0] == stage:
                # TensorBoard hides earlier events of this and later steps when it meets a session start.
                start = SessionLog(status=SessionLog.START)
                events.add_event(Event(wall_time=time.time(), step=self._resume_at[1] + 1, session_log=start))
            self._events[stage] = events
        return self._events[stage]


def _plain(value: float) -> float | int | str:
    """A JSON number, or the name of a non-finite one."""
    if isinstance(value, int):
        return int(value)
    value = float(value)
    return value if math.isfinite(value) else str(value)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All records of a run in order; an unfinished last line is left out. Empty when there is no file."""
    path = run_dir / METRICS_FILE
    return [record for _, record in _complete_lines(path)] if path.is_file() else []


def cut_after(path: Path, stage: str, step: int) -> None:
    """Drop every record from the first one of `stage` beyond `step` on; the rest of the file is kept bit by bit."""
    if not path.is_file():
        return
    end = 0
    for stop, record in _complete_lines(path):
        if record["stage"] == stage and record["step"] > step:
            break
        end = stop
    with path.open("r+b") as file:
        file.truncate(end)
        os.fsync(file.fileno())


def _complete_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Records with the byte offset of their end. Only the last line can be torn: every write is one line."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield end, json.loads(line)
