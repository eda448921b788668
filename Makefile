# Every target does all the set-up it needs: on a fresh machine `make test` is enough.
#
#   make setup    a virtual environment in .venv, with the versions that constraints.txt pins
#   make demo     train a small GPT under several strategies, and print them side by side
#   make test     the tests, on two workers
#   make docs     the documentation as a site, on this machine's port 8000
#   make check    ruff, pyright, the import contracts, and the documentation built: links, anchors, docstrings
#   make parity   the tests on ranks and on the lab with every strategy, on every shape of cluster, with every model (hours)
#   make soak     runs whose ranks are killed again and again
#   make gpu      what only a machine with CUDA can show: tests, kernels, a trace; each result is stamped, and to be committed

PYTHON ?= $(shell .ci/python)
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

# Tools are called through the interpreter or from .venv alone: nothing of the machine's own leaks in.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV
# Else each of the commands that the tests start would compile all sources anew.
unexport PYTHONDONTWRITEBYTECODE
# pyright would ask the network at each run whether it is the newest.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# mkdocs-material would announce the next generator at each build.
export NO_MKDOCS_2_WARNING := 1

.PHONY: setup demo test docs check parity soak gpu
.DELETE_ON_ERROR:

setup: $(READY)

# What the extension is made of: when it changes, setup builds it anew.
NATIVE := CMakeLists.txt $(wildcard src/towpath/codecs/kernels/native/*)

# pip knows constraints on what builds since 25.3. pyright may fetch its program when first called: here, not in a
# check. The line after it warns if the extension could not be built.
$(READY): pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Towpath needs Python 3.11 or newer; set PYTHON=")'
	@echo "Setting up $(VENV) with $(PYTHON) (some minutes the first time: torch is large)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.3"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --build-constraint constraints.txt \
		--editable . --group test --group check
	$(BIN)/pyright --version
	$(BIN)/python -c 'import torch; from towpath.codecs.kernels.dispatch import kernels_for; kernels_for(torch.device("cpu"))'
	touch $@

demo: $(READY)
	$(BIN)/towpath demo

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS)

docs: $(READY)
	$(BIN)/mkdocs serve

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/mkdocs build --strict

# -m lifts the deselection of pyproject.toml; -v undoes its -q, so that every line counts the cases. A run that passes is
# recorded in tests/results: commit that file.
parity: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) -v -m "not soak" -o console_output_style=count \
		--record-to tests/results/parity.json tests/ranks tests/order tests/lab

soak: $(READY)
	$(BIN)/python -m pytest -n 0 -m soak --record-to tests/results/soak.json tests/ranks

# A torch with CUDA has to be there first: constraints.txt pins its version, and pip takes the build of the index it asks.
gpu: $(READY)
	$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "make gpu: torch sees no CUDA device here. Install a torch with CUDA into .venv, of the version in constraints.txt.")'
	$(BIN)/python -m pytest -n 0 -v --record-to tests/results/gpu.json tests/gpu
	$(BIN)/python benchmarks/kernels.py --device cuda
	$(BIN)/python benchmarks/timeline.py --device cuda --trace benchmarks/results/trace-gpu.json
