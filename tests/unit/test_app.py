"""The command line: results on stdout, everything else on stderr, exit codes (deliver 8)."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lumina_ft import app
from lumina_ft.commands.data import split_config
from lumina_ft.errors import ConfigError, RunError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "say one", "response": "one"}\n{"prompt": "say two", "response": "two"}\n')
    return path


def test_data_build_reports_json_last_and_the_packing_on_stderr(run: Run, rows: Path, tmp_path: Path) -> None:
    code, out, err = run("data", "build", f"input={rows}", f"output={tmp_path}/built", "task=text", "--json")
    assert code == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert summary["samples"] == 2 and summary["packing"]["packs"] == 1
    assert "token use" in err and "{" not in err
    code, out, err = run("data", "inspect", f"{tmp_path}/built", "--json")
    texts = [s["text"] for s in json.loads(out.splitlines()[-1])["samples"][0]["segments"]]
    assert texts[-2:] == ["say one", "one"]
    code, out, _ = run("data", "inspect", f"{tmp_path}/built", "-n", "1")
    assert "say one" in out and "say two" not in out


def test_config_file_and_overrides_combine(run: Run, rows: Path, tmp_path: Path) -> None:
    config = tmp_path / "build.yaml"
    config.write_text(f"input: {rows}\noutput: {tmp_path}/built\ntask: t2i\n")
    code, out, err = run("data", "build", str(config), "task=text", "~output", f"output={tmp_path}/other", "--json")
    assert code == 0, err
    assert json.loads(out)["output"] == f"{tmp_path}/other" and not (tmp_path / "built").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inputt=a.jsonl"], "error: inputt — override 'inputt=a.jsonl' — unknown key; did you mean 'input'?\n"),
        (["missing.yaml"], "error: missing.yaml — no such file"),
        (["ROWS", "ROWS"], "must be one CONFIG"),
        (["input=ROWS"], "output — missing — required key"),
        (["input=nowhere.jsonl", "output=OUT"], "nowhere.jsonl"),
        (["input=ROWS", "output=OUT", "workers=many"], "override: workers — 'many' — input should be"),
        (["input=BAD", "output=OUT", "task=text"], "bad.jsonl:2"),
    ],
)
def test_user_errors_are_one_line_with_exit_code_2(
    run: Run, rows: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a", "response": "b"}\n{"prompt": \n')
    names = {"ROWS": str(rows), "OUT": str(tmp_path / "built"), "BAD": str(bad)}
    for name, value in names.items():
        arguments = [a.replace(name, value) for a in arguments]
    before = sorted(tmp_path.iterdir())
    code, out, err = run("data", "build", *arguments, "--json")
    (line,) = [line for line in err.splitlines(keepends=True) if line.startswith("error: ")]
    assert code == 2 and message in line and "Traceback" not in err
    result = json.loads(out.splitlines()[-1])
    assert result["exit_code"] == 2 and line == f"error: {result['error']}\n"
    assert sorted(tmp_path.iterdir()) == before, "nothing half-written"


def test_failed_runs_exit_1_and_our_bugs_keep_their_traceback(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RunError("loss — nan — must be finite — lower the rate")

    monkeypatch.setattr("lumina_ft.data.digits.write_digits", fail)
    code, _, err = run("data", "digits", "--output", f"{tmp_path}/d")
    assert code == 1 and "error: loss — nan" in err

    def bug(*_: object, **__: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("lumina_ft.data.digits.write_digits", bug)
    monkeypatch.setattr(sys, "argv", ["lumina-ft", "data", "digits", "--output", f"{tmp_path}/d"])
    with pytest.raises(ZeroDivisionError):
        app.main()


def test_a_bug_in_a_rank_of_another_launcher_ends_it_at_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not through destructors, where it could wait for the other ranks for ever."""

    def bug(*_: object, **__: object) -> None:
        raise ZeroDivisionError("ours")

    def ended(code: int) -> None:
        raise SystemExit(code + 40)

    monkeypatch.setattr("lumina_ft.data.digits.write_digits", bug)
    monkeypatch.setattr(os, "_exit", ended)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run("data", "digits", "--output", f"{tmp_path}/d")
    assert code == 41 and "ZeroDivisionError: ours" in err


def test_usage_errors_exit_2(run: Run) -> None:
    code, _, err = run("sft", "--no-such-option")
    assert code == 2 and "No such option" in err
    assert run("sft", "--config", "u2-three-stage", "--resume", "--overwrite")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data", "digits"], "Missing option '--output' / '-o'."),
        (["convert", "a", "b", "--layout", "flat"], "Invalid value for '--layout'"),
        (["sample", "--model", "m", "--prompt", "p", "--temperature", "-1"], "Invalid value for '--temperature'"),
        (["no-such-command"], "No such command 'no-such-command'."),
    ],
)
def test_usage_errors_are_json_too(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments, "--json")
    (line,) = out.splitlines()
    result = json.loads(line)
    assert code == result["exit_code"] == 2 and result["kind"] == "UsageError"
    assert message in result["error"] and "Traceback" not in err
    assert run(*arguments)[1] == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_stop_a_build_and_leave_nothing(
    run: Run, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    from lumina_ft.data.shards import ShardWriter

    def interrupted_close(_: ShardWriter) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr(ShardWriter, "close", interrupted_close)
    before = sorted(tmp_path.iterdir())
    returned, out, err = run("data", "build", f"input={rows}", f"output={tmp_path}/built", "task=text", "--json")
    assert returned == code and "Traceback" not in err
    error = f"stopped by {signal.Signals(number).name} — the command has not finished"
    assert json.loads(out) == {"error": error, "kind": "Interrupted", "exit_code": code}
    assert f"error: {error}\n" in err
    assert sorted(tmp_path.iterdir()) == before


def test_a_signal_during_a_runs_checks_is_told_like_any_other_stop(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lumina_ft.launch.local.check_run", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    config = tmp_path / "run.yaml"
    config.write_text(
        f"output_dir: {tmp_path}/out\nmodel: {{config: u2-tiny, random_init: true}}\n"
        f"data: {{path: {tmp_path}}}\nstages: [{{name: one, steps: 1}}]\n"
    )
    code, out, _ = run("sft", "--config", str(config), "--json")
    assert (code, json.loads(out)["kind"]) == (143, "Interrupted")
    assert not (tmp_path / "out").exists()


def test_dry_run_prints_the_plan_and_starts_nothing(run: Run, tmp_path: Path) -> None:
    code, out, err = run("sft", "--config", "u2-three-stage", "--dry-run", f"output_dir={tmp_path}/out", "--json")
    assert code == 2 and "model.path" in err and "data.path" in err
    assert json.loads(out)["kind"] == "ConfigError"
    assert not (tmp_path / "out").exists()


def test_every_command_has_help_and_json() -> None:
    from typer.main import get_command

    def walk(command, path: str):
        children = getattr(command, "commands", None)
        if not children:
            yield path, command
        for name, child in (children or {}).items():
            yield from walk(child, f"{path} {name}")

    commands = dict(walk(get_command(app.app), ""))
    expected = "sft, sample, convert, merge-lora, plan, data build, bench moe, bench lora, demo"
    assert {f" {name}" for name in expected.split(", ")} <= set(commands)
    for path, command in commands.items():
        assert command.help, path
        assert any("--json" in param.opts for param in command.params), path
        assert all(getattr(param, "help", None) for param in command.params if param.name != "help"), path


def test_split_config_refuses_ambiguity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a=b.yaml").write_text("x: 1\n")
    assert split_config(["a=b.yaml", "k=v", "~z"]) == (Path("a=b.yaml"), ["k=v", "~z"])
    assert split_config(["k=v"]) == (None, ["k=v"])
    with pytest.raises(ConfigError, match="a second file"):
        split_config(["a=b.yaml", "other"])
