# make lab     JupyterLab on the course           make test       everything that continuous integration checks
# make venv    only install, into .venv           make unit, make notebooks, make lint    its three parts
# make clean   remove .venv and all caches

PYTHON ?= python3
# The tested pair; README.md says how to choose another build.
TORCH ?= torch==2.13.0
# Installed only when torch has not brought a triton of its own (its CUDA builds do, its CPU builds do not).
TRITON ?= triton==3.7.1; platform_system == "Linux"
LAB_FLAGS ?=

BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install
INSTALLED := .venv/installed
NOTEBOOKS := $(sort $(wildcard notebooks/[0-9][0-9]_*.ipynb))
ALLOW_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: venv lab test unit notebooks lint clean

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(PIP_INSTALL) $(TORCH)
	$(BIN)/python -m pip show --quiet triton 2>/dev/null || $(PIP_INSTALL) '$(TRITON)'
	$(PIP_INSTALL) --constraint constraints.txt --editable '.[test]'
	touch $@

lab: venv
	$(BIN)/python -m jupyterlab $(ALLOW_ROOT) $(LAB_FLAGS) notebooks

test: lint unit notebooks

lint: venv
	$(BIN)/ruff check .

unit: venv
	$(BIN)/python -m pytest -q

notebooks: venv
ifeq ($(NOTEBOOKS),)
	@echo "no notebooks to run"
else
	$(BIN)/python -m pytest -q --durations=5 --nbval --nbval-sanitize-with tests/nbval.cfg \
	    --nbval-kernel-name python3 --nbval-cell-timeout 1800 $(NOTEBOOKS)
endif

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +
