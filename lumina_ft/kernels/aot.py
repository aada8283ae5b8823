"""Compile recorded launches for a GPU that isn't there, and judge what the compiler made of them.

A launch is compiled exactly as it would run: Triton's own start-up code specialises the arguments (dtypes, alignment,
constants), on a driver that only names the GPU. The limits that decide whether a kernel is fast are known after that:
registers spilled to memory, shared memory, tensor-core instructions.
"""

import contextlib
import hashlib
import importlib
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from lumina_ft.errors import ConfigError
from lumina_ft.kernels.launch import Launch, compile_options, record_launches
from lumina_ft.kernels.tiles import Tile

CAPABILITY = {"sm_80": 80, "sm_86": 86, "sm_89": 89, "sm_90": 90}
"""Architectures that kernels can be compiled and tiles be chosen for, as the compiler calls them."""

SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_86": 99 * 1024, "sm_89": 99 * 1024, "sm_90": 227 * 1024}
"""Shared memory that one program may use, in bytes (CUDA C++ programming guide, table of compute capabilities)."""

_HALF_DOT = re.compile(r"tt\.dot\b[^\n]*: tensor<\d+x\d+x(?:bf16|f16)\b")
_LOWERED_FMA_DOT = re.compile(r"tt\.dot\b[^\n]*: tensor<\d+x\d+x(?:bf16|f16), #ttg\.dot_op<\{[^}]*parent = #blocked")
_REGISTERS = re.compile(r"Used (\d+) registers")
_MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


class Argument(NamedTuple):
    """What compilation sees of an argument.

    Attributes:
        kind: name of its Python type. True and 1 are equal, and compile to different code.
        dtype: of a tensor, else None.
        aligned: the tensor's memory starts at a multiple of 16 bytes.
        value: of an argument that is no tensor; numbers stand for all that compile alike.
    """

    kind: str
    dtype: torch.dtype | None = None
    aligned: bool = False
    value: int | float | bool | None = None

    @classmethod
    def of(cls, arg: Any) -> "Argument":
        """The class of an argument of a launch."""
        kind = type(arg).__name__
        if isinstance(arg, Tensor):
            return cls("Tensor", arg.dtype, arg.data_ptr() % 16 == 0)
        if isinstance(arg, float):
            return cls(kind, value=0.5)
        if isinstance(arg, int) and not isinstance(arg, bool) and arg != 1:
            return cls(kind, value=(0 if abs(arg) < 2**31 else 2**40) + (16 if arg % 16 == 0 else 17))
        return cls(kind, value=arg)

    def stand_in(self) -> Any:
        """An argument that compiles alike."""
        if self.dtype is None:
            return self.value
        return torch.empty(32, dtype=self.dtype, device="meta")[0 if self.aligned else 1 :]


class Compilation(NamedTuple):
    """All that a compiled kernel depends on; equal ones compile to the same code.

    Attributes:
        name, variant: of the launch, see `launch.Launch`.
        module, function: where the kernel is defined.
        constants: constexpr parameters, sorted by name.
    """

    name: str
    variant: str
    module: str
    function: str
    arguments: tuple[Argument, ...]
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, launch: Launch) -> "Compilation":
        """What to compile for a launch."""
        return cls(
            launch.name,
            launch.variant,
            launch.kernel.fn.__module__,
            launch.kernel.fn.__name__,
            tuple(map(Argument.of, launch.args)),
            tuple(sorted(launch.constants.items())),
            launch.tile.num_warps,
            launch.tile.num_stages,
        )

    def kernel(self) -> Any:
        """The `triton.jit` function."""
        return getattr(importlib.import_module(self.module), self.function)

    def tile(self) -> dict[str, int]:
        """The tile as its file would hold it."""
        blocks = {name: value for name, value in self.constants if name.startswith("BLOCK_")}
        return {**blocks, "num_warps": self.num_warps, "num_stages": self.num_stages}


class Resources(NamedTuple):
    """What a compiled kernel uses.

    Attributes:
        registers: per thread.
        stack_bytes, spill_bytes: local memory per thread; reads and writes of spilled registers.
        shared_bytes: per program.
        half_dots, fma_dots: 16-bit matrix products in the source, and those of them left to scalar instructions.
        wgmma, mma: tensor-core instructions of Hopper, and of Ampere.
        serialized: the assembler made asynchronous tensor-core instructions wait for each other.
        async_copies: instructions that load shared memory while the program computes.
    """

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    half_dots: int
    fma_dots: int
    wgmma: int
    mma: int
    serialized: bool
    async_copies: int


class Verdict(NamedTuple):
    """A compilation and what came of it.

    Attributes:
        resources: None if it doesn't compile.
        problems: why it must not ship; empty if it may.
    """

    compilation: Compilation
    architecture: str
    resources: Resources | None
    problems: tuple[str, ...]

    def row(self) -> dict[str, Any]:
        """The verdict for a report."""
        constants = {name: value for name, value in self.compilation.constants if not name.startswith("BLOCK_")}
        return {
            "kernel": self.compilation.name,
            "variant": self.compilation.variant,
            "architecture": self.architecture,
            "tile": self.compilation.tile(),
            "constants": constants,
            **(self.resources._asdict() if self.resources else {}),
            "problems": list(self.problems),
        }


def problems(resources: Resources, architecture: str) -> tuple[str, ...]:
    """Why a kernel must not ship for an architecture."""
    limit = SHARED_LIMIT[architecture]
    checks = (
        (resources.spill_bytes > 0, f"spills {resources.spill_bytes} bytes"),
        (resources.stack_bytes > 0, f"keeps {resources.stack_bytes} bytes on a stack"),
        (resources.shared_bytes > limit, f"needs {resources.shared_bytes} bytes of shared memory of {limit}"),
        (resources.fma_dots > 0, f"{resources.fma_dots} matrix products without tensor cores"),
        (resources.half_dots > 0 and resources.wgmma + resources.mma == 0, "no tensor-core instruction"),
        (
            architecture == "sm_90" and resources.half_dots > 0 and resources.wgmma == 0,
            "no wgmma instruction",
        ),
        (resources.serialized, "wgmma instructions wait for each other"),
    )
    return tuple(text for failed, text in checks if failed)


class _Bodies(TorchDispatchMode):
    """Runs the bodies of this package's operators on meta tensors, where torch would run their fake implementations."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "lumina_ft":
            return func(*args, **kwargs)
        body = torch.library.get_kernel(func, "CPU")
        return body.call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)


def record(
    call: Callable[[], object], architecture: str, override: dict[tuple[str, str], Tile] | None = None
) -> list[Compilation]:
    """What a call of operators would compile, each once.

    Args:
        call: runs operators, backward passes included, on meta tensors.
        architecture, override: see `launch.record_launches`.
    """
    with record_launches(architecture, override) as launches, _Bodies():
        call()
    return list(dict.fromkeys(map(Compilation.of, launches)))


class _NamedGpu:
    """A driver for kernels that are compiled and not run.

    The device number is the capability: Triton keeps what it compiled for one device from another.
    """

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_kernel(compilation: Compilation, architecture: str) -> Resources:
    """Compile in this process, whose Triton can't run kernels any more afterwards: see `Compiler`."""
    driver.set_active(_NamedGpu(CAPABILITY[architecture]))  # pyright: ignore[reportArgumentType]
    knobs.nvidia.dump_ptxas_log = True
    knobs.compilation.always_compile = True
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        built = compilation.kernel().warmup(
            *(argument.stand_in() for argument in compilation.arguments),
            **dict(compilation.constants),
            **compile_options(compilation.num_warps, compilation.num_stages),
            grid=(1,),
        )
    registers = _REGISTERS.search(log.getvalue())
    memory = _MEMORY.search(log.getvalue())
    assert registers and memory, log.getvalue()
    stack, stores, loads = map(int, memory.groups())
    return Resources(
        registers=int(registers.group(1)),
        stack_bytes=stack,
        spill_bytes=stores + loads,
        shared_bytes=built.metadata.shared,
        half_dots=len(_HALF_DOT.findall(built.asm["ttir"])),
        fma_dots=len(_LOWERED_FMA_DOT.findall(built.asm["ttgir"])),
        wgmma=built.asm["ptx"].count("wgmma.mma_async"),
        mma=built.asm["ptx"].count("mma.sync.aligned"),
        serialized="instructions are serialized" in log.getvalue(),
        async_copies=built.asm["ptx"].count("cp.async.c"),
    )


def _start_worker(folder: str) -> None:
    knobs.cache.dir = folder


def _judge(job: tuple[Compilation, str]) -> Verdict:
    compilation, architecture = job
    try:
        resources = compile_kernel(compilation, architecture)
    # Whatever a compiler raises is a verdict on the kernel.
    except Exception as error:
        reason = str(error).strip().splitlines() or [""]
        return Verdict(compilation, architecture, None, (f"does not compile: {type(error).__name__}: {reason[-1]}",))
    return Verdict(compilation, architecture, resources, problems(resources, architecture))


class Compiler:
    """Processes that compile, and what they found so far.

    Args:
        pool: of processes that compile.
        results: folder where findings are kept from one run to the next, or None.
    """

    def __init__(self, pool: ProcessPoolExecutor, results: Path | None) -> None:
        self._pool = pool
        self._results = results
        self._known: dict[tuple[Compilation, str], Verdict] = {}

    def judge(self, jobs: Iterable[tuple[Compilation, str]]) -> list[Verdict]:
        """Verdicts in the order of the jobs."""
        jobs = list(jobs)
        new = [job for job in dict.fromkeys(jobs) if job not in self._known]
        for job in new:
            stored = self._stored(job)
            if stored is not None:
                self._known[job] = stored
        new = [job for job in new if job not in self._known]
        for job, verdict in zip(new, self._pool.map(_judge, new), strict=True):
            self._known[job] = verdict
            if self._results is not None and verdict.resources is not None:
                self._file(job).write_text(json.dumps(verdict.resources), encoding="utf-8")
        return [self._known[job] for job in jobs]

    def _file(self, job: tuple[Compilation, str]) -> Path:
        """The source of the kernel and of all that it calls is part of the name."""
        assert self._results is not None
        text = repr((job, job[0].kernel().cache_key, triton.__version__))
        return self._results / f"{hashlib.sha256(text.encode()).hexdigest()}.json"

    def _stored(self, job: tuple[Compilation, str]) -> Verdict | None:
        if self._results is None or not self._file(job).is_file():
            return None
        resources = Resources(*json.loads(self._file(job).read_text(encoding="utf-8")))
        return Verdict(*job, resources, problems(resources, job[1]))


@contextmanager
def compiler(results: Path | None = None, processes: int = 2) -> Iterator[Compiler]:
    """Start processes that compile.

    Args:
        results: folder that keeps findings from one run to the next; None: nothing is kept.
        processes: that compile at the same time.

    Raises:
        ConfigError: Triton's interpreter is on.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ConfigError("TRITON_INTERPRET — 1 — the interpreter compiles nothing — unset it")
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="lumina-aot-") as folder,
        ProcessPoolExecutor(processes, get_context("spawn"), _start_worker, (folder,)) as pool,
    ):
        yield Compiler(pool, results)
