# The commands of the README. VENV=... puts the environment elsewhere; PIP="uv pip" installs by uv. Versions are those of
# requirements-lock.txt, so that the commands do the same next year; CONSTRAINTS= takes any that pyproject.toml allows.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
PIP ?= $(BIN)/python -m pip
CONSTRAINTS ?= -c requirements-lock.txt
PYTEST = $(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=worksteal

# uv finds the environment by VIRTUAL_ENV, which pip ignores.
INSTALL = PIP_DISABLE_PIP_VERSION_CHECK=1 VIRTUAL_ENV=$(abspath $(VENV)) $(PIP) install --quiet $(CONSTRAINTS) --editable
BOARD = $(BIN)/python scripts/enter.py

.PHONY: train demo walk board test test-fast mutants lint clean

# Texts of a Markov chain each: a minute shows a loss that falls with context, the best possible one, and what breaks.
train: ARGS ?= data=markov
train: $(VENV)/installed
	$(BIN)/python train.py $(ARGS)

# A small RoPE model, read further than it was trained.
demo: $(VENV)/installed
	$(BIN)/python train.py experiment=demo $(ARGS)

walk: $(VENV)/installed
	PYTHON=$(abspath $(BIN))/python bash docs/walk.sh $(ARGS)

# Judge an entry, PE=board/DATE-NAME, and write docs/board.md anew; without PE all entries. The same command resumes.
# Seeds are drawn from the commit of an entry; COMMIT= takes another, as for first rows that share the runs of RoPE.
board: $(VENV)/installed
	for entry in $(or $(PE),$(sort $(wildcard board/*))); do $(BOARD) entry=$$entry $(if $(COMMIT),commit=$(COMMIT)) || exit; done

# Everything but the tests marked slow; they run with ARGS="-m slow".
test: $(VENV)/installed
	$(PYTEST) $(ARGS)

# What is edited most, in about a minute on two idle cores: the network with every encoding, the data, the statistics.
# Without compilers, measurements of memory and transformers, which take most of the time of `make test`.
test-fast: $(VENV)/installed
	$(PYTEST) -m "not slow and not long" $(ARGS)

# Which changes of the code no test notices. ARGS="--seeds 2 3 --number 30 data": folders that tests/ mirrors.
mutants: $(VENV)/installed
	$(INSTALL) ".[dev]"
	$(BIN)/python tests/mutants.py $(ARGS)

lint: $(VENV)/installed
	$(INSTALL) ".[dev]"
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

$(VENV)/installed: pyproject.toml requirements-lock.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is %d.%d: name one, as in make train PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo "installing PyTorch and what else is needed into $(VENV): gigabytes, which takes minutes"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) ".[test]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
