"""metrics.jsonl, TensorBoard, progress and pictures (deliver 5; M8)."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lumina_ft.monitor.expert_load import load_shares, load_summary
from lumina_ft.monitor.metrics import MetricsWriter, cut_after, read_metrics
from lumina_ft.monitor.plots import plot_expert_load, plot_losses
from lumina_ft.monitor.progress import StageProgress, counted, duration


def write_run(run_dir: Path, stages: dict[str, range], resume_at: tuple[str, int] | None = None) -> None:
    writer = MetricsWriter(run_dir, tensorboard=False, resume_at=resume_at)
    for stage, steps in stages.items():
        for step in steps:
            writer.write(step, stage, {"loss": step / 7, "tokens": step})
            if step % 2 == 0:
                writer.write(step, stage, {"eval_loss": step / 3})
    writer.close()


def without_time(run_dir: Path) -> list[dict]:
    return [{k: v for k, v in record.items() if k != "time"} for record in read_metrics(run_dir)]


def test_each_record_is_one_json_line_with_exact_values(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(1, "one", {"loss": 0.1 + 0.2, "tokens": 12, "odd": float("nan"), "big": float("-inf")})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    writer.close()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (record["stage"], record["step"], record["loss"], record["tokens"]) == ("one", 1, 0.1 + 0.2, 12)
    assert isinstance(record["tokens"], int) and math.isnan(float(record["odd"])) and float(record["big"]) == -math.inf


@pytest.mark.parametrize("crashed_after", [0, 1, 2, 3])
def test_resumed_file_equals_an_uninterrupted_one(tmp_path: Path, crashed_after: int) -> None:
    """A checkpoint at step 2 of the second stage; the run died `crashed_after` steps later, in mid-line."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "resumed").mkdir()
    write_run(tmp_path / "whole", {"one": range(1, 4), "two": range(1, 6)})
    write_run(tmp_path / "resumed", {"one": range(1, 4), "two": range(1, 3 + crashed_after)})
    with (tmp_path / "resumed" / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "two", "st')
    write_run(tmp_path / "resumed", {"two": range(3, 6)}, resume_at=("two", 2))
    assert without_time(tmp_path / "resumed") == without_time(tmp_path / "whole")


@settings(max_examples=30, deadline=None)
@given(first=st.integers(1, 6), second=st.integers(0, 6), step=st.integers(0, 6), stage=st.sampled_from(["a", "b"]))
def test_cutting_keeps_exactly_the_records_before_the_point(tmp_path_factory, first, second, step, stage) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    write_run(run_dir, {"a": range(1, first + 1), "b": range(1, second + 1)})
    before = without_time(run_dir)
    cut_after(run_dir / "metrics.jsonl", stage, step)
    end = next((i for i, r in enumerate(before) if r["stage"] == stage and r["step"] > step), len(before))
    assert without_time(run_dir) == before[:end]


def test_a_torn_last_line_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"stage": "a", "step": 1}\n{"stage": "a", "s')
    assert [r["step"] for r in read_metrics(tmp_path)] == [1]
    assert read_metrics(tmp_path / "nowhere") == []


def test_tensorboard_gets_every_value_per_stage_and_forgets_lost_steps(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=True)
    for step in (1, 2, 3):
        writer.write(step, "one", {"loss": float(step)})
    writer.close()
    writer = MetricsWriter(tmp_path, tensorboard=True, resume_at=("one", 1))
    writer.write(2, "one", {"loss": 20.0})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard" / "one"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 20.0)]


def test_plain_progress_shows_the_latest_values_first_and_last(capsys: pytest.CaptureFixture[str]) -> None:
    progress = StageProgress("heads", 3)
    progress.update(1, {"loss": 2.5, "lr": 1e-4, "tokens_per_second": 12345.6})
    progress.update(2, {"loss": 2.25})
    progress.update(2, {"eval_loss": 3.0})
    progress.update(3, {"loss": 2.0})
    progress.close()
    out, err = capsys.readouterr()
    assert out == "", "stdout is for results"
    first, last = err.splitlines()
    assert first.startswith("heads 1/3 loss 2.5000 lr 1.0e-04 12,346 tokens/s eta ")
    assert last == "heads 3/3 loss 2.0000 eval_loss 3.0000 lr 1.0e-04 12,346 tokens/s eta 0:00"


def test_a_terminal_behind_a_pipe_gets_the_bar(tmp_path: Path) -> None:
    code = (
        "from lumina_ft.monitor.progress import StageProgress\n"
        "p = StageProgress('heads', 2); p.update(1, {'loss': 1.5}); p.update(2, {'loss': 1.25}); p.close()"
    )
    env = {"LUMINA_FT_PROGRESS_WIDTH": "100", "PATH": "/usr/bin", "TERM": "xterm"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "" and "loss 1.2500" in done.stderr and "\x1b[2K" in done.stderr and "━" in done.stderr


def test_counted_progress_stays_quiet_when_quick(capsys: pytest.CaptureFixture[str]) -> None:
    with counted("rows") as advance:
        advance(1, 2)
        advance(2, 2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (61.4, "1:01"), (3599.6, "1:00:00"), (7325, "2:02:05")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_expert_load_of_even_skewed_and_empty_layers() -> None:
    """M8."""
    counts = np.array([[5, 5, 5, 5], [20, 0, 0, 0], [0, 0, 0, 0]])
    assert load_shares(counts).tolist() == [[1, 1, 1, 1], [4, 0, 0, 0], [0, 0, 0, 0]]
    summary = load_summary(counts)
    assert (summary["expert_load_max"], summary["experts_idle"]) == (4.0, 7.0)
    assert summary["expert_load_cv"] == pytest.approx(math.sqrt(3) / 3)
    assert load_summary(np.zeros((0, 4), dtype=np.int64)) == {
        "expert_load_max": 0.0,
        "expert_load_cv": 0.0,
        "experts_idle": 0.0,
    }


def test_pictures_are_written_and_not_blank(tmp_path: Path) -> None:
    assert plot_losses(tmp_path) is None
    write_run(tmp_path, {"one": range(1, 80), "two": range(1, 5)})
    losses = plot_losses(tmp_path)
    counts = np.random.default_rng(0).integers(0, 50, (19, 256))
    load = plot_expert_load(counts, tmp_path / "plots" / "expert_load.png")
    assert losses == tmp_path / "plots" / "losses.png"
    for path in (losses, load):
        pixels = np.asarray(Image.open(path).convert("L"))
        assert pixels.shape[0] > 200 and pixels.std() > 5


def test_pictures_need_no_torch() -> None:
    code = "import sys, lumina_ft.monitor.plots; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
