# The two commands of the README. VENV=... puts the environment elsewhere.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin

.PHONY: train walk test lint clean

train: $(VENV)/installed
	$(BIN)/python train.py $(ARGS)

walk: $(VENV)/installed
	PYTHON=$(abspath $(BIN))/python bash docs/walk.sh $(ARGS)

test: $(VENV)/installed
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=worksteal $(ARGS)

lint: $(VENV)/installed
	$(BIN)/pip install --quiet --editable ".[dev]"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is %d.%d: name one, as in make train PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
