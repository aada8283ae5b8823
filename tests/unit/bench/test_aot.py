"""What the ahead-of-time gate compiles and how it judges; the compiling itself is in tests/aot."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from lumina_ft.bench import aot
from lumina_ft.bench.kernel_cases import TRITON, Sizes, kernel_cases, route_case
from lumina_ft.errors import ConfigError
from lumina_ft.kernels.aot import (
    SHARED_LIMIT,
    Argument,
    Compilation,
    Compiler,
    Resources,
    Verdict,
    compiler,
    problems,
    record,
)
from lumina_ft.kernels.launch import record_launches
from lumina_ft.kernels.tiles import Tile

FINE = Resources(
    registers=255,
    stack_bytes=0,
    spill_bytes=0,
    shared_bytes=100_000,
    half_dots=2,
    fma_dots=0,
    wgmma=8,
    mma=0,
    serialized=False,
    async_copies=20,
)
SMALL = Sizes(tokens=32, hidden=64, width=32, experts=8, top_k=2, rank=4, groups=4, kept_groups=2, samples=2)


@pytest.mark.parametrize(
    ("change", "architecture", "expected"),
    [
        ({}, "sm_90", ()),
        ({"spill_bytes": 8}, "sm_90", ("spills 8 bytes",)),
        ({"stack_bytes": 16}, "sm_90", ("keeps 16 bytes on a stack",)),
        ({"shared_bytes": 227 * 1024}, "sm_90", ()),
        ({"shared_bytes": 163 * 1024 + 1, "mma": 4}, "sm_80", ("needs 166913 bytes of shared memory of 166912",)),
        ({"fma_dots": 1}, "sm_90", ("1 matrix products without tensor cores",)),
        ({"wgmma": 0, "mma": 4}, "sm_90", ("no wgmma instruction",)),
        ({"wgmma": 0, "mma": 4}, "sm_80", ()),
        ({"wgmma": 0}, "sm_80", ("no tensor-core instruction",)),
        ({"wgmma": 0, "half_dots": 0}, "sm_90", ()),
        ({"serialized": True}, "sm_90", ("wgmma instructions wait for each other",)),
    ],
)
def test_verdicts_name_what_is_wrong(change: dict[str, Any], architecture: str, expected: tuple[str, ...]) -> None:
    assert problems(FINE._replace(**change), architecture) == expected


def test_limits_are_those_of_the_architectures() -> None:
    assert SHARED_LIMIT == {"sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90": 232448}
    assert aot.tiled_architectures() == ("sm_80", "sm_90")


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (32, 64, True),
        (33, 65, True),
        (32, 33, False),
        (32, 1, False),
        (2**31 - 17, 2**33 + 7, False),
        (0.1, 2.5, True),
        (True, 1, False),
        (torch.empty(4, device="meta"), torch.empty(64, device="meta"), True),
        (torch.empty(4, device="meta"), torch.empty(64, device="meta")[1:], False),
        (torch.empty(4, device="meta"), torch.empty(4, device="meta", dtype=torch.bfloat16), False),
    ],
)
def test_arguments_are_alike_if_they_compile_alike(one: Any, other: Any, alike: bool) -> None:
    assert (Argument.of(one) == Argument.of(other)) == alike
    for value in (one, other):
        assert Argument.of(Argument.of(value).stand_in()) == Argument.of(value)


def test_recording_runs_the_bodies_of_both_directions_and_names_each_kernel_once() -> None:
    run = route_case(SMALL, groups=4, bias=True).prepare(aot.META, TRITON)
    found = record(lambda: (run(), run()), "sm_90")
    assert [compilation.name for compilation in found] == ["route", "route_backward"]
    assert found[0].kernel().fn.__name__ == found[0].function


def test_an_override_decides_the_tile_that_is_compiled() -> None:
    tile = Tile({"BLOCK_M": 2}, num_warps=2, num_stages=1)
    found = aot.compilations([route_case(SMALL, groups=4, bias=True)], "sm_80", {("route", "float32"): tile})
    assert [c.tile() for c in found["route", "float32"]] == [{"BLOCK_M": 2, "num_warps": 2, "num_stages": 1}]
    assert found["route_backward", "float32"][0].tile()["BLOCK_M"] != 2


def test_recording_starts_no_kernel_and_ends_with_its_block() -> None:
    with record_launches("sm_90") as launches:
        pass
    assert launches == []


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_cases_need_every_tile_that_ships(architecture: str) -> None:
    assert aot.unused_tiles(architecture, aot.compilations(kernel_cases(SMALL), architecture)) == []


class CountingPool:
    """Compiles nothing, in this process."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []

    def map(self, _: object, jobs: list[Any]) -> list[Verdict]:
        self.jobs += jobs
        return [Verdict(*job, FINE, ()) for job in jobs]


def test_what_was_compiled_once_is_not_compiled_again(tmp_path: Path) -> None:
    found = aot.compilations([route_case(SMALL, groups=4, bias=True)], "sm_90")
    jobs = [(compilation, "sm_90") for some in found.values() for compilation in some]
    first, second = CountingPool(), CountingPool()
    verdicts = Compiler(cast(Any, first), tmp_path).judge([*jobs, *jobs])
    assert [(v.compilation, v.architecture) for v in verdicts] == [*jobs, *jobs] and first.jobs == jobs
    other = jobs[0][0]._replace(num_warps=16), "sm_90"
    assert Compiler(cast(Any, second), tmp_path).judge([*jobs, other])[:2] == verdicts[:2]
    assert second.jobs == [other]


def test_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match="TRITON_INTERPRET — 1 — the interpreter compiles nothing"), compiler():
        pass


def test_the_report_lists_problems_and_tiles_that_nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Compilation("route", "float32", "m", "f", (), (("BLOCK_M", 4), ("TOP_K", 2)), 4, 1)
    verdict = Verdict(bad, "sm_90", FINE, ("spills 8 bytes",))
    monkeypatch.setattr(aot, "gate", lambda *_: [verdict])
    monkeypatch.setattr(aot, "unused_tiles", lambda *_: ["moe_down bfloat16"])
    result = aot.bench_aot(["sm_90"])
    assert result["problems"] == [
        "sm_90 route float32 4 w4 s1: spills 8 bytes",
        "sm_90 moe_down bfloat16: no case compiles it",
    ]
    assert result["kernels"][0]["constants"] == {"TOP_K": 2}
    assert result["kernels"][0]["registers"] == 255


@pytest.mark.parametrize(("found", "code"), [(("spills 8 bytes",), 1), ((), 0)])
def test_the_command_fails_if_there_are_problems(
    monkeypatch: pytest.MonkeyPatch, run: Any, found: tuple[str, ...], code: int
) -> None:
    good = Compilation("route", "float32", "m", "f", (), (("BLOCK_M", 4),), 4, 1)
    monkeypatch.setattr(aot, "gate", lambda *_: [Verdict(good, "sm_90", FINE, found)])
    monkeypatch.setattr(aot, "unused_tiles", lambda *_: [])
    result, out, err = run("bench", "aot", "--arch", "sm_90")
    assert result == code
    assert ("error: bench aot: sm_90 route float32 4 w4 s1: spills 8 bytes" in err) == (code == 1)
    assert "1 kernels" in out and "Traceback" not in err


def test_an_architecture_without_tiles_is_refused(run: Any) -> None:
    code, _, err = run("bench", "aot", "--arch", "sm_91")
    assert code == 2 and "error: --arch — 'sm_91' — must be one of sm_80, sm_90; did you mean 'sm_90'?" in err
