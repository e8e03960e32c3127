# Everything a developer or a new user calls. `make` alone lists the targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := 2.13.0
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# Stamps: set-up is repeated only when what it was made from has changed.
BASE_STAMP := $(VENV)/.base-installed
TEST_STAMP := $(VENV)/.test-installed

.PHONY: help setup run test lint types perf clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "  make %-7s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(BASE_STAMP) ## install into .venv (once)

run: setup ## install, fetch the default model, serve it on http://127.0.0.1:8000
	@exec $(BIN)/inferd serve smollm2

test: lint types ## the whole suite: lint, types, floors, tests
	$(BIN)/python -m pytest $(ARGS)

lint: $(TEST_STAMP) ## ruff's format and rules, and the floors (import-linter)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(TEST_STAMP) ## mypy
	$(BIN)/mypy

perf: $(TEST_STAMP) ## make perf NAME=x: measure tests/perf/x.py, write its result and the ledger
	@$(BIN)/python -m tests.perf.harness $(NAME) $(ARGS)

clean: ## remove .venv and caches (models and state live elsewhere: see README)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "inferd needs Python 3.11 or newer, which $(PYTHON) is not; install it, or: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "python3 cannot make a virtual environment; on Debian: apt-get install -y python3-venv" >&2; rm -rf $(VENV); exit 2; }

# torch alone comes from PyTorch's CPU index where no NVIDIA driver is loaded, because the build on PyPI brings 2.5 GB of
# CUDA libraries along; where that index is out of reach, the configured index's own build has to do.
$(VENV)/.torch-installed: | $(VENV)/bin/python
	@if $(BIN)/python -c 'import importlib.metadata as m; raise SystemExit(m.version("torch").split("+")[0] != "$(TORCH)")' 2>/dev/null; then \
	  echo "torch $(TORCH) is here already"; \
	elif test -e /proc/driver/nvidia/version; then \
	  echo "NVIDIA driver found: torch $(TORCH) with CUDA, about 3 GB to download"; \
	  $(PIP) install --constraint constraints.txt "torch==$(TORCH)"; \
	else \
	  echo "No NVIDIA driver found: torch $(TORCH) for CPUs, about 190 MB to download"; \
	  if $(BIN)/python .ci/reachable.py $(TORCH_CPU_INDEX)/torch/; then \
	    $(PIP) install --constraint constraints.txt --no-deps --index-url $(TORCH_CPU_INDEX) "torch==$(TORCH)"; \
	  else \
	    echo "$(TORCH_CPU_INDEX) is out of reach: taking torch from the configured index (up to 3 GB if that is PyPI)"; \
	    $(PIP) install --constraint constraints.txt "torch==$(TORCH)"; \
	  fi; \
	fi
	@touch $@

$(BASE_STAMP): pyproject.toml constraints.txt | $(VENV)/.torch-installed
	@echo "Installing inferd and its dependencies into $(VENV) (about 60 MB to download)"
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[tui]'
	@touch $@

$(TEST_STAMP): $(BASE_STAMP)
	@echo "Installing the test tools into $(VENV) (about 60 MB to download)"
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@
