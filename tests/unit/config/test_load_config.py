"""Reading configs: YAML 1.2, typed overrides, errors that name file, line, key, value and rule (deliver 1, D3)."""

import os
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumina_ft.config.groups import expand_group
from lumina_ft.config.load import RECIPES, dump_yaml, find_config, load_build, load_run
from lumina_ft.config.schema import RunConfig, StageConfig, selected_groups
from lumina_ft.config.yaml_file import read_yaml
from lumina_ft.errors import ConfigError

RUN = """\
output_dir: out/run
model:
  path: checkpoint
data:
  path: dataset
  max_pack_tokens: 1e3
optim:
  lr: 1e-5
stages:
  - name: first
    train: [backbone]
    steps: 10
  - name: heads
    train: [heads]
    lr: 2e-4
    epochs: 0.5
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "edited.yaml"
    path.write_text(textwrap.dedent(text))
    return path


def errors_of(path: Path | str, overrides: list[str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_run(path, overrides or [])
    return str(caught.value).splitlines()


def test_exponents_are_numbers_and_integral_floats_are_counts(run_file: Path) -> None:
    cfg = load_run(run_file, [])
    assert cfg.optim.lr == 1e-5
    assert cfg.data.max_pack_tokens == 1000 and isinstance(cfg.data.max_pack_tokens, int)
    assert cfg.stages[1].lr == 2e-4 and cfg.stages[1].epochs == 0.5


def test_yaml_12_keeps_no_clock_times_and_dates_as_strings(tmp_path: Path) -> None:
    path = write(tmp_path, "a: no\nb: 12:30\nc: 2024-01-01\nd: on\ne: 1e-5\nf: 0o17\n")
    assert read_yaml(path).tree == {"a": "no", "b": "12:30", "c": "2024-01-01", "d": "on", "e": 1e-5, "f": 15}


def test_bom_and_crlf_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "dos.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + RUN.replace("\n", "\r\n").encode())
    assert load_run(path, []).stages[0].name == "first"


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("optim.lr=3e-4", lambda c: c.optim.lr == 3e-4),
        ("stages.0.lr=1e-4", lambda c: c.stages[0].lr == 1e-4),
        ("stages.heads.lr=1e-4", lambda c: c.stages[1].lr == 1e-4),
        ("stages.0.train=[vision, heads]", lambda c: c.stages[0].train == ("vision", "heads")),
        ("stages.0.train=vision", lambda c: c.stages[0].train == ("vision",)),
        ("stages.0.group_lr.attention=1e-3", lambda c: c.stages[0].group_lr == {"attention": 1e-3}),
        ("stages.0.data.max_pack_tokens=64", lambda c: c.stage_data(0).max_pack_tokens == 64),
        ("stages.0.data.tasks=t2i", lambda c: c.stage_data(0).tasks == ("t2i",)),
        ("stages.0.data.noise.image_ratio=uniform", lambda c: c.stage_data(0).noise.image_ratio == "uniform"),
        ("data.noise.text_sigma=[0.1, 0.2]", lambda c: c.data.noise.text_sigma == (0.1, 0.2)),
        ("train.save_every_steps=1e2", lambda c: c.train.save_every_steps == 100),
        ("train.tensorboard=no", lambda c: c.train.tensorboard is False),
        ("model.tokenizer=1e3", lambda c: c.model.tokenizer == "1e3"),
        ("model.tokenizer=null", lambda c: c.model.tokenizer is None),
        ("output_dir=12:30", lambda c: c.output_dir == Path("12:30")),
        ("optim={lr: 2e-3, eps: 1e-6}", lambda c: (c.optim.lr, c.optim.eps) == (2e-3, 1e-6)),
    ],
)
def test_overrides_are_typed_by_the_schema(run_file: Path, override: str, read) -> None:
    assert read(load_run(run_file, [override]))


def test_a_string_override_is_taken_literally() -> None:
    required = ["input=rows, old.jsonl", "output=built"]
    cfg = load_build(None, [*required, "system_prompts.t2i=draw: a seven", "tokenizer=yes"])
    assert cfg.system_prompts == {"t2i": "draw: a seven"}
    assert cfg.tokenizer == "yes"
    assert cfg.input == (Path("rows, old.jsonl"),)


def test_codec_shorthand_and_its_keys_combine_in_any_order() -> None:
    required = ["input=[a.jsonl, b.jsonl]", "output=built"]
    cfg = load_build(None, [*required, "codec=pq", "codec.image_size=16"])
    assert (cfg.codec.kind, cfg.codec.image_size) == ("pq", 16)
    assert cfg.input == (Path("a.jsonl"), Path("b.jsonl"))
    assert load_build(None, [*required, "codec=token-files"]).codec.kind == "token-files"


def test_tilde_removes_keys_and_list_elements(run_file: Path) -> None:
    cfg = load_run(run_file, ["~optim.lr", "~stages.1", "~stages.first.train"])
    assert [s.name for s in cfg.stages] == ["first"]
    assert cfg.stages[0].train == ("all",)


def test_overrides_apply_in_order_and_can_append_a_stage(run_file: Path) -> None:
    cfg = load_run(run_file, ["stages.2.name=full", "stages.2.steps=3", "stages.full.steps=4"])
    assert (cfg.stages[2].name, cfg.stages[2].steps) == ("full", 4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", r"optim\.lrr — override .* unknown key; did you mean 'lr'\?"),
        ("stages.7.lr=1", r"must be an index 0…2 or a name of: first, heads"),
        ("optim.lr.x=1", r"optim\.lr — .* has no keys below it"),
        ("~optim.eps", r"optim\.eps — .* isn't set"),
        ("justtext", r"must be key=value or ~key"),
        ("=3", r"must be key=value or ~key"),
        ("stages.0.train=[vision", r"stages\.0\.train — .* valid YAML"),
    ],
)
def test_unusable_overrides_name_key_and_fix(run_file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run(run_file, [override])


def test_unknown_key_names_file_line_value_and_nearest_key(tmp_path: Path) -> None:
    path = write(tmp_path, RUN.replace("lr: 1e-5", "learnig_rate: 1\n  weigth_decay: 0.2"))
    assert errors_of(path) == [
        f"{path}:8: optim.learnig_rate — 1 — unknown key; known: lr, betas, eps, weight_decay, decay_unused, "
        "max_grad_norm, schedule, warmup_ratio, min_lr_ratio, expert_bias_rate",
        f"{path}:9: optim.weigth_decay — 0.2 — unknown key; did you mean 'weight_decay'?",
    ]


def test_keys_of_earlier_versions_name_their_successor(tmp_path: Path, run_file: Path) -> None:
    old = "path: checkpoint\n  experts_impl: {}\n  attention_impl: {}"
    path = write(tmp_path, RUN.replace("path: checkpoint", old.format("eager", "segmented")))
    rule = "model.kernels chooses for attention, experts and router together"
    assert errors_of(path) == [
        f"{path}:4: model.experts_impl — 'eager' — {rule} — write model.kernels: eager instead",
        f"{path}:5: model.attention_impl — 'segmented' — {rule} — write model.kernels: torch instead",
    ]
    path = write(tmp_path, RUN.replace("path: checkpoint", old.format("auto", "dense")))
    assert errors_of(path) == [
        f"{path}:4: model.experts_impl — 'auto' — {rule} — remove this key",
        f"{path}:5: model.attention_impl — 'dense' — {rule} — write model.kernels: eager instead",
    ]
    (line,) = errors_of(run_file, ["model.attention_impl=dense"])
    assert line.startswith("model.attention_impl — override") and line.endswith("write model.kernels: eager instead")
    assert load_run(run_file, ["model.kernels=eager"]).model.kernels == "eager"


def test_a_key_of_another_section_is_found(tmp_path: Path) -> None:
    path = write(tmp_path, RUN + "packs_per_step: 4\nlr: 1e-4\n")
    assert any(line.endswith("did you mean 'train.packs_per_step'?") for line in errors_of(path))


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    text = RUN.replace("lr: 1e-5", "lr: fast").replace("steps: 10", "steps: true").replace("dataset", "[1]")
    lines = errors_of(write(tmp_path, text + "seed: -1\nfamily: u3\n"))
    keys = [line.split(": ")[1].split(" — ")[0] for line in lines]
    assert sorted(keys) == ["data.path", "family", "optim.lr", "seed", "stages.0.steps"]
    assert all(" — " in line and "\n" not in line for line in lines)
    assert next(line for line in lines if "family" in line).endswith("should be 'u2'")


def test_stage_data_overrides_are_checked_under_the_stage_key(tmp_path: Path) -> None:
    text = RUN + "    data: {max_pack_tokens: zero, packin: none, noise: {text_sigma: [0.9, 0.1]}}\n"
    lines = errors_of(write(tmp_path, text))
    assert [line.split(": ")[1].split(" — ")[0] for line in lines] == [
        "stages.1.data.max_pack_tokens",
        "stages.1.data.noise.text_sigma",
        "stages.1.data.packin",
    ]
    assert lines[2].endswith("unknown key; did you mean 'packing'?")
    assert "ascending" in lines[1]


def test_wrong_value_from_an_override_says_override(run_file: Path) -> None:
    assert errors_of(run_file, ["optim.lr=-1"]) == ["override: optim.lr — -1 — input should be greater than 0"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.master_port=70000", "parallel.master_port — 70000 — input should be less than or equal to 65535"),
        ("parallel.timeout_minutes=1e12", "parallel.timeout_minutes — 1000000000000.0 — input should be less than"),
        ("optim.betas=[0.9, 1.0]", "optim.betas.1 — 1.0 — input should be less than 1"),
        ("seed=1e20", "seed — 1e+20 — input should be less than or equal to"),
        ("stages.0.name=..", "stages.0.name — '..' — string should match pattern"),
        ("loss={text: 0, image: 0}", "loss — loss.text=0 and loss.image=0 leave nothing to train on"),
    ],
)
def test_values_that_would_only_fail_in_the_ranks_are_refused(run_file: Path, override: str, message: str) -> None:
    (line,) = errors_of(run_file, [override])
    assert message in line


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  path: checkpoint", "  dtype: float32", "model — give exactly one of model.path"),
        ("    steps: 10\n", "", "stages.0 — stage 'first' needs exactly one of steps and epochs"),
        ("[backbone]", "[backbon]", "unknown parameter group 'backbon'; did you mean 'backbone'"),
        ("[backbone]", "[heads]\n    freeze: [heads]", "trains nothing"),
        ("[backbone]", "backbone", "stages.0.train — 'backbone' — must be a list; write [a, b]"),
        ("name: heads", "name: first", "occurs 2 times"),
        ("output_dir: out/run\n", "", "output_dir — missing — required key"),
        ("lr: 1e-5", "lr: .nan", "optim.lr"),
        ("lr: 1e-5", "betas: [0.9]", "optim.betas"),
        ("name: first", "name: 1", "put it in quotes"),
        ("lr: 1e-5", "schedule: cosin", "optim.schedule — 'cosin' — input should be"),
        ("lr: 1e-5", "schedule: cosin", "did you mean 'cosine'?"),
        ("output_dir:", "parallel: {ranks: 3}\noutput_dir:", "must be a multiple of parallel.ranks=3; use 9"),
    ],
)
def test_rules_of_the_schema_reach_the_user(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in RUN
    lines = errors_of(write(tmp_path, RUN.replace(old, new)))
    assert any(message in line for line in lines), lines


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"- a\n- b\n", "must be a mapping"),
        (b"a: 1\na: 2\n", r"edited\.yaml:2 — .*duplicate key"),
        (b"a: [1\nb: 2\n", r"edited\.yaml:2 — .* — must be valid YAML"),
        (b"a: \xff\xfe", "must be UTF-8"),
        (b"a: \x01b", "must be valid YAML"),
    ],
)
def test_broken_files_are_one_line_errors(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "edited.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_run(path, [])
    assert "\n" not in str(caught.value)


def test_missing_file_suggests_the_nearest_recipe() -> None:
    with pytest.raises(ConfigError, match="did you mean 'u2-three-stage'"):
        find_config("u2-three-stages")


def test_aliases_take_the_line_of_the_key_that_holds_them(tmp_path: Path) -> None:
    text = RUN.replace("optim:\n  lr: 1e-5", "optim: &o\n  lr: 1e-5").replace("train: [backbone]", "group_lr: *o")
    lines = errors_of(write(tmp_path, text.replace("lr: 1e-5", "lr: -1.0")))
    assert any(":8: optim.lr" in line for line in lines)
    assert any(":11: stages.0.group_lr.lr" in line for line in lines)


@pytest.mark.parametrize("recipe", sorted(p.stem for p in RECIPES.glob("*.yaml")))
def test_shipped_recipes_load_by_name(recipe: str) -> None:
    cfg = load_run(recipe, [])
    assert [selected_groups(stage) for stage in cfg.stages]


def test_default_stage_order_is_freeze_vision_heads_full() -> None:
    """D3."""
    cfg = load_run("u2-three-stage", [])
    vision = set(expand_group("vision", "test"))
    assert [s.name for s in cfg.stages] == ["freeze_vision", "heads", "full"]
    assert not vision & set(selected_groups(cfg.stages[0]))
    assert set(selected_groups(cfg.stages[1])) == set(expand_group("heads", "test"))
    assert set(selected_groups(cfg.stages[2])) == set(expand_group("all", "test"))


def test_home_is_expanded(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert load_run(run_file, ["output_dir=~/run"]).output_dir == Path("/somewhere/run")


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=200).filter(lambda s: not s.startswith("~/"))


@settings(max_examples=40, deadline=None)
@given(
    tokenizer=st.one_of(st.sampled_from(["no", "12:30", "1e-5", "null", "~", "true", " a ", "- x", "#c"]), texts),
    lr=st.floats(min_value=1e-300, max_value=1e300),
    epochs=st.floats(min_value=1e-9, max_value=1e6),
    seed=st.integers(min_value=0, max_value=2**63),
)
def test_dumped_config_reads_back_equal(tmp_path_factory, tokenizer: str, lr: float, epochs: float, seed: int) -> None:
    base = load_run(RECIPES / "u2-three-stage.yaml", [])
    stage = StageConfig(name="only", epochs=epochs, lr=lr, data={"eval_fraction": 0.25})
    cfg = RunConfig.model_validate(
        {**base.model_dump(), "seed": seed, "stages": [stage], "model": {"path": "m", "tokenizer": tokenizer}}
    )
    path = tmp_path_factory.mktemp("dump") / "run.yaml"
    dump_yaml(cfg, path)
    assert load_run(path, []) == cfg
    assert [p.name for p in path.parent.iterdir()] == ["run.yaml"]


def test_a_dumped_config_is_on_disk_before_it_replaces_the_earlier_one(tmp_path, monkeypatch) -> None:
    """A resume writes it again; a machine that dies then must not leave an empty one."""
    path = tmp_path / "run.yaml"
    path.write_text("earlier")
    seen: list[tuple[str, bool]] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        seen.append((path.read_text(), os.fstat(handle).st_size > 100))
        real(handle)

    monkeypatch.setattr("os.fsync", fsync)
    dump_yaml(load_run(RECIPES / "u2-three-stage.yaml", []), path)
    assert seen == [("earlier", True)]
    assert path.read_text() != "earlier"
