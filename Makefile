# Every target works on a fresh machine: it makes .venv where there is none and installs into it.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed-from-pyproject
# A process per core, four at most, as each takes about a GB; tests of one xdist_group share one.
PYTEST := $(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist loadgroup

# Where an image sets it, each process that a test starts would compile PyTorch's modules anew: 4 s more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo deployment test test-all test-data lint format wheel release-check docs clean

demo: $(READY)
	$(BIN)/python -m simulations.lab.demo

deployment: $(READY)
	$(BIN)/python -m simulations.lab.deployment

# Those of one file share a process, and what it has computed.
test: $(READY)
	$(PYTEST) --dist loadfile -m 'not slow' --junitxml build/tests/quick.xml

# Much of the slow tests' time is waits, so one process more than there are cores.
test-all: test
	$(PYTEST) --numprocesses $$($(BIN)/python -c 'import os; print(os.cpu_count() + 1)') -m 'slow and not release' --junitxml build/tests/slow.xml

# The tests that read real data sets from FL_DATA, or from ../shared/datasets, or else run on stand-ins.
test-data: $(READY)
	$(PYTEST) -m data

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(READY)
	rm -rf dist
	$(BIN)/python -m build --wheel

# What a release holds, and what is too long for each commit. A browser opens every page. PUBLIC=--public: for an index.
release-check: PAGES := all
release-check: wheel docs
	$(BIN)/python .ci/release-check $(PUBLIC)
	.ci/pythons all
	$(BIN)/python tests/trajectories.py
	$(PYTEST) -m release

# Notebooks are shown with the outputs of the tests' last run of them. Where there is a Chromium it opens ten pages.
PAGES := 10
docs: $(READY) $(addprefix build/,$(wildcard notebooks/*.ipynb))
	$(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going -b html -c notebooks . build/docs
	$(BIN)/python notebooks/browse.py build/docs $(PAGES)

build/notebooks/%.ipynb: notebooks/%.ipynb | $(READY)
	$(BIN)/python -m pytest tests/test_notebooks.py -k $*

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache

# Installs again when pyproject.toml has changed since; pip learnt `--group` in 25.1. Compiling all modules would take a
# minute; Python compiles those that are imported.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --no-compile --editable '.[simulation]' --group dev
	touch $@
