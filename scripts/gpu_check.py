"""The steps of scripts/gpu_check.sh, each in a process of its own with a time limit; results in one JSON file."""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BUDGET_SECONDS = 470.0
"""Eight minutes, less what the start of this script and of its shell takes."""
_KEPT_LINES = 40
_TEST_PROCESSES = 8
"""They share the GPU's memory."""

_ENVIRONMENT = """
import importlib.metadata as m, json, platform, sys, torch
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
names = ("torch", "triton", "transformers", "numpy", "liger-kernel", "deepspeed", "datasets", "peft")
found = {"python": platform.python_version(), **{name: version(name) for name in names}, "cuda": torch.version.cuda}
if torch.cuda.is_available():
    p = torch.cuda.get_device_properties(0)
    found |= {"gpu": p.name, "gib": p.total_memory / 2**30, "capability": f"{p.major}.{p.minor}",
              "multiprocessors": p.multi_processor_count}
print(json.dumps(found))
if "gpu" not in found and "--rehearse" not in sys.argv:
    sys.exit("no CUDA device; --rehearse runs the steps in miniature on a CPU")
"""


class Step(NamedTuple):
    """One process.

    Attributes:
        name: key in the results.
        arguments: of Python.
        seconds: most that it may take.
        required: whether its failure fails the check.
        first: whether the others make no sense after its failure.
    """

    name: str
    arguments: list[str]
    seconds: float
    required: bool = True
    first: bool = False


def _bench(*arguments: str) -> list[str]:
    return ["cli.py", "bench", *arguments, "--json"]


def _tests() -> list[str]:
    """On several processes where pytest can: nearly all of the time goes into compiling kernels, which the benchmarks
    then find compiled.
    """
    workers = ["-n", str(min(_TEST_PROCESSES, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") else []
    return ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *workers, "tests/gpu"]


def real_steps() -> list[Step]:
    """What matters most comes first: the budget may end."""
    kernels = ("kernels", "--size", "real", "--operation")
    return [
        Step("environment", ["-c", _ENVIRONMENT], 30, first=True),
        Step("tests", _tests(), 150),
        Step("moe", _bench(*kernels, "moe", "--skip", "liger"), 90),
        Step("attention", _bench(*kernels, "attention", "--skip", "flex"), 60),
        Step("training steps", _bench("step", "--case", "real", "--steps", "10"), 90),
        Step("router and loss", _bench(*kernels, "router", "--operation", "cross-entropy"), 60),
        # These compile or tune themselves first, for up to a minute each.
        Step("attention peers", _bench(*kernels, "attention", "--skip", "sdpa", "--skip", "torch"), 90, required=False),
        Step("moe peers", _bench(*kernels, "moe", "--skip", "eager", "--skip", "bmm"), 120, required=False),
    ]


def miniature_steps() -> list[Step]:
    """The same processes on a CPU, which may be a busy one."""
    kernels = ("kernels", "--size", "tiny", "--seconds", "0", "--operation")
    return [
        Step("environment", ["-c", _ENVIRONMENT, "--rehearse"], 300, first=True),
        Step("tests", _tests(), 600),
        Step("moe", _bench(*kernels, "moe", "--skip", "liger"), 300),
        Step("attention", _bench(*kernels, "attention", "--skip", "flex"), 300),
        Step("training steps", _bench("step", "--case", "tiny", "--steps", "2"), 300),
        Step("router and loss", _bench(*kernels, "router", "--operation", "cross-entropy"), 300),
    ]


def run_step(step: Step, seconds: float) -> dict[str, Any]:
    """Run one process to its end or its limit.

    Args:
        seconds: that are left for it.

    Returns:
        `exit` (None after the limit), `seconds`, `result` (of the last line of stdout, if that is JSON), and the end of
        what it wrote, if it failed or gave no result.
    """
    print(f"gpu_check: {step.name}", file=sys.stderr, flush=True)
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *step.arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        # Its children too: pytest's workers and compilers hold the pipes.
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        code = None
    found: dict[str, Any] = {"exit": code, "seconds": round(time.monotonic() - start, 1), "limit": round(seconds, 1)}
    last = (out.rstrip().splitlines() or [""])[-1]
    try:
        found["result"] = json.loads(last)
    except json.JSONDecodeError:
        found["stdout"] = out.splitlines()[-_KEPT_LINES:]
    if code != 0:
        found["stderr"] = err.splitlines()[-_KEPT_LINES:]
    return found


def run_steps(steps: list[Step], output: Path, budget: float) -> bool:
    """Run steps while the budget lasts; the file is whole after each. Whether all required ones passed."""
    start = time.monotonic()
    results: dict[str, Any] = {}
    passed = True
    for step in steps:
        left = budget - (time.monotonic() - start)
        results[step.name] = (
            run_step(step, min(step.seconds, left)) if left > 1 else {"exit": None, "left out": "budget"}
        )
        passed &= results[step.name]["exit"] == 0 or not step.required
        content = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - time.monotonic() + start)),
            "seconds": round(time.monotonic() - start, 1),
            "passed": passed,
            "steps": results,
        }
        written = output.with_suffix(".tmp")
        written.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        written.replace(output)
        if step.first and not passed:
            break
    return passed


def main() -> None:
    """See scripts/gpu_check.sh."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh")
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    if options.rehearse:
        # No GPU is looked for, so that the kernels are interpreted.
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    steps = miniature_steps() if options.rehearse else real_steps()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    passed = run_steps(steps, options.output, float("inf") if options.rehearse else BUDGET_SECONDS)
    results = json.loads(options.output.read_text(encoding="utf-8"))
    summary = {name: [step["exit"], step.get("seconds")] for name, step in results["steps"].items()}
    print(
        json.dumps({"output": str(options.output), "passed": passed, "seconds": results["seconds"], "steps": summary})
    )
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
