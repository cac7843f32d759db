# `make demo`, `make test` and `make bench` need Python 3, pip and make; the first one called
# installs everything else into .venv. PYTHON chooses the interpreter of that environment.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Words added to pytest's command line, for example PYTEST_ARGS="-n 2 -k zero3".
PYTEST_ARGS ?= -n 2 --dist loadfile
# Words added to the benchmark's command line, for example BENCH_ARGS="--repeats 1".
BENCH_ARGS ?=

export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# DeepSpeed's compiled operators, with the environment: a run that is killed while it compiles leaves
# a lock behind, which in the shared folder would stop every other one.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/torch_extensions

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

.PHONY: venv
venv: $(INSTALLED) ## Create or update .venv

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	touch $@

.PHONY: demo
demo: $(INSTALLED) ## Move a script to two processes; train under ZeRO-3, convert, compare
	docs/demo/run.sh

# Every training process computes in one thread: they are tiny, and as many run as there are cores.
.PHONY: test
test: export OMP_NUM_THREADS := 1
test: lint warm ## Lint, type-check and run every test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: lint
lint: $(INSTALLED) ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -p ckpt -p migrate

.PHONY: format
format: $(INSTALLED) ## Apply the formatter and the safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: docs
docs: $(INSTALLED) ## Write the formats' documentation from their code
	$(BIN)/python docs/generate.py

# DeepSpeed compiles a C++ operator the first time it runs on a machine. Once, before the tests:
# inside them the time would count against one test's limit.
.PHONY: warm
warm: $(INSTALLED)
	$(BIN)/python tests/warm_deepspeed.py

.PHONY: matrix
matrix: warm ## Resume under every other strategy; write docs/resume-matrix.md
	$(BIN)/python tests/resume/page.py

.PHONY: bench
bench: $(INSTALLED) ## Measure time and memory against the frameworks' own converters
	$(BIN)/python benchmarks/bench.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/bench_states.py

.PHONY: clean
clean: ## Delete caches and benchmark data
	rm -rf .bench .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find ckpt migrate tests fixtures benchmarks docs -name __pycache__ -type d -prune \
	  -exec rm -rf {} + 2>/dev/null || true

.PHONY: distclean
distclean: clean ## The same, and .venv
	rm -rf $(VENV)
