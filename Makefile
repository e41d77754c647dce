# make              the environment in .venv: core, notebooks
# make reproduce    the quickstart notebook, executed: figures and table under results/
# make test         the tests (those that .ci/run runs);  make extended: the long ones and, where there is a GPU, its own
# make tables       tables and figures again from the shipped records
# make clean        removes .venv
#
# PYTHON       interpreter to build .venv with, 3.11 or newer. If it already has torch (a conda environment, a system package),
#              .venv sees its packages and torch is not downloaded again.
# TORCH        pip requirement, such as torch==2.13.0. A torch that .venv has and that meets it is kept.
# TORCH_INDEX  index to take torch from, such as https://download.pytorch.org/whl/cpu on a machine without an NVIDIA GPU.
PYTHON ?= python3
TORCH ?= torch
TORCH_INDEX ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install
# One stamp for each choice of torch: another choice is another stamp, and an unchanged one installs nothing.
TORCH_DONE := $(VENV)/.torch-$(firstword $(shell printf '%s' '$(TORCH) $(TORCH_INDEX)' | cksum))
HAS_TORCH := -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' 2>/dev/null

# Several processes share the cores: one thread each, and no spinning while waiting. Nothing comes from a model hub.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1
export HF_DATASETS_OFFLINE ?= 1

.DELETE_ON_ERROR:
.PHONY: env reproduce test extended tables clean

env: $(VENV)/.notebooks
	@echo "$(VENV) is ready: source $(VENV)/bin/activate; or: make reproduce, make test"

reproduce: $(VENV)/.notebooks
	$(PY) notebooks/run.py quickstart --recipe micro

test: $(VENV)/.dev
	$(PY) -m pytest

extended: $(VENV)/.dev
	$(PY) -m pytest -m "extended or gpu"

tables: $(VENV)/.notebooks
	$(PY) -m eval

clean:
	rm -rf $(VENV)

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is missing or older than Python 3.11; name \
	another one: make PYTHON=/path/to/python3.12"; exit 1; }
	@if [ -x $(PY) ] && $(PY) -m pip --version >/dev/null 2>&1; then echo "keeping $(VENV)"; \
	elif $(PYTHON) $(HAS_TORCH); then $(PYTHON) -m venv --system-site-packages $(VENV); \
	else $(PYTHON) -m venv $(VENV); fi || { echo "$(PYTHON) cannot make a virtual environment (Debian, Ubuntu: apt install \
	python3-venv)"; exit 1; }
	@touch $@

$(TORCH_DONE): | $(VENV)/.created
	@if $(PY) $(HAS_TORCH); then echo "keeping the installed torch if it meets: $(TORCH)"; \
	else echo "Downloading torch: about 0.2 GB as a CPU build; about 3 GB, 7 GB on disk, with the CUDA libraries that PyPI's"; \
	echo "Linux wheels need. Without an NVIDIA GPU: make TORCH_INDEX=https://download.pytorch.org/whl/cpu"; fi
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	@touch $@

$(VENV)/.notebooks: pyproject.toml $(TORCH_DONE)
	$(PIP) -e '.[notebooks]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(TORCH_DONE)
	$(PIP) -e '.[notebooks,eval,dev]'
	@touch $@ $(VENV)/.notebooks
