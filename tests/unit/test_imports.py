"""The architecture, read from the source: import direction, library borders, sizes (style §2, §3)."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lumina_ft"

LAYERS = (
    ("__init__", "errors", "tokens", "batch"),
    ("config",),
    ("kernels", "data", "parallel", "monitor", "stages"),
    ("models",),
    ("adapters",),
    ("checkpoint",),
    ("train",),
    ("generate", "sample", "bench", "plan", "merge_lora"),
    ("launch",),
    ("demo",),
    ("commands",),
    ("app",),
    ("__main__",),
)
"""Imports point to an earlier row. Members of the wide rows don't import each other."""

ALLOWED_SIBLINGS = {
    ("sample", "generate"): "sampling is the command around generation",
    ("tokens", "errors"): "the contracts are one row",
    ("batch", "tokens"): "the contracts are one row",
    ("batch", "errors"): "the contracts are one row",
}

BORDERS = {
    "deepspeed": ("parallel/",),
    "datasets": ("data/",),
    "peft": ("adapters/",),
    "optuna": ("sweep.py",),
    "triton": ("kernels/*/kernel*.py", "kernels/aot.py"),
    "liger_kernel": ("kernels/cross_entropy/liger.py", "bench/kernels/"),
}
"""Libraries that only some files may import."""

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_TRAIN_LOOP_LINES = 120


@cache
def modules() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def unit(path: Path) -> str:
    """The part of the package that a file belongs to: its folder or its module."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import, those inside functions included."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module
            yield node.lineno, node.module
            # `from lumina_ft import x` may name a module.
            if node.module == "lumina_ft":
                yield from ((node.lineno, f"lumina_ft.{alias.name}") for alias in node.names)


def rank(name: str) -> int:
    return next(index for index, layer in enumerate(LAYERS) if name in layer)


def test_every_part_of_the_package_has_a_place() -> None:
    assert {unit(path) for path in modules()} <= {name for layer in LAYERS for name in layer}


def test_imports_point_to_earlier_layers_only() -> None:
    wrong = []
    for path in modules():
        own = unit(path)
        for line, module in imported(path):
            parts = module.split(".")
            if parts[0] != "lumina_ft" or len(parts) == 1 or parts[1].startswith("__version__"):
                continue
            other = parts[1]
            if other == own or (own, other) in ALLOWED_SIBLINGS:
                continue
            if rank(other) >= rank(own):
                wrong.append(f"{path.relative_to(ROOT)}:{line} {own} imports {other}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("library", sorted(BORDERS))
def test_library_borders(library: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules()
        for line, module in imported(path)
        if module.split(".")[0] == library
        and not any(
            path.relative_to(PACKAGE).as_posix().startswith(place) or path.relative_to(PACKAGE).match(place)
            for place in BORDERS[library]
        )
    ]
    assert not wrong, f"{library} is imported outside {BORDERS[library]}: {wrong}"


def test_triton_files_hold_kernels_only_and_are_loaded_when_called() -> None:
    """A machine without a GPU imports the wrappers, not Triton; and a kernel's file has no tensor code to hide in."""
    triton_files = {path for path in modules() if path.relative_to(PACKAGE).match("kernels/*/kernel*.py")}
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in triton_files}
    assert names, "no kernels found"
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports torch"
        for path in triton_files
        for line, module in imported(path)
        if module.split(".")[0] == "torch"
    ]
    for path in set(modules()) - triton_files - {PACKAGE / "kernels" / "aot.py"}:
        for node in tree(path).body:
            if isinstance(node, ast.Import):
                loaded = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                loaded = {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
            else:
                continue
            wrong += [f"{path.relative_to(ROOT)}:{node.lineno} imports {name}" for name in sorted(loaded & names)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_and_functions_stay_small(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_MODULE_LINES, f"{lines} lines"
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            limit = MAX_TRAIN_LOOP_LINES if node.name == "train_loop" else MAX_FUNCTION_LINES
            # The length of a docstring is no complexity.
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            doc = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
            length -= (doc.end_lineno or doc.lineno) - doc.lineno + 1 if doc else 0
            assert length <= limit, f"{node.name}: {length} lines"


def test_no_module_is_called_utils_or_shadows_a_library() -> None:
    names = {path.stem for path in modules()}
    assert not names & {"utils", "helpers", "misc", "common", "triton", "torch", "deepspeed"}
    assert not (ROOT / "datasets" / "__init__.py").exists(), "the folder would shadow the library"


def test_the_datasets_folder_does_not_hide_the_library() -> None:
    """Without __init__.py an installed `datasets` wins, even from the repository root."""
    code = "import datasets; print(datasets.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "site-packages" in done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["sft", "--help"], ["data", "build", "--help"], ["--version"]])
def test_help_imports_no_heavy_library(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from lumina_ft.app import main\n"
        f"sys.argv = ['lumina-ft', *{arguments!r}]\n"
        "try:\n    main()\n"
        "finally:\n"
        "    heavy = {'torch', 'numpy', 'deepspeed', 'transformers', 'datasets', 'matplotlib', 'PIL'}\n"
        "    sys.stderr.write('loaded: ' + ' '.join(sorted(heavy & set(sys.modules))) + '\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "loaded: "
    assert "Usage" in done.stdout or done.stdout.startswith("lumina-ft ")
