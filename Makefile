# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0

MAKEFLAGS += --no-print-directory

# The Python that makes .venv (3.12 or newer); looked for when empty.
PYTHON ?=
# QUICK=1 makes `make demo` the short variant.
QUICK ?=
# Megatron-Core releases tested beside the newest one, which .ci/requirements/main.txt pins.
HOSTS ?= 0.16.1 0.17.1 0.18.2
# How much `make study` runs: quick, main or depth.
STUDY ?= main
# Arguments of the transport benchmark, the first of `make bench`, e.g. BENCH_ARGS='--vpp 1'.
BENCH_ARGS ?=
# Processes that run tests side by side (0: none but pytest's own), and more arguments for pytest.
WORKERS ?= 2
# FAST=1 makes `make test` a selection on the newest host, for while one works.
FAST ?=
PYTEST_ARGS ?=

venv_python := .venv/bin/python

.PHONY: help setup dev demo study test bench docs check format clean distclean

help:
	@echo 'make demo       set everything up, train three small models on real text, draw the report'
	@echo '                (QUICK=1: the short variant)'
	@echo 'make study      does a mechanism help? many seeds, hours of two cores, goes on where it was'
	@echo '                stopped (STUDY=quick: a look; STUDY=depth: depth, blocks, streams)'
	@echo 'make test       set everything up, run linter, type checker and all tests that need no GPU, on every host'
	@echo "                (WORKERS=4, HOSTS='0.18.2', PYTEST_ARGS='-k name'; FAST=1: a selection)"
	@echo 'make dev        make the environments to work in: .venv and the other hosts'
	@echo 'make bench      transports, mechanisms and whole models beside each other, as ratios;'
	@echo '                JSON in runs/bench (BENCH_ARGS="--vpp 1" is for the transports)'
	@echo 'make docs       the documentation site, in build/site'
	@echo 'make check      linter, formatting and types, in seconds'
	@echo 'make format     let the linter repair and format the code'
	@echo 'make clean      remove caches and build output; make distclean: the environments too'
	@echo 'PYTHON=/path/to/python3.12 names the Python for .venv; otherwise it is found.'

setup:
	@PYTHON='$(PYTHON)' .ci/setup main

dev:
	@PYTHON='$(PYTHON)' .ci/setup all $(HOSTS)
	@echo 'ready: source .venv/bin/activate'

demo: setup
	@PATH="$(CURDIR)/.venv/bin:$$PATH" QUICK='$(QUICK)' launch/demo.sh

study: setup
	@$(venv_python) -W ignore -m examples.study.run --scope '$(STUDY)'
	@$(venv_python) -W ignore -m examples.study.report

test:
ifeq ($(FAST),)
	@PYTHON='$(PYTHON)' .ci/setup all $(HOSTS)
	@$(venv_python) .ci/run_tests.py --workers $(WORKERS) --hosts $(HOSTS) -- $(PYTEST_ARGS)
else
	@PYTHON='$(PYTHON)' .ci/setup main
	@$(venv_python) .ci/run_tests.py --fast --workers $(WORKERS) -- $(PYTEST_ARGS)
endif

bench: setup
	@OMP_NUM_THREADS=1 $(venv_python) -W ignore -m benchmarks.transport $(BENCH_ARGS)
	@for mechanism in mhc attnres; do OMP_NUM_THREADS=1 $(venv_python) -W ignore -m benchmarks.kernels \
		--mechanism $$mechanism --json runs/bench/$$mechanism.json || exit; done
	@OMP_NUM_THREADS=1 $(venv_python) -W ignore -m benchmarks.model --json runs/bench/model.json
	@OMP_NUM_THREADS=1 $(venv_python) -W ignore -m benchmarks.decode --json runs/bench/decode.json

docs: setup
	@NO_MKDOCS_2_WARNING=1 $(venv_python) -m mkdocs build --strict --quiet
	@echo 'build/site/index.html'

check: setup
	$(venv_python) -m ruff check .
	$(venv_python) -m ruff format --check .
	$(venv_python) -m mypy megatron_residuals

format: setup
	$(venv_python) -m ruff check --fix .
	$(venv_python) -m ruff format .

clean:
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-oldest
