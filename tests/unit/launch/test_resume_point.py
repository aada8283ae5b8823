"""Where `--resume` continues: what is skipped and why, and which keys may differ."""

import os
import threading
import time
from pathlib import Path

import pytest

from lumina_ft.checkpoint.commit import new_checkpoint
from lumina_ft.checkpoint.directory import DAMAGED_MARKER, MARKER, TrainState, complete_checkpoints
from lumina_ft.config.schema import RunConfig
from lumina_ft.errors import CheckpointError, ConfigError, RunError
from lumina_ft.launch.checks import check_run
from lumina_ft.launch.resume import ResumePoint, after_stage, resume_point
from lumina_ft.launch.run_dir import prepare_run_dir
from lumina_ft.launch.shared_point import share_point
from lumina_ft.launch.summary import run_summary
from lumina_ft.parallel import rendezvous

STAGES = (
    {"name": "one", "steps": 3, "lora": "off"},
    {"name": "two", "steps": 3},
    {"name": "three", "steps": 3},
)


def config(out: Path, **lora: object) -> RunConfig:
    """Three stages, the last two with an adapter."""
    model = {"config": "u2-tiny", "random_init": True}
    values = {"output_dir": str(out), "model": model, "data": {"path": "d"}, "lora": lora, "stages": STAGES}
    return RunConfig.model_validate(values)


def save(run_dir: Path, stage_index: int, stage_step: int, **more) -> Path:
    name = str(STAGES[stage_index]["name"])
    done = 3 * stage_index + stage_step
    state = TrainState(done, stage_index, name, stage_step, 3, stage_step, 1.0, 10, {}, **more)
    with new_checkpoint(run_dir, state) as folder:
        (folder / "payload").write_text("1")
    return run_dir / "checkpoints" / f"checkpoint-{done}"


def damage(checkpoint: Path) -> None:
    (checkpoint / "payload").write_text("2")


def test_a_resume_names_what_it_skips_and_sets_it_aside(tmp_path):
    out = tmp_path / "out"
    cfg = config(out)
    prepare_run_dir(cfg, resume=False, overwrite=False)
    good, damaged, unfinished = save(out, 0, 1), save(out, 0, 2), save(out, 0, 3)
    damage(damaged)
    (unfinished / MARKER).unlink()
    point = prepare_run_dir(cfg, resume=True, overwrite=False)
    assert point[:3] == (0, good, True)
    first, second, last = point.describe().splitlines()
    assert first == f"skipped {unfinished} — no COMPLETE: never finished"
    assert second.startswith(f"skipped {damaged} — payload has hash ")
    assert last == f"resuming from {good}"
    assert (damaged / DAMAGED_MARKER).is_file(), "no rotation may count on it"
    assert [c.path for c in complete_checkpoints(out)] == [good]


def test_a_config_that_may_not_resume_changes_nothing(tmp_path):
    out = tmp_path / "out"
    prepare_run_dir(config(out), resume=False, overwrite=False)
    save(out, 1, 1)
    damaged = save(out, 1, 2)
    damage(damaged)
    with pytest.raises(ConfigError, match=r"--resume — lora\.rank — differ"):
        prepare_run_dir(config(out, rank=8), resume=True, overwrite=False)
    assert (damaged / MARKER).is_file()


def test_a_run_with_nothing_but_damaged_checkpoints_does_not_start_again(tmp_path):
    out = tmp_path / "out"
    prepare_run_dir(config(out), resume=False, overwrite=False)
    damage(save(out, 0, 1))
    with pytest.raises(CheckpointError, match=r"checkpoint-1 — payload has hash [\s\S]*every checkpoint is damaged"):
        prepare_run_dir(config(out), resume=True, overwrite=False)


def test_a_stage_boundary_looks_at_sizes_only(tmp_path):
    end = save(tmp_path, 0, 3)
    assert after_stage(tmp_path, 0)[:2] == (1, end)
    damage(end)
    assert after_stage(tmp_path, 0).checkpoint == end
    (end / "payload").write_text("longer")
    with pytest.raises(RunError, match="no complete checkpoint at the end of stage 0"):
        after_stage(tmp_path, 0)


@pytest.mark.parametrize(
    ("stage", "step", "lora", "refused"),
    [
        (0, 2, {"rank": 8}, False),
        (0, 3, {"rank": 8}, False),
        (1, 1, {"rank": 8}, True),
        (1, 3, {"rank": 8}, True),
        (1, 1, {"lr_ratio": 4.0}, False),
        (1, 1, {"dropout": 0.1}, True),
    ],
)
def test_the_adapter_is_fixed_once_a_stage_with_it_has_begun(tmp_path, stage, step, lora, refused):
    out = tmp_path / "out"
    prepare_run_dir(config(out), resume=False, overwrite=False)
    path = save(out, stage, step)
    if refused:
        with pytest.raises(ConfigError, match=rf"--resume — lora\.{next(iter(lora))} — differ"):
            prepare_run_dir(config(out, **lora), resume=True, overwrite=False)
    else:
        assert prepare_run_dir(config(out, **lora), resume=True, overwrite=False).checkpoint == path


@pytest.mark.parametrize("step", [1, 3])
def test_the_dtype_is_fixed_inside_a_stage_and_between_stages(tmp_path, step):
    out = tmp_path / "out"
    cfg = config(out)
    prepare_run_dir(cfg, resume=False, overwrite=False)
    save(out, 0, step)
    other = cfg.model_copy(update={"model": cfg.model.model_copy(update={"dtype": "float32"})})
    with pytest.raises(ConfigError, match=r"--resume — model\.dtype — differ"):
        prepare_run_dir(other, resume=True, overwrite=False)


def test_what_a_stage_does_with_the_adapter_is_fixed_once_it_is_finished(tmp_path):
    out = tmp_path / "out"
    cfg = config(out)
    prepare_run_dir(cfg, resume=False, overwrite=False)

    def with_second(**changes: str) -> RunConfig:
        stages = (cfg.stages[0], cfg.stages[1].model_copy(update=changes), cfg.stages[2])
        return cfg.model_copy(update={"stages": stages})

    inside = save(out, 1, 1)
    assert prepare_run_dir(with_second(lora_at_end="merge"), resume=True, overwrite=False).checkpoint == inside
    with pytest.raises(ConfigError, match=r"--resume — stages\.1\.lora — differ"):
        prepare_run_dir(with_second(lora="freeze", lora_at_end="merge"), resume=True, overwrite=False)
    save(out, 1, 3)
    with pytest.raises(ConfigError, match=r"--resume — stages\.1 — differ"):
        prepare_run_dir(with_second(lora_at_end="drop"), resume=True, overwrite=False)


def test_the_summary_names_the_adapter_and_the_base_below_it(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    cfg = config(tmp_path)
    save(tmp_path, 0, 3)
    summary = run_summary(cfg, seconds=1.0)
    assert summary["model"] == str(tmp_path / "checkpoints" / "checkpoint-3" / "model") and summary["adapter"] is None
    end = save(tmp_path, 1, 3, adapter="kept", base=str(base))
    summary = run_summary(cfg, seconds=1.0)
    assert (summary["model"], summary["adapter"]) == (str(base), str(end / "adapter"))


def test_a_checkpoint_folder_that_cannot_be_written_is_found_before_ranks_start(tmp_path, monkeypatch):
    """Root may write anywhere, so the system's answer is replaced."""
    folder = tmp_path / "out" / "checkpoints"
    folder.mkdir(parents=True)
    real = os.access
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != folder and real(path, mode))
    with pytest.raises(ConfigError, match=rf"output_dir — .* — {folder} is not writable — choose"):
        check_run(config(tmp_path / "out"))


def test_ranks_of_another_launcher_take_the_point_that_rank_0_has_found(tmp_path, monkeypatch):
    """The ranks are threads here, with one store and each its own number. Reading may take longer than the limit."""
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

    store = HashStore()
    monkeypatch.setattr(rendezvous, "connect_store", lambda *_: store)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    ranks = threading.local()
    real = os.environ.__class__.__getitem__
    monkeypatch.setattr(
        os.environ.__class__, "__getitem__", lambda env, key: ranks.own if key == "RANK" else real(env, key)
    )
    found = ResumePoint(1, tmp_path / "checkpoint-4", True)
    points: dict[str, ResumePoint] = {}

    limit_seconds = 1.0

    def find() -> ResumePoint:
        assert ranks.own == "0", "one rank reads"
        time.sleep(1.5 * limit_seconds)
        return found

    def play(rank: str) -> None:
        ranks.own = rank
        points[rank] = share_point(find, timeout_minutes=limit_seconds / 60)

    started = [threading.Thread(target=play, args=(rank,)) for rank in ("1", "2", "0")]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(20)
    assert points == {"0": found, "1": found, "2": found}


def test_a_rank_0_that_ends_while_it_reads_is_no_bug_of_the_other_ranks(monkeypatch):
    """Where it hosts the store itself, their connection breaks."""

    class Broken:
        def wait(self, *_: object) -> None:
            raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(rendezvous, "connect_store", lambda *_: Broken())
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match="rank 1 of 2 — --resume — rank 0 ended before"):
        share_point(lambda: ResumePoint(0, None), timeout_minutes=0.1)


def test_the_newest_point_of_a_run_without_checkpoints_is_its_start(tmp_path):
    assert resume_point(tmp_path) == ResumePoint(0, None)
    assert resume_point(tmp_path).describe() == "resuming from the start: no complete checkpoint"
