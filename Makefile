# make demo | test | test-all | lint | docs | fuzz: on a machine with Python 3.11 or newer (with venv) and nothing else.
# The first call builds .venv from the pinned packages of requirements.txt; later ones start at once.

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

SEED ?= 0
COUNT ?= 50000

.PHONY: demo test test-all lint docs fuzz clean

demo: $(READY)
	@$(BIN)/kvfold demo

# One thread per worker: two pools of threads on two cores are slower than either.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow and not thorough" -n $(JOBS) --durations=30

# The rest of the large matrices.
test-all: test
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "thorough and not slow" -n $(JOBS) --durations=30

# Damaged and valid requests to a server of its own; a request that fails is printed with what sends it again.
fuzz: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.serve.fuzz --seed $(SEED) --count $(COUNT)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site, into site/; a broken link or anchor fails.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(READY): requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("kvfold needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint requirements.txt torch
	$(BIN)/pip install --quiet --requirement requirements.txt
	$(BIN)/pip install --quiet --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
