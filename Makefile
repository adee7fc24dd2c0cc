# `make help` lists the targets. Everything runs in .venv, made on first use.

PYTHON ?= python3
TORCH_SPEC ?=
PIP_ARGS ?=
ARGS ?=

BIN := .venv/bin
# Waiting OpenMP threads must not spin: tests and demo share few cores.
CALM := OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1

.PHONY: help env demo test explore check clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo     generate text with the embedded model, and show what the engine did'
	@echo 'make test     run the tests            (ARGS="-k radix" is handed to pytest)'
	@echo 'make explore  thousands of random schedules against the right answers (half an hour)'
	@echo 'make check    format, lint, spelling, types, layers'
	@echo 'make env      only make or update .venv'
	@echo 'make clean    remove .venv, caches and build results'
	@echo
	@echo 'The first of them installs .venv; after that nothing needs the network.'
	@echo '  PYTHON      interpreter to build .venv from; 3.11 or newer   (python3)'
	@echo '  TORCH_SPEC  which PyTorch to install, in the words of pip, for example'
	@echo '              TORCH_SPEC="torch==2.12.0 --index-url <index of the build you want>"'
	@echo '              Default: a CPU build if there is no NVIDIA GPU, else the usual one.'
	@echo '  PIP_ARGS    more arguments for every pip install'

env:
	@TORCH_SPEC='$(TORCH_SPEC)' PIP_ARGS='$(PIP_ARGS)' $(PYTHON) scripts/install

demo: env
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/demo.py $(ARGS)

test: env
	$(CALM) $(BIN)/python -m pytest $(ARGS)

explore: env
	$(CALM) $(BIN)/python -m pytest tests/explore -m full -v $(ARGS)

check: env
	PYTHON=$(BIN)/python scripts/check

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
