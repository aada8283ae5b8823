"""The search for tiles, with verdicts and times made up; compiling is in tests/aot, running in tests/interpreter."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from lumina_ft.bench import tune
from lumina_ft.bench.tile_candidates import candidates
from lumina_ft.errors import ConfigError, RunError
from lumina_ft.kernels.aot import Compilation, Compiler, Verdict
from lumina_ft.kernels.launch import tile_for, use_tiles
from lumina_ft.kernels.tiles import INTERPRETER, Tile, tiles_of

KEY = ("route", "float32")


class FakeCompiler:
    """Refuses tiles by rule."""

    def __init__(self, refuse: Callable[[Compilation], bool]) -> None:
        self.refuse = refuse

    def judge(self, jobs: Iterable[tuple[Compilation, str]]) -> list[Verdict]:
        return [Verdict(c, name, None, ("spills 8 bytes",) if self.refuse(c) else ()) for c, name in jobs]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Compilation], bool]], None]:
    """Replaces the compiler, and the cases by two forms of the router."""

    def compilations(_: object, __: str, override: dict[tuple[str, str], Tile]) -> dict[Any, list[Compilation]]:
        return {
            key: [Compilation(*key, "m", "f", (), (*sorted(tile.blocks.items()), ("FORM", form)), *tile[1:])
                  for form in (0, 1)]
            for key, tile in override.items()
        }  # fmt: skip

    monkeypatch.setattr(tune, "compilations", compilations)
    monkeypatch.setattr(tune, "kernel_cases", lambda: [])
    monkeypatch.setattr(tune, "_device", lambda _: None)

    def refuse(rule: Callable[[Compilation], bool]) -> None:
        class Context:
            def __enter__(self) -> Compiler:
                return cast(Compiler, FakeCompiler(rule))

            def __exit__(self, *_: object) -> None: ...

        monkeypatch.setattr(tune, "compiler", lambda _: Context())

    return refuse


@pytest.mark.parametrize("name", ["sm_80", "sm_90"])
def test_every_shipped_tile_is_one_that_tuning_tries(name: str) -> None:
    strangers = [
        f"{kernel} {variant} {tune.show(tile)}"
        for kernel, variants in tiles_of(name).items()
        for variant, tile in variants.items()
        if tile not in candidates(kernel, variant, name, tile)
    ]
    assert not strangers


def test_the_first_candidate_that_passes_in_every_form_is_written(offline: Callable[..., None], tmp_path: Path) -> None:
    first, second, third = list(candidates(*KEY, "sm_90", tiles_of("sm_90")["route"]["float32"]))[:3]
    forms = {(first.blocks["BLOCK_M"], first.num_warps, 1), (second.blocks["BLOCK_M"], second.num_warps, 0)}
    offline(lambda c: (c.tile()["BLOCK_M"], c.num_warps, dict(c.constants)["FORM"]) in forms)
    path = tmp_path / "tiles.json"
    result = tune.bench_tune("sm_90", kernels=("route",), output=path)
    written = json.loads(path.read_text())
    assert written["route"]["float32"] == tune.entry(third)
    assert result["timed"] is False
    assert len(result["rejected"]) == 2
    others = {kernel: variants for kernel, variants in tiles_of("sm_90").items() if kernel != "route"}
    assert {k: v for k, v in written.items() if k != "route"} == {
        kernel: {variant: tune.entry(tile) for variant, tile in variants.items()} for kernel, variants in others.items()
    }


def test_a_kernel_without_any_tile_is_an_error_and_nothing_is_written(
    offline: Callable[..., None], tmp_path: Path
) -> None:
    offline(lambda _: True)
    with pytest.raises(RunError, match=r"tune — route float32 on sm_90 — no candidate passes the gate \(.*spills 8"):
        tune.bench_tune("sm_90", kernels=("route",), output=tmp_path / "tiles.json")
    assert not (tmp_path / "tiles.json").exists()


def test_an_architecture_without_a_file_gets_one_for_all_kernels(offline: Callable[..., None], tmp_path: Path) -> None:
    offline(lambda _: False)
    path = tmp_path / "tiles.json"
    tune.bench_tune("sm_89", output=path)
    written = json.loads(path.read_text())
    assert {k: set(v) for k, v in written.items()} == {k: set(v) for k, v in tiles_of("sm_80").items()}


def test_an_unknown_kernel_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"--kernel — 'rout' — must be one of .*did you mean 'route'"):
        tune.bench_tune("sm_90", kernels=("rout",))


def test_the_fastest_tile_on_a_gpu_wins_and_wrong_ones_never() -> None:
    tiles = [Tile({"BLOCK_M": size}, 4, 1) for size in (1, 2, 4)]
    assert tune._fastest(KEY, tiles, [float("inf"), 2.0, 3.0]) is tiles[1]
    assert tune._fastest(KEY, tiles, None) is tiles[0]
    with pytest.raises(RunError, match="every candidate computes wrong results"):
        tune._fastest(KEY, tiles, [float("inf")] * 3)


def test_results_are_wrong_where_they_differ_or_are_nan() -> None:
    expected = {"out": torch.ones(4), "grad": torch.ones(4), "index": torch.arange(4)}
    assert tune.wrong(expected, expected, 1e-4) == []
    assert tune.wrong(expected | {"out": torch.tensor([1.0, 1, 1, torch.nan])}, expected, 1e-4) == ["out"]
    assert tune.wrong(expected | {"grad": torch.ones(4) * 1.001}, expected, 1e-4) == ["grad"]
    assert tune.wrong(expected | {"index": torch.tensor([0, 1, 2, 4])}, expected, 1e-4) == ["index"]


def test_tiles_are_replaced_inside_the_block_only() -> None:
    device, tile = torch.device("cpu"), Tile({"BLOCK_M": 64}, 1, 1)
    shipped = tiles_of(INTERPRETER)["route"]["float32"]
    with use_tiles({KEY: tile}):
        assert tile_for(*KEY, device) is tile
        assert tile_for("route_backward", "float32", device) == tiles_of(INTERPRETER)["route_backward"]["float32"]
    assert tile_for(*KEY, device) == shipped


def test_the_command_says_that_nothing_was_timed(offline: Callable[..., None], tmp_path: Path, run: Any) -> None:
    offline(lambda _: False)
    path = tmp_path / "tiles.json"
    code, out, err = run("bench", "tune", "--arch", "sm_80", "--kernel", "route", "--output", path, "--json")
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["timed"] is False and result["output"] == str(path)
    assert result["tiles"] == json.loads(path.read_text())
    _, out, _ = run("bench", "tune", "--arch", "sm_80", "--kernel", "route", "--output", path)
    assert "no sm_80 GPU here to time them" in " ".join(out.split())
