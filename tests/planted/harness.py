"""Run selected tests against copies of the code that each hold one planted fault.

The expensive imports happen once in this process; every fault then gets a fork that imports the changed copy of
`lumina_ft` and runs pytest on the tests that should notice. Prints one JSON object: fault name -> pytest exit code.
"""

import json
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def plant(fault: dict, target: Path) -> None:
    """Copy the package and the tests to `target` and apply the replacements, each of which must match exactly once."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "lumina_ft", target / "lumina_ft", ignore=ignore)
    shutil.copytree(ROOT / "tests", target / "tests", ignore=shutil.ignore_patterns("__pycache__", "golden"))
    os.symlink(ROOT / "tests" / "golden", target / "tests" / "golden")
    for name in ("pyproject.toml", "ds_configs", "datasets", "cli.py", "docs"):
        os.symlink(ROOT / name, target / name)
    for file, old, new in fault["edits"]:
        path = target / file
        text = path.read_text()
        if text.count(old) != 1:
            raise SystemExit(f"{fault['name']}: {old!r} occurs {text.count(old)} times in {file}, expected 1")
        path.write_text(text.replace(old, new))


def run_child(target: Path, tests: list[str], log: Path) -> int:
    """Fork, import the copy, run its tests; returns pytest's exit code (1: some test failed, 0: fault not noticed)."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with log.open("w") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        os.chdir(target)
        sys.path.insert(0, str(target))
        os.environ["PYTHONPATH"] = str(target)
        import pytest

        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", *tests])
        import lumina_ft

        if not Path(lumina_ft.__file__).is_relative_to(target):
            code = 99
    os._exit(int(code))


def main() -> None:
    faults = json.loads(Path(sys.argv[1]).read_text())
    work = Path(sys.argv[2])
    import datasets  # noqa: F401
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    codes = {}
    for fault in faults:
        target = work / fault["name"]
        target.mkdir(parents=True)
        plant(fault, target)
        codes[fault["name"]] = run_child(target, fault["tests"], work / f"{fault['name']}.log")
        shutil.rmtree(target)
    sys.stdout.write(json.dumps(codes) + "\n")


if __name__ == "__main__":
    main()
