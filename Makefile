# Every target sets up what it needs; the second time there is nothing to do.
#   make lab    open JupyterLab on the first lesson
#   make test   run every test and validate every lesson
# The other targets: make help

PYTHON ?= python3
VENV ?= .venv
VENV_OLDEST ?= .venv-oldest
REPEAT ?= 20

BIN := $(VENV)/bin
READY := $(VENV)/ready
READY_OLDEST := $(VENV_OLDEST)/ready

# PYTHONUNBUFFERED hides bugs in how output is buffered.
unexport PYTHONUNBUFFERED

# A virtual environment holds absolute paths: when the folder has moved, set it up again.
ifneq ($(shell cat $(READY) 2>/dev/null),$(CURDIR))
$(shell rm -f $(READY))
endif
ifneq ($(shell cat $(READY_OLDEST) 2>/dev/null),$(CURDIR))
$(shell rm -f $(READY_OLDEST))
endif

.PHONY: help
help:
	@echo "make lab          open JupyterLab on the first lesson"
	@echo "make test         run every test, then validate every lesson"
	@echo "make lint         ruff and mypy"
	@echo "make bench        run the benchmarks, which print numbers"
	@echo "make soak         repeat the tests marked soak $(REPEAT) times (REPEAT=N)"
	@echo "make notebooks    execute every lesson and store its outputs"
	@echo "make test-oldest  run the tests, without the lessons, on the oldest torch"
	@echo "make setup        create $(VENV) and install the course into it"
	@echo "make clean        remove caches and build outputs"
	@echo "make distclean    remove the virtual environments too"

.PHONY: lab
lab: $(READY)
	$(BIN)/python -m ddp_lab lab

.PHONY: test
test: $(READY)
	$(BIN)/python -m pytest
	$(BIN)/python -m ddp_lab validate

.PHONY: lint
lint: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

.PHONY: bench
bench: $(READY)
	@for script in benchmarks/[!_]*.py; do \
		[ -e "$$script" ] || { echo "There are no benchmarks yet."; break; }; \
		echo "== $$script"; \
		$(BIN)/python -m "benchmarks.$$(basename "$$script" .py)" || exit 1; \
	done

.PHONY: soak
soak: $(READY)
	DDP_LAB_REPEAT=$(REPEAT) $(BIN)/python -m pytest -m soak

.PHONY: notebooks
notebooks: $(READY)
	$(BIN)/python -m ddp_lab execute

.PHONY: test-oldest
test-oldest: $(READY_OLDEST)
	$(VENV_OLDEST)/bin/python -m pytest -m "not browser" --ignore=tests/test_notebooks.py

.PHONY: setup
setup: $(READY)

$(READY): pyproject.toml
	@$(call create_venv,$(VENV))
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@echo "$(CURDIR)" > $@

# The oldest versions that pyproject.toml allows, the torch that the course promises to run on.
$(READY_OLDEST): pyproject.toml
	@$(call create_venv,$(VENV_OLDEST))
	$(VENV_OLDEST)/bin/python -m pip install --quiet --editable ".[dev]" "torch==2.9.1" "torchvision==0.24.1"
	@echo "$(CURDIR)" > $@

define create_venv
command -v $(PYTHON) >/dev/null || { \
	echo "There is no $(PYTHON) here. Install Python 3.10 or newer, or name one: make PYTHON=python3.12"; exit 1; }; \
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	echo "$$($(PYTHON) --version) is too old: the course needs Python 3.10 or newer. Name one: make PYTHON=python3.12"; exit 1; }; \
$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv"; exit 1; }; \
echo "Setting up $(1). The first time this downloads PyTorch and takes some minutes."; \
$(PYTHON) -m venv $(1)
endef

.PHONY: clean
clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis test-results
	find . -name .venv\* -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -exec rm -rf {} +

.PHONY: distclean
distclean: clean
	rm -rf $(VENV) $(VENV_OLDEST)
