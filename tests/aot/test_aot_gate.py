"""The ahead-of-time gate: compiles every Triton kernel for GPUs that this machine need not have."""

from collections.abc import Iterator

import pytest

from lumina_ft.bench.aot import Key, compilations, describe, gate, unused_tiles
from lumina_ft.bench.kernel_cases import Case, kernel_cases
from lumina_ft.kernels.aot import Compiler, Verdict, compiler
from lumina_ft.kernels.tiles import Tile

pytestmark = [pytest.mark.aot, pytest.mark.slow]

ARCHITECTURES = ("sm_80", "sm_90")
CASES = kernel_cases()


@pytest.fixture(scope="module")
def compile_with() -> Iterator[Compiler]:
    with compiler() as processes:
        yield processes


@pytest.fixture(scope="module")
def verdicts(compile_with: Compiler) -> list[Verdict]:
    return gate(compile_with, ARCHITECTURES, CASES)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shipped_kernels_spill_nothing_fit_and_use_tensor_cores(verdicts: list[Verdict], architecture: str) -> None:
    wrong = [
        f"{describe(verdict)}: {', '.join(verdict.problems)}"
        for verdict in verdicts
        if verdict.architecture == architecture and verdict.problems
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tile_of_the_file_was_compiled(verdicts: list[Verdict], architecture: str) -> None:
    used = [(v.compilation.name, v.compilation.variant) for v in verdicts if v.architecture == architecture]
    assert unused_tiles(architecture, used) == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_with_half_precision_products_load_while_they_compute(
    verdicts: list[Verdict], architecture: str
) -> None:
    """A loop over products whose loads aren't asynchronous waits for memory in every round."""
    waiting = [
        describe(verdict)
        for verdict in verdicts
        if verdict.architecture == architecture
        and verdict.resources is not None
        and verdict.resources.half_dots
        and not verdict.resources.async_copies
    ]
    assert not waiting, "\n".join(waiting)


def _planted(compile_with: Compiler, case: str, key: Key, tile: Tile, architecture: str) -> set[str]:
    """Problems of one kernel with a tile that nobody should ship."""
    cases: list[Case] = [c for c in CASES if c.name == case]
    found = compilations(cases, architecture, {key: tile})[key]
    return {text for verdict in compile_with.judge([(c, architecture) for c in found]) for text in verdict.problems}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tile_that_spills_is_refused(compile_with: Compiler, architecture: str) -> None:
    tile = Tile({"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 32}, num_warps=4, num_stages=2)
    problems = _planted(compile_with, "experts frozen bfloat16", ("moe_down", "bfloat16"), tile, architecture)
    assert any(text.startswith("spills") for text in problems), problems


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tile_that_overflows_shared_memory_is_refused(compile_with: Compiler, architecture: str) -> None:
    tile = Tile({"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64}, num_warps=8, num_stages=6)
    problems = _planted(compile_with, "experts frozen bfloat16", ("moe_down", "bfloat16"), tile, architecture)
    assert any("shared memory" in text for text in problems), problems


def test_a_tile_too_low_for_hopper_tensor_cores_is_refused(compile_with: Compiler) -> None:
    tile = Tile({"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 32}, num_warps=4, num_stages=2)
    problems = _planted(compile_with, "experts frozen bfloat16", ("moe_down", "bfloat16"), tile, "sm_90")
    assert problems == {"no wgmma instruction"}
