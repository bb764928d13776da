# make demo          compile two models with the flag on, and show what is fused
# make test          all tests; those marked `gpu` need a Hopper GPU
# make test-matrix   the same on every torch in MATRIX
# make mutants       faults put back by hand, each to be found by the tests
#
# An active virtual environment is used as it is. Where there is none, one is made here for each version of torch.
# PYTHON= and TORCH= choose others. The first run installs; a later one does not.

PYTHON ?= python3
TORCH ?= 2.13.0
MATRIX := 2.11.0 2.13.0 2.15.0

ENV := $(or $(VIRTUAL_ENV),$(CURDIR)/.venv-torch$(TORCH))
INSTALLED := $(ENV)/.nvgemm-fusion-installed
RUN := $(ENV)/bin/python

# With `any`, the torch of an active environment stays; a version that was asked for by name does not have to be there.
WANTED := $(if $(and $(VIRTUAL_ENV),$(filter file,$(origin TORCH))),any,$(TORCH))
# In an environment of our own, a constraint of the machine must not overrule the version.
PIP := $(if $(VIRTUAL_ENV),,PIP_CONSTRAINT=/dev/null) $(RUN) -m pip install -qq

.PHONY: demo test test-matrix mutants clean

demo: $(INSTALLED)
	$(RUN) -m nvgemm_fusion.bench.demo

test: $(INSTALLED)
	$(RUN) -m pytest -q -n auto

test-matrix:
	set -e; for version in $(MATRIX); do $(MAKE) --no-print-directory test VIRTUAL_ENV= TORCH=$$version; done

mutants: $(INSTALLED)
	$(RUN) tests/mutants.py

clean:
	rm -rf .venv-torch* build *.egg-info

# torch first and by itself: a machine without a GPU gets the build for the CPU (a tenth of the size), or the usual
# one where PyTorch's own index cannot be reached.
$(INSTALLED): setup.cfg pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(ENV)
	@$(RUN) -c 'import sys; from importlib.metadata import version as v; sys.exit("$(WANTED)" not in ("any", v("torch").split("+")[0]))' 2>/dev/null \
	|| { echo "installing torch $(TORCH) into $(ENV)"; \
	     { ! nvidia-smi -L >/dev/null 2>&1 \
	       && $(PIP) --retries 0 --extra-index-url https://download.pytorch.org/whl/cpu torch==$(TORCH)+cpu 2>/dev/null; } \
	     || $(PIP) torch==$(TORCH); }
	$(PIP) --editable '.[test,bench]'
	touch $@
