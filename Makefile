# Two commands do everything on a fresh machine: `make demo` and `make test`. With a vLLM engine
# that follows: `make demo-vllm` (Torch trains) and `make demo-mindspore`. DEMO="--steps 100" goes
# to the demo; TORCH_INDEX= leaves out the index that has torch's build for the CPU.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
VENV_VLLM := .venv-vllm
BIN_VLLM  := $(VENV_VLLM)/bin
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PLUGINS := plugins/parallelkit-torch plugins/parallelkit-mindspore plugins/parallelkit-vllm \
           plugins/parallelkit-hccl
PROJECTS := pyproject.toml $(PLUGINS:%=%/pyproject.toml)

.PHONY: demo demo-vllm demo-mindspore test test-all lint types unit clean

demo: $(VENV)/.demo
	$(BIN)/parallelkit demo $(DEMO)

demo-vllm: $(VENV_VLLM)/.demo
	$(BIN_VLLM)/parallelkit demo --framework torch --engine vllm $(DEMO)

# MindSpore needs numpy<2 and vLLM numpy 2: two environments, one demo.
demo-mindspore: $(VENV)/.test $(VENV_VLLM)/.demo
	$(BIN)/parallelkit demo --framework mindspore --engine vllm \
	    --engine-python $(BIN_VLLM)/python $(DEMO)

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

$(BIN_VLLM)/python:
	$(PYTHON) -m venv $(VENV_VLLM)

$(VENV_VLLM)/.demo: $(BIN_VLLM)/python requirements/vllm.txt $(PROJECTS)
	$(BIN_VLLM)/python -m pip install --quiet -r requirements/vllm.txt \
	    $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# Without that index these come as builds for CUDA, which end vLLM as it starts beside torch's for
# the CPU. A language model needs none of them.
	$(if $(TORCH_INDEX),,$(BIN_VLLM)/python -m pip uninstall --quiet --yes \
	    torchvision torchaudio torchcodec)
	$(BIN_VLLM)/python -m pip install --quiet --no-deps -e . \
	    $(foreach p,torch vllm,-e ./plugins/parallelkit-$(p))
	@touch $@

clean:
	rm -rf $(VENV) $(VENV_VLLM) .mypy_cache .ruff_cache .pytest_cache
