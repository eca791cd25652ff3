# make train   set up, train the default drafter, write runs/<id>/report.html
# make test    set up, run the tests; make test-all adds the slow ones
# make lab     set up, open JupyterLab on the index
SHELL := /bin/bash
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
ID ?= $(shell date +%Y%m%d-%H%M%S)
PARAMETERS ?=

.PHONY: help env train train-gpu test test-all test-browser test-gpu playwright soak serve-env test-serve story lint lab clean

help:
	@sed -n 's/^# make /make /p' Makefile

env: $(VENV)/ready

$(VENV)/ready: pyproject.toml requirements.txt requirements-test.txt requirements-model.txt tools/make_env.py
	$(PYTHON) tools/make_env.py $(VENV) --torch '$(TORCH)'
	touch $@

train: env
	mkdir -p runs/$(ID)
	status=0; $(BIN)/papermill notebooks/05_train.ipynb runs/$(ID)/report.ipynb -r run_id $(ID) \
	    --autosave-cell-every 5 $(PARAMETERS) || status=$$?; \
	$(BIN)/dflash report runs/$(ID)/report.ipynb -o runs/$(ID)/report.html; exit $$status

# make train-gpu   the same on one GPU with more data, 5 minutes of training (dflash/recipes/gpu.yaml)
train-gpu:
	$(MAKE) train PARAMETERS="-p recipe gpu -p gpus 0 $(PARAMETERS)"

WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile
test: env
	$(PYTEST) -m "not slow and not browser and not soak and not serve"

# make test-all   after those, the slow ones, the browser's, the soak, and a real server
test-all: test playwright
	$(PYTEST) -m "slow or browser or soak"
	$(MAKE) test-serve

# make test-browser   the tests that drive JupyterLab in Chromium
test-browser: env playwright
	$(BIN)/python -m pytest -q -m browser

playwright: env
	$(BIN)/python -m pip install --quiet --disable-pip-version-check playwright

# make test-gpu   the tests that need one or two CUDA devices
test-gpu: env
	$(BIN)/python -m pytest -q -m gpu

# make serve-env   an environment of its own with vLLM for CPUs, .venv-serve (3.5 GB)
SERVE := .venv-serve
serve-env: $(SERVE)/ready

$(SERVE)/ready: requirements-serve.txt tools/make_serve_env.py
	$(PYTHON) tools/make_serve_env.py $(SERVE)
	test -e $(SERVE)/unavailable.txt || touch $@

# make test-serve   drafters in both layouts, served by that vLLM and compared with our own decoding
test-serve: env serve-env
	DFLASH_SERVE_ENV=$(CURDIR)/$(SERVE) $(BIN)/python -m pytest -q -s -m serve $$(grep -l 'mark\.serve$$' tests/test_*.py)

# make soak   2,000 steps on the CPU with a fault every 100, compared with an unbroken run (2.5 minutes on two cores)
soak: env
	$(BIN)/python -m pytest -q -s -m soak

# make story   the training notebook with a 27B-shaped random target at full size: GPUS draft, the others run the target
GPUS ?= 5,6,7
story: env
	$(BIN)/python tools/story.py --gpus $(GPUS) $(STORY)

# make lint   ruff, its formatter, and the order of the rooms
lint: env
	$(BIN)/ruff check dflash tests tools
	$(BIN)/ruff format --check dflash tests tools
	PATH=$(CURDIR)/$(BIN):$$PATH lint-imports --no-cache

lab: env
	$(BIN)/jupyter lab --notebook-dir . --LabApp.default_url=/lab/tree/notebooks/index.ipynb \
	    $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB)

clean:
	rm -rf $(VENV) $(SERVE)
