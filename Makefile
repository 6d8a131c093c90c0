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
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/.installed-test ## Solve real problems by a compiled plan, and compare it with fixed ones
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
	$(BIN)/python -m pytest -m "not slow"

.PHONY: lint
lint: $(VENV)/.installed-dev ## Style, types and the layers of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

.PHONY: check
check: lint ## lint, then all tests, the long suites too
	$(BIN)/python -m pytest

.PHONY: bench
bench: $(VENV)/.installed-dev ## Run the benchmarks; each prints a table
	@for script in benchmarks/*.py; do \
		test -e "$$script" || { echo "benchmarks/ holds no scripts"; continue; }; \
		echo "== $$script"; $(BIN)/python "$$script" || exit 1; \
	done

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
	rm -rf $(VENV) $(OUT) site build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; use make PYTHON=/path/to/a/newer/python"; exit 2; }
	$(PYTHON) -m venv $(VENV)

# The stamp of a set of extras is as new as the installation of them.
$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e ".[$*]"
	@touch $@
