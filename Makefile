# Everything that CI does has a name here, and is the same everywhere.
# A fresh machine needs Python 3.11 or newer and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help demo test lint bench clean

help:
	@echo "make demo   train a small model and follow it with two rollouts; about a minute"
	@echo "make test   the whole test suite"
	@echo "make lint   ruff and mypy"
	@echo "make bench  transfer speeds beside what people use today"

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	    --editable '.[local,demo,bench,test,lint]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python examples/fsdp2_to_rollouts.py

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python benchmarks/transfer.py

clean:
	rm -rf $(VENV)
