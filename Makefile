# `make` alone lists what there is. Everything happens in $(VENV); nothing outside the
# work tree is touched but pip's cache. What each environment takes: README.md, "Install".

VENV ?= .venv

# The first Python on PATH that is new enough; name another with PYTHON=...
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11; do \
	  "$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' \
	    2>/dev/null && { echo "$$p"; break; }; \
	done)
endif

# vLLM compiles a few small functions at run time even with --enforce-eager. That needs a C++
# compiler, costs seconds, and gains nothing on the small models of the demo and the tests.
export TORCHDYNAMO_DISABLE ?= 1

BIN := $(abspath $(VENV))/bin
BOOTSTRAP = $(PYTHON) scripts/bootstrap.py --venv $(VENV) $(BOOTSTRAP_ARGS)

# What `make check` leaves out. Tests that need torch join where torch is installed.
CHECK_MARKS = not vllm and not slow and not soak$(shell \
	$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' \
	2>/dev/null || echo ' and not torch')

.DEFAULT_GOAL := help
.PHONY: help venv vllm preflight demo test check lint fmt soak bench clean distclean python

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

python:
	@test -n "$(PYTHON)" || { \
	  echo "no Python 3.11 to 3.14 on PATH; python3 is: $$(python3 --version 2>&1)"; \
	  echo "install one (Debian: apt-get install python3 python3-venv) or name one: make PYTHON=/path/to/python3.11 ..."; \
	  exit 1; } >&2

venv: python ## kvvault and the development tools, in .venv (about a minute)
	@$(BOOTSTRAP) dev

vllm: python ## the same, and vLLM for CPUs (2 to 5 minutes)
	@$(BOOTSTRAP) dev vllm

preflight: python ## say what this machine lacks, install nothing
	@$(BOOTSTRAP) --check dev vllm

demo: python ## install what is needed, then watch two tenants' prompts survive a restart
	@$(BOOTSTRAP) core vllm
	$(BIN)/kvvault demo $(ARGS)

# An engine takes both cores of a small machine, so the tests that start one run alone; the others
# run on every core. pytest's exit code 5 says that none of the tests named in ARGS is of that kind.
test: python ## the whole test suite, real vLLM included
	@$(BOOTSTRAP) dev vllm
	$(BIN)/python -m pytest -n auto -m "not vllm and not soak" $(ARGS) || [ $$? -eq 5 ]
	$(BIN)/python -m pytest -m "vllm and not soak" $(ARGS) || [ $$? -eq 5 ]

check: lint ## linters, types, layers and the fast tests: under two minutes
	$(BIN)/python -m pytest -n auto -m "$(CHECK_MARKS)" $(ARGS)

lint: venv ## ruff, mypy --strict and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

fmt: venv ## let ruff format and repair what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

soak: python ## the long runs: kill -9, mutations, several processes
	@$(BOOTSTRAP) dev vllm
	$(BIN)/python -m pytest -m soak --timeout 0 $(ARGS)

bench: python ## store and load throughput beside vLLM's plaintext tier
	@$(BOOTSTRAP) core vllm
	$(BIN)/kvvault bench tier $(ARGS)

clean: ## remove caches and built packages
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -path './$(VENV)' -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## the same, and the virtual environment
	test ! -e '$(VENV)/pyvenv.cfg' || rm -rf '$(VENV)'
