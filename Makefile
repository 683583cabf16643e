# The two commands of the README are `make demo` and `make test`; everything else serves them.
PYTHON ?= python3
VENV ?= .venv
# CPU-only machines may point this at PyTorch's public CPU index: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
DEMO_OUT ?= runs/demo
# Test processes, each with one thread: threads of several processes on the same cores slow each other down.
JOBS ?= 2
TREE := build/tree

.PHONY: demo test test-slow lint types format check clean

demo: $(VENV)/.run-installed
	@if [ -f $(DEMO_OUT)/config.json ]; then echo "going on with $(DEMO_OUT)"; $(BIN)/reincarnate run --resume $(DEMO_OUT); \
	else $(BIN)/reincarnate run --teacher bundled/Breakout-dqn --student qdagger-dqn --preset quick --out $(DEMO_OUT); fi

test: $(VENV)/.dev-installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile

test-slow: $(VENV)/.dev-installed
	$(BIN)/pytest -m slow

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy and import-linter want the package as it is installed: one tree, with teachers/ and students/ inside.
types: $(VENV)/.dev-installed
	rm -rf $(TREE) && mkdir -p $(TREE)
	cp -r reincarnate $(TREE)/reincarnate && cp -r teachers students $(TREE)/reincarnate/
	cd $(TREE) && $(abspath $(BIN))/mypy --cache-dir $(abspath .mypy_cache) --config-file $(abspath setup.cfg) -p reincarnate
	cd $(TREE) && MYPYPATH=. $(abspath $(BIN))/mypy --cache-dir $(abspath .mypy_cache) --config-file $(abspath setup.cfg) $(abspath docs)/*.py
	cd $(TREE) && PYTHONPATH=. $(abspath $(BIN))/lint-imports $(abspath setup.cfg)

format: $(VENV)/.dev-installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: lint types test

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run-installed: setup.cfg constraints.txt | $(VENV)/bin/python
	$(PIP) -e .
	touch $@

$(VENV)/.dev-installed: setup.cfg constraints.txt | $(VENV)/bin/python
	$(PIP) -e .[test,oracles,compress,dataframes,slurm,minari,lint]
	touch $@ $(VENV)/.run-installed

clean:
	rm -rf build .venv *.egg-info
