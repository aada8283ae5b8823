"""What is refused before a rank is started, and who may use a run directory (deliver 5, 8; V11)."""

import errno
import json
import logging
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lumina_ft.checkpoint.commit import new_checkpoint
from lumina_ft.checkpoint.directory import TrainState
from lumina_ft.config.load import load_run
from lumina_ft.config.schema import RunConfig
from lumina_ft.data.shards import make_meta, write_meta
from lumina_ft.errors import ConfigError, RunError
from lumina_ft.launch import foreign, rank
from lumina_ft.launch.checks import check_run, choose_port, has_gpu
from lumina_ft.launch.foreign import with_world_size
from lumina_ft.launch.local import rank_environment
from lumina_ft.launch.plan_view import describe_run
from lumina_ft.launch.run_dir import RunLog, forget_unstarted, prepare_run_dir
from lumina_ft.launch.summary import print_summary, run_summary
from lumina_ft.tokens import PUBLISHED_MEDIA_IDS, PUBLISHED_TEXT_IDS, TokenSpec
from lumina_ft.train.stop import StopRequest

Make = Callable[..., RunConfig]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A run config that passes every check, with overrides."""
    spec = TokenSpec(PUBLISHED_TEXT_IDS, PUBLISHED_MEDIA_IDS, 8)
    (tmp_path / "data").mkdir()
    meta = make_meta(
        counts={"t2i": 3, "text": 1},
        shards=(),
        spec=spec,
        tokenizer_identity="sha256:0",
        codec=None,
        system_prompts={},
        block_tokens=32,
    )
    write_meta(tmp_path / "data", meta)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").touch()
    path = tmp_path / "run.yaml"
    path.write_text(
        f"output_dir: {tmp_path}/out\nmodel: {{path: {tmp_path}/model}}\ndata: {{path: {tmp_path}/data}}\n"
        "stages:\n- {name: one, steps: 3, train: [heads], group_lr: {heads: 1e-3, lm_head: 5e-4}}\n"
        "- {name: two, steps: 2}\n"
    )
    return lambda *overrides: load_run(path, list(overrides))


def test_a_good_run_passes_every_check(make: Make) -> None:
    check_run(make())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=/nowhere", r"model\.path — '/nowhere' — no such directory"),
        ("data.path=/nowhere", r"data\.path — '/nowhere' — no such directory — must be written by `lumina-ft data"),
        ("stages.1.data.path=/nowhere", r"stages\.1\.data\.path — '/nowhere'"),
        ("data.eval_path=/tmp", r"data\.eval_path — .*dataset\.json"),
        ("data.tasks=[t2j]", r"data\.tasks — 't2j' — not in .* did you mean 't2i'"),
        ("stages.1.data.tasks=[understand]", r"stages\.1\.data\.tasks — 'understand'"),
        ("model.tokenizer=missing", r"model\.tokenizer — 'missing' — must be a tokenizer directory"),
        ("parallel.zero=zero4", r"parallel\.zero — 'zero4' — must be one of zero0"),
        ("output_dir=/etc/hostname/out", r"output_dir — '/etc/hostname/out' — /etc/hostname is a file"),
    ],
)
def test_wrong_paths_and_names_are_found_before_launching(make: Make, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_run(make(override))
    assert "\n" not in str(caught.value)


def test_every_failed_check_is_reported_at_once(make: Make) -> None:
    cfg = make("model.path=/nowhere", "data.path=/nowhere", "parallel.zero=zero9")
    with pytest.raises(ConfigError) as caught:
        check_run(cfg)
    assert len(str(caught.value).splitlines()) == 3


def test_an_unknown_shipped_model_gets_the_nearest_name(make: Make) -> None:
    cfg = make("~model.path", "model.config=u2-tini", "model.random_init=true")
    with pytest.raises(ConfigError, match="did you mean 'u2-tiny'"):
        check_run(cfg)


def test_a_deepspeed_file_that_contradicts_the_run_is_refused(make: Make, tmp_path: Path) -> None:
    own = tmp_path / "ds.json"
    own.write_text('{"zero_optimization": {"stage": 2}, "gradient_clipping": 5.0}')
    with pytest.raises(ConfigError, match=r"gradient_clipping — 5\.0"):
        check_run(make(f"parallel.zero={own}"))


def test_a_busy_port_is_an_error_when_asked_for_and_avoided_otherwise() -> None:
    """V11."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"parallel\.master_port — {port} — .* use 0 to take any"):
            choose_port(port)
        assert choose_port(0) not in (0, port)
    assert choose_port(port) == port


def test_cpu_ranks_share_the_cores(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("lumina_ft.launch.local.cpu_cores", lambda: 6)
    assert not has_gpu()
    env = rank_environment(make("parallel.ranks=4"))
    assert (env["OMP_NUM_THREADS"], env["DS_ACCELERATOR"]) == ("1", "cpu")
    assert "RANK" not in env
    assert rank_environment(make("parallel.ranks=2"))["OMP_NUM_THREADS"] == "3"
    assert rank_environment(make("parallel.threads_per_rank=5"))["OMP_NUM_THREADS"] == "5"


def test_gpu_ranks_share_the_cores_too(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun would give each one thread, which also lays out its batches."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr("lumina_ft.launch.local.has_gpu", lambda: True)
    monkeypatch.setattr("lumina_ft.launch.local.cpu_cores", lambda: 64)
    env = rank_environment(make("parallel.ranks=8"))
    assert env["OMP_NUM_THREADS"] == "8" and "DS_ACCELERATOR" not in env


def test_a_directory_with_a_run_is_refused_unless_told_otherwise(make: Make, tmp_path: Path) -> None:
    cfg, out = make(), tmp_path / "out"
    prepare_run_dir(cfg, resume=False, overwrite=False)
    assert load_run(out / "run.yaml", []) == cfg
    (out / "metrics.jsonl").write_text("old\n")
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="already holds a run .* --resume .* --overwrite"):
        prepare_run_dir(cfg, resume=False, overwrite=False)
    prepare_run_dir(cfg, resume=False, overwrite=True)
    assert not (out / "metrics.jsonl").exists()
    assert (out / "notes.txt").read_text() == "mine", "only what a run writes is deleted"
    assert len(json.loads((out / "environment.json").read_text())) == 1


def leave_checkpoint(run_dir: Path, stage_index: int, stage_step: int, stage_steps: int) -> Path:
    """A checkpoint of the config that `make` gives: stages of 3 and 2 steps."""
    name = ("one", "two")[stage_index]
    done = stage_step + 3 * stage_index
    state = TrainState(done, stage_index, name, stage_step, stage_steps, stage_step, 4.5, 90, {})
    with new_checkpoint(run_dir, state) as folder:
        (folder / "model").mkdir()
    return run_dir / "checkpoints" / f"checkpoint-{done}"


def test_resume_needs_a_run_and_the_same_samples(make: Make, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="no run to resume"):
        prepare_run_dir(make(), resume=True, overwrite=False)
    prepare_run_dir(make(), resume=False, overwrite=False)
    assert prepare_run_dir(make("stages.1.steps=9"), resume=True, overwrite=False)[:3] == (0, None, False)
    inside = leave_checkpoint(out, 0, 2, 3)
    with pytest.raises(ConfigError, match="--resume — seed, train.packs_per_step, stages.0.steps — differ"):
        changed = make("seed=1", "train.packs_per_step=16", "stages.0.steps=9")
        prepare_run_dir(changed, resume=True, overwrite=False)
    with pytest.raises(ConfigError, match="--resume — stages.0.data — differ"):
        prepare_run_dir(make("stages.0.data.tasks=t2i"), resume=True, overwrite=False)
    later = make("stages.1.steps=2", "train.save_every_steps=1", "parallel.ranks=2")
    assert prepare_run_dir(later, resume=True, overwrite=False)[:3] == (0, inside, True)


def test_a_run_of_an_earlier_version_says_what_to_change(make: Make, tmp_path: Path) -> None:
    prepare_run_dir(make(), resume=False, overwrite=False)
    file = tmp_path / "out" / "run.yaml"
    now = file.read_text()
    assert "  kernels: auto\n" in now
    file.write_text(now.replace("  kernels: auto\n", "  experts_impl: torch\n  attention_impl: auto\n"))
    with pytest.raises(ConfigError) as caught:
        prepare_run_dir(make(), resume=True, overwrite=False)
    first, second = str(caught.value).splitlines()
    assert "run.yaml:" in first and first.endswith("write model.kernels: torch instead")
    assert "model.attention_impl — 'auto' — " in second and second.endswith("remove this key")
    file.write_text(now.replace("kernels: auto", "kernels: torch"))
    assert prepare_run_dir(make("model.kernels=eager"), resume=True, overwrite=False)[:3] == (0, None, False)


def test_learning_rates_may_change_on_resume(make: Make, tmp_path: Path) -> None:
    """A run that stopped at a non-finite value is told to lower them."""
    prepare_run_dir(make(), resume=False, overwrite=False)
    inside = leave_checkpoint(tmp_path / "out", 0, 2, 3)
    calmer = make("optim.lr=1e-7", "stages.one.lr=1e-6", "~stages.one.group_lr", "stages.one.schedule=linear")
    assert prepare_run_dir(calmer, resume=True, overwrite=False)[:3] == (0, inside, True)
    assert load_run(tmp_path / "out" / "run.yaml", []).stages[0].lr == 1e-6


def test_a_crash_between_stages_leaves_the_next_stage_free_to_change_and_the_finished_one_fixed(
    make: Make, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    prepare_run_dir(make(), resume=False, overwrite=False)
    end = leave_checkpoint(out, 0, 3, 3)
    kept = '{"stage": "one", "step": 3, "loss": 1.0}\n'
    (out / "metrics.jsonl").write_text(kept + '{"stage": "two", "step": 1, "loss": 0.5}\n')
    with pytest.raises(ConfigError, match="--resume — stages.0 — differ"):
        prepare_run_dir(make("stages.0.lr=1e-3"), resume=True, overwrite=False)
    renamed = make("stages.two.steps=7", "stages.two.name=second")
    assert prepare_run_dir(renamed, resume=True, overwrite=False)[:3] == (1, end, False)
    assert (out / "metrics.jsonl").read_text() == kept, "records of steps that run again are cut under their old name"


def test_overwrite_never_deletes_what_the_run_reads(make: Make, tmp_path: Path) -> None:
    prepare_run_dir(make(), resume=False, overwrite=False)
    model = leave_checkpoint(tmp_path / "out", 0, 3, 3) / "model"
    with pytest.raises(ConfigError, match=r"--overwrite — model\.path=.* lies in .*checkpoints, which would"):
        prepare_run_dir(make(f"model.path={model}"), resume=False, overwrite=True)
    assert model.is_dir()


def test_a_finished_run_resumes_to_nothing(make: Make, tmp_path: Path) -> None:
    prepare_run_dir(make(), resume=False, overwrite=False)
    leave_checkpoint(tmp_path / "out", 0, 3, 3)
    end = leave_checkpoint(tmp_path / "out", 1, 2, 2)
    assert prepare_run_dir(make("optim.lr=1"), resume=True, overwrite=False)[:3] == (2, end, False)
    assert load_run(tmp_path / "out" / "run.yaml", []) == make(), "the record of what was trained stays"


def test_summary_knows_stages_whose_ranks_died_behind_their_checkpoint(make: Make, tmp_path: Path) -> None:
    """The model is that of the newest stage, even if nothing but its checkpoint tells of it."""
    out = tmp_path / "out"
    prepare_run_dir(make(), resume=False, overwrite=False)
    leave_checkpoint(out, 0, 3, 3)
    end = leave_checkpoint(out, 1, 2, 2)
    told = {"index": 0, "name": "one", "steps": 3, "losses": {"loss": 1.5}, "seconds": 2.0, "expert_counts": [[1]]}
    (out / "summary.json").write_text(json.dumps([told]))
    summary = run_summary(make(), seconds=1.0)
    assert [(s["name"], s["losses"], s["seconds"]) for s in summary["stages"]] == [
        ("one", {"loss": 1.5}, 2.0),
        ("two", {}, 4.5),
    ]
    assert summary["model"] == str(end / "model")
    assert "expert_counts" not in summary["stages"][0]
    print_summary(summary)


def test_ranks_of_this_machine_are_counted_as_each_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines of 8 GPUs under deepspeed are 16 ranks, not 16 ranks on one machine."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert rank.local_ranks() == 1
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert rank.local_ranks() == 16
    monkeypatch.setenv("LOCAL_SIZE", "8")
    assert rank.local_ranks() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert rank.local_ranks() == 4


def test_a_full_gpu_is_a_failed_run_with_a_way_out_not_a_bug_of_ours(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def fill(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20.00 GiB")

    logger = logging.getLogger("lumina_ft")
    monkeypatch.setattr(logger, "handlers", logger.handlers)
    monkeypatch.setattr(logger, "propagate", logger.propagate)
    monkeypatch.setattr(rank, "_configure_devices", lambda _: None)
    monkeypatch.setattr("lumina_ft.train.run.train_stage", fill)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(RunError, match=r"rank 3 — stage 'two' — CUDA out of memory\. Tried .* data\.max_pack_tokens"):
        rank.execute_stage(
            make(), 1, resume=None, run_dir=tmp_path, stop=StopRequest(), on_hang=lambda error, speaks: None
        )


def test_launchers_world_size_is_taken_or_contradicted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert with_world_size(make()).parallel.ranks == 4
    assert with_world_size(make("parallel.ranks=4")).parallel.ranks == 4
    with pytest.raises(ConfigError, match=r"parallel\.ranks — 2 — the launcher started 4 ranks"):
        with_world_size(make("parallel.ranks=2"))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="multiple of the launcher's 3 ranks — use 9"):
        with_world_size(make())


def test_later_stages_in_another_launchers_ranks_take_the_config_that_the_run_began_with(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = make("parallel.ranks=2")
    prepare_run_dir(began, resume=False, overwrite=False)
    leave_checkpoint(began.output_dir, 0, 3, 3)
    trained = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(foreign.STAGE_ENV, "1")
    monkeypatch.setenv(foreign.START_ENV, "0")
    monkeypatch.setattr(foreign, "execute_stage", lambda cfg, index, **_: trained.append((cfg, index)))
    changed = make("optim.lr=1", "stages.1.steps=99")
    foreign.run_foreign(changed, resume=False, overwrite=False, tell=lambda error: None)
    assert trained == [(began, 1)]


def test_dry_run_lists_groups_and_rates(make: Make) -> None:
    first, second = describe_run(make("parallel.ranks=2"))["stages"]
    assert first["groups"] == {"lm_head": 5e-4, "image_heads": 1e-3, "codebook_head": 1e-3}
    assert len(second["groups"]) == 12 and set(second["groups"].values()) == {1e-5}


def test_log_keeps_what_remained_on_the_screen(tmp_path: Path, capfdbinary) -> None:
    log = RunLog(tmp_path)
    log.line("first")
    log.copy(b"half a ")
    log.copy("line é\n\x1b[2K\x1b[1mbar\x1b[0m 1/3\r\x1b[2Kbar 2/3\r\x1b[2Kbar 3/3\nrest".encode())
    log.close()
    sys.stderr.flush()
    assert (tmp_path / "log.txt").read_text() == "first\nhalf a line é\nbar 3/3\nrest\n"
    assert b"bar 2/3" in capfdbinary.readouterr().err, "the terminal gets everything"


def test_a_log_on_a_full_disk_says_so_once_and_the_terminal_goes_on(tmp_path: Path, capfdbinary) -> None:
    (tmp_path / "log.txt").symlink_to("/dev/full")
    log = RunLog(tmp_path)
    log.line("first")
    log.line("second")
    log.close()
    sys.stderr.flush()
    told = capfdbinary.readouterr().err
    assert told.count(b"log.txt \xe2\x80\x94 No space left on device") == 1
    assert b"first\n" in told and b"second\n" in told


def test_a_full_disk_at_the_start_is_a_failed_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run.yaml")

    monkeypatch.setattr("lumina_ft.launch.run_dir.dump_yaml", full)
    with pytest.raises(RunError, match="output_dir — run.yaml — No space left on device — .* make room"):
        prepare_run_dir(make(), resume=False, overwrite=False)


@pytest.mark.parametrize("how", ["set_damaged_aside", "forget_lost_steps", "_remove"])
def test_a_run_directory_that_refuses_changes_is_a_failed_run(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Root may write anywhere, so the system's answer is replaced."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "run")

    prepare_run_dir(make(), resume=False, overwrite=False)
    leave_checkpoint(tmp_path / "out", 0, 2, 3)
    monkeypatch.setattr(f"lumina_ft.launch.run_dir.{how}", refuse)
    with pytest.raises(RunError, match="output_dir — run — Read-only file system — "):
        prepare_run_dir(make(), resume=how != "_remove", overwrite=how == "_remove")


def test_a_run_without_a_step_is_forgotten_and_a_started_one_is_kept(make: Make) -> None:
    cfg = make()
    prepare_run_dir(cfg, resume=False, overwrite=False)
    forget_unstarted(cfg.output_dir)
    assert not cfg.output_dir.exists()
    prepare_run_dir(cfg, resume=False, overwrite=False)
    (cfg.output_dir / "notes.txt").write_text("mine")
    forget_unstarted(cfg.output_dir)
    assert [path.name for path in cfg.output_dir.iterdir()] == ["notes.txt"]
    prepare_run_dir(cfg, resume=False, overwrite=False)
    (cfg.output_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    forget_unstarted(cfg.output_dir)
    assert (cfg.output_dir / "run.yaml").is_file()
