# Set up and run: each target needs only git, make and Python 3.11 or newer.
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,\
	$(shell $(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
BIN := .venv/bin

.PHONY: train test lint
train: .venv/installed
	$(BIN)/python -m scripts.train tiny --run.resume

test: .venv/installed
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check .

.venv/installed: pyproject.toml
	$(if $(PYTHON),,$(error Python 3.11 or newer was not found; name one: make PYTHON=/path/to/python $(MAKECMDGOALS)))
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
