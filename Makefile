# Everything starts from a machine with Python 3.11 or newer: the first target that needs it builds .venv.
#
#   make demo         train, adapt, merge, sample and judge a small model on handwritten digits (out/demo)
#   make test         ruff, pyright, and every test that is neither slow nor for a GPU
#   make lint         ruff and pyright only
#   make interpreter  the part of `make test` that interprets Triton kernels, in a process of its own
#   make aot          compile every Triton kernel for sm_80 and sm_90, without a GPU
#   make bench        routed experts: one grouped operation against a loop
#
# TORCH_INDEX=URL takes torch from another package index, for example one with CPU builds.

PYTHON ?= python3
BIN := .venv/bin
# The content decides, not the date: a checkout changes dates.
READY := .venv/.ready-$(shell cksum < pyproject.toml | cut -d' ' -f1)
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input

.PHONY: demo test lint interpreter aot bench setup clean

demo: $(READY)
	@$(BIN)/lumina-ft demo --output out/demo --json

# Neither lint nor interpreted kernels mind company; the tests of hangs, signals and kills do.
test: $(READY)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint interpreter
	@$(BIN)/python -m pytest -q -m "not slow and not gpu"

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/pyright --warnings

# Triton reads the variable when it is imported.
interpreter: $(READY)
	@TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow" tests/interpreter

aot: $(READY)
	@$(BIN)/python -m pytest -q -m aot tests/aot

bench: $(READY)
	@$(BIN)/lumina-ft bench moe --json

setup: $(READY)

$(READY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lumina-ft needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	@echo "setting up .venv (a few minutes the first time)" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) "torch==2.13.0" $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	@$(PIP) --editable ".[dev]"
	@rm -f .venv/.ready-*
	@touch $@

clean:
	rm -rf .venv out build dist .pytest_cache .ruff_cache .hypothesis
