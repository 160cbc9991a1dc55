# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PLUGINS := plugins/parallelkit-torch plugins/parallelkit-mindspore plugins/parallelkit-vllm \
           plugins/parallelkit-hccl
PROJECTS := pyproject.toml $(PLUGINS:%=%/pyproject.toml)

.PHONY: demo test test-all lint types unit clean

demo: $(VENV)/.demo
	$(BIN)/parallelkit demo

test: lint types unit

test-all: lint types
	$(BIN)/python -m pytest -m "not gpu" --full

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy parallelkit $(foreach p,torch mindspore vllm hccl,plugins/parallelkit-$(p)/parallelkit_$(p))

unit: $(VENV)/.test
	$(BIN)/python -m pytest -m "not gpu"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python requirements/dev.txt $(PROJECTS)
	$(BIN)/python -m pip install --quiet -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps -e . $(PLUGINS:%=-e ./%)
	@touch $@

$(VENV)/.test: $(VENV)/.demo requirements/test.txt
	$(BIN)/python -m pip install --quiet -r requirements/test.txt
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
