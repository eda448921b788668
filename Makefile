# Each target sets up what it needs: on a fresh machine `make test` is enough.
#
#   make setup    create .venv with the versions that constraints.txt pins
#   make unit     run the tests that start no ranks (two minutes)
#   make ranks    run the tests on real ranks and on the emulated cluster
#   make test     run both
#   make check    ruff, pyright, import contracts, mutants that fit, the budget, and a strict build of the documentation
#   make demo     train a small GPT under several strategies and compare them
#   make docs     serve the documentation on port 8000 of this machine
#   make parity   run every test with every strategy, cluster shape and model (hours)
#   make soak     train for half an hour while ranks, nodes and islands are lost; see tests/ranks/test_soak.py
#   make gpu      try and measure everything on one GPU (twelve minutes), with the Python and torch that are there

PYTHON ?= $(shell .ci/python)
# One more than the cores of a small machine: tests on ranks wait for each other.
WORKERS ?= 3

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

# Tools come from .venv alone. The machine's own Python settings must not leak in.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV
# Without this, each command that a test starts would compile all sources again.
unexport PYTHONDONTWRITEBYTECODE
# pyright must not look for a newer version on the network at each run.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# mkdocs-material must not advertise its successor at each build.
export NO_MKDOCS_2_WARNING := 1

.PHONY: setup unit ranks test check demo docs parity soak gpu
.DELETE_ON_ERROR:

setup: $(READY)

# The sources of the C++ extension: setup rebuilds it when they change.
NATIVE := CMakeLists.txt $(wildcard src/towpath/codecs/kernels/native/*)

# Build constraints need pip 25.3. pyright may download its program when first called, so it is called here. The line after
# it warns if the extension could not be built.
$(READY): pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Towpath needs Python 3.11 or newer; set PYTHON=")'
	@echo "Setting up $(VENV) with $(PYTHON) (some minutes the first time: torch is large)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.3"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --build-constraint constraints.txt \
		--editable . --group test --group check
	$(BIN)/pyright --version
	$(BIN)/python -c 'import torch; from towpath.codecs.kernels import kernels_for; kernels_for(torch.device("cpu"))'
	touch $@

demo: $(READY)
	$(BIN)/python -m lab demo

unit: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) tests/unit

ranks: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) tests --ignore=tests/unit

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS)

docs: $(READY)
	$(BIN)/mkdocs serve

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python tools/mutants/run.py --list > /dev/null
	$(BIN)/python -m tools.budget --check
	$(BIN)/mkdocs build --strict

# -m selects what pyproject.toml deselects. -v restores the lines that its -q removes, so that progress is counted.
parity: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) -v -m "not soak" -o console_output_style=count \
		--record-to tests/results/cpu.json

soak: $(READY)
	$(BIN)/python -m pytest -n 0 -m soak --record-to tests/results/soak.json tests/ranks

# The python3 of PATH, and no .venv: the machine has a torch for CUDA, and perhaps no network.
gpu:
	python3 tools/gpu.py --out build/gpu
