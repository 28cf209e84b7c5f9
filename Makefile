# Two commands set everything up on a fresh machine: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test test-slow bench lint clean

demo: $(VENV)/.installed
	$(BIN)/archipel demo

test: $(VENV)/.dev-installed lint
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: $(VENV)/.dev-installed
	$(BIN)/python -m pytest -m "slow"

bench: $(VENV)/.dev-installed
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/transport.py

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch comes first and alone: a resolver that meets it among others may choose another build.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) --editable ".[fast]"
	touch $@

$(VENV)/.dev-installed: $(VENV)/.installed
	$(PIP) --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache
