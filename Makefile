# Set up and run: each target needs only git, make and Python 3.11 or newer.
PYTHON ?= $(firstword $(shell command -v python3.11 python3.12 python3.13 python3 2>/dev/null))
BIN := .venv/bin

.PHONY: train test lint
train: .venv/installed
	$(BIN)/python -m scripts.train tiny

test: .venv/installed
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check .

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
