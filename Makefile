# Every target works on a fresh machine: it makes .venv where there is none and installs into it.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed-from-pyproject

.PHONY: demo deployment test lint format wheel docs clean

demo: $(READY)
	$(BIN)/python -m simulations.demo

deployment: $(READY)
	$(BIN)/python -m simulations.deployment

test: $(READY)
	$(BIN)/python -m pytest

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

# Notebooks are shown with the outputs of the tests' last run of them.
docs: $(READY) $(addprefix build/,$(wildcard notebooks/*.ipynb))
	$(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going -b html -c notebooks . build/docs

build/notebooks/%.ipynb: notebooks/%.ipynb | $(READY)
	$(BIN)/python -m pytest tests/test_notebooks.py -k $*

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache

# Installs again when pyproject.toml has changed since; pip learnt `--group` in 25.1.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --editable '.[simulation]' --group dev
	touch $@
