# Every target makes its own environment in .venv: nothing has to be installed by hand but Python 3.11 or newer and make.
PYTHON ?= python3
BIN := .venv/bin
# The constraints pin every version, for the build environment too.
PIP := PIP_CONSTRAINT="$(CURDIR)/constraints.txt" PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet
# One thread for each test worker: two workers that each start two threads slow each other down.
# Compiled files are kept: many tests start Python anew.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
# To prepare all asserts for messages takes each worker 11 seconds: those of tests that fail get theirs in a second run.
TOLD = $(PYTEST) --assert=plain $(1) || { $(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(1); exit 1; }

.PHONY: demo test test-slow test-all test-kernels test-browser test-mutants fuzz lint docs wheel-test format results train clean
.DEFAULT_GOAL := demo

# LOCKED=1 takes every package by the SHA-256 of requirements-lock.txt (torch by its version), and builds with those.
LOCKED ?=

.venv/core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
ifneq ($(LOCKED),)
	$(PIP) --require-hashes --no-deps --only-binary :all: --requirement requirements-lock.txt
endif
	$(PIP) --editable ".[plot]"
	touch $@

.venv/dev: .venv/core
	$(PIP) --editable ".[dev]"
	touch $@

.venv/docs: .venv/core
	$(PIP) --editable ".[docs]"
	touch $@

demo: .venv/core  ## attack and certify the embedded model on the embedded data
	$(BIN)/wassail demo

test: .venv/dev  ## the suite of every change: all tests but the slow ones
	$(call TOLD,-m "not slow and not device" --ignore=tests/kernels)
	$(call TOLD,-m "device and not slow")

test-slow: .venv/dev  ## the slow tests: other norms and boxes, large networks, Ray, crash points
	$(PYTEST) -m "slow and not device"
	$(PYTEST) -m "slow and device"

test-all: test test-slow test-kernels test-mutants fuzz  ## every test, which the nightly workflow runs, too

test-kernels: .venv/dev  ## what sits on ties under other kernels, with one and two threads
	$(BIN)/python tests/kernels/run.py

test-browser: .venv/dev  ## the HTML pages in headless Chromium, which is installed if it can be; else skipped with a reason
	OMP_NUM_THREADS=1 $(BIN)/python tests/browser/run.py

test-mutants: .venv/dev  ## removes the rounding terms of the certificates one by one, and prints those that no test misses
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants/run.py

SECONDS ?=
COUNT ?=
fuzz: .venv/dev  ## changed files against every reader, the same ones on every machine; SECONDS=3600 for an hour, COUNT=9000 for so many
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/run.py $(if $(SECONDS),--seconds $(SECONDS)) $(if $(COUNT),--count $(COUNT))

lint: .venv/dev  ## style, complexity, types, the direction of imports, private names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python scripts/density.py --check > /dev/null

docs: .venv/docs  ## the documentation site, into site/, and a look at it in headless Chromium
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python tests/browser/site.py

WITH ?=
wheel-test:  ## sdist and wheel, built and tried in a clean environment without constraints; WITH="torch==2.13.0" limits a version
	$(PYTHON) scripts/wheel_test.py --with $(WITH)

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

STAGES ?=
results: .venv/dev  ## the figures of the pages, what is missing of them; STAGES="attacks gaps" for some
	$(BIN)/python -m benchmarks.results $(STAGES)
	$(BIN)/python -m benchmarks.pages

train: .venv/dev  ## rebuild the embedded data and networks
	$(PIP) --editable ".[train]"
	$(BIN)/python scripts/train_digits.py

clean:
	rm -rf .venv site .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
