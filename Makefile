# make demo: a real prompt through a split cluster on this machine.   make test: the whole suite.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check bench proto clean chaos

demo: $(READY)
	@$(BIN)/diptych demo

test: $(READY)
	@$(BIN)/python -m pytest -q

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict cluster workers kvtransfer
	@$(BIN)/python -m pytest -q tests/test_imports.py

bench: $(READY)
	@$(BIN)/python -m cluster.bench

chaos: $(READY)
	@$(BIN)/python -m pytest -q tests/cluster/test_death.py --chaos-rounds=$(or $(ROUNDS),10)

proto: $(READY)
	@$(BIN)/python -m cluster.api.generate_stubs

# torch first and pinned: anything else that asks for torch then finds it, instead of the largest build there is.
$(READY): pyproject.toml constraints.txt
	@echo "== creating $(VENV) ($$($(PYTHON) --version))"
	@$(PYTHON) -m venv $(VENV)
	@echo "== installing torch (1 of 2)"
	@$(BIN)/python -m pip install --quiet --progress-bar on --disable-pip-version-check -c constraints.txt torch==2.13.0
	@echo "== installing diptych and the rest (2 of 2)"
	@$(BIN)/python -m pip install --quiet --progress-bar on --disable-pip-version-check -c constraints.txt -e '.[nixl,dev]'
	@touch $(READY)

clean:
	rm -rf $(VENV)
