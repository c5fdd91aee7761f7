# Every target sets up what it needs: `make serve` and `make test` work on a fresh clone.

VENV := .venv
PY := $(VENV)/bin/python
ARGS ?=

# The first interpreter that is new enough. `make PYTHON=/path/to/python3.12 venv` names another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v $$p; break; }; done)

# An NVIDIA driver brings the CUDA build of JAX with it.
HAVE_NVIDIA := $(shell { nvidia-smi -L >/dev/null 2>&1 || test -e /proc/driver/nvidia/version; } && echo yes)
comma := ,
EXTRAS := dev$(if $(HAVE_NVIDIA),$(comma)cuda)
STAMP := $(VENV)/.installed-dev$(if $(HAVE_NVIDIA),-cuda)

AOT_STAMP := .venv-aot/.installed
AOT_TARGETS := h100 b200 rtx-pro-6000 gb10 v5e v6e tpu7x
AOT_MODEL_TARGETS := h100 v5e

.PHONY: venv aot aot-reports serve chat test test-all browser qualify-long lint format imports types clean

venv: $(STAMP)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Strata needs Python 3.11 or newer; none was found (make PYTHON=/path/to/python3)"; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || { echo "making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "installing strata-serve[$(EXTRAS)] into $(VENV) (a few minutes the first time)"
	$(PY) -m pip install --quiet --disable-pip-version-check --no-input --editable '.[$(EXTRAS)]'
	@touch $@

# Compilers for chips that are not here: the CUDA plugin and libtpu beside a plain jax of the same version. Apart from
# $(VENV), since with them every start looks for a GPU and a TPU first.
aot: $(AOT_STAMP)

$(AOT_STAMP): $(STAMP)
	@$(PY) -m venv --clear .venv-aot
	@echo "installing the GPU and TPU compilers into .venv-aot (1.5 GB)"
	@version=$$($(PY) -c 'import jax; print(jax.__version__)'); .venv-aot/bin/python -m pip install --quiet \
		--disable-pip-version-check --no-input jax==$$version jax-cuda13-plugin==$$version \
		jax-cuda13-pjrt==$$version nvidia-cuda-nvcc libtpu absl-py flax
	@touch $@

# One process a target, one after another; about an hour on two cores.
aot-reports: aot
	@mkdir -p bench/results/aot
	@for target in $(AOT_TARGETS); do echo $$target; \
		.venv-aot/bin/python -m pallas_kernels.aot --target $$target --json > bench/results/aot/$$target.json \
		|| failed=1; done; \
	for target in $(AOT_MODEL_TARGETS); do echo models $$target; \
		.venv-aot/bin/python -m bench.aot_models --target $$target --json > bench/results/aot/models-$$target.json \
		|| failed=1; done; test -z "$$failed"

serve: venv
	$(PY) serve.py $(ARGS)

chat: venv
	$(PY) serve.py chat $(ARGS)

# Two processes, a file's tests in one of them: each has servers and compiled programs of its own.
PYTEST = $(PY) -m pytest -n 2 --dist loadfile

test: lint imports types
	$(PYTEST) -m "not slow and not long" $(ARGS)

test-all: lint imports types
	$(PYTEST) -m "not long" $(ARGS)

qualify-long: venv
	$(PY) -m pytest -m long $(ARGS)

# Chromium for the tests of the live page, where there is none; they skip without it.
browser: venv
	$(PY) -m playwright install --only-shell chromium

lint: venv
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

format: venv
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

imports: venv
	$(VENV)/bin/lint-imports

types: venv
	$(PY) -m mypy

clean:
	rm -rf $(VENV) .venv-aot .cache build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
