# make run: set up, then the main job on the embedded real model · make test: set up, then the checks
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test check test-gpu test-slow clean

run: $(STAMP)
	$(BIN)/python -m sparse_eval experiment=quickstart

test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: $(STAMP)
	$(BIN)/ruff format --check sparse_eval/ policies kernels tests examples
	$(BIN)/ruff check sparse_eval/ policies kernels tests examples
	$(BIN)/mypy sparse_eval tests

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

$(STAMP): pyproject.toml
	@echo "installing torch and the rest into $(VENV): a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
