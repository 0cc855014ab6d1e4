# make repro [PROFILE=smoke]   the experiment of params.yaml (or of a profile), ending in a report
# make test                    lint, types, unit tests, and the smoke profile end to end
# make sweeps                  sweeps through the real servers with pretended stages (10 minutes)
# make browser                 the forms in headless Chromium (Debian: apt-get install chromium), screenshots in build/
# make oracles                 record scores of the original hpsv2 and image-reward packages anew (own environment), compare
.DEFAULT_GOAL := help
.PHONY: help repro test lint types unit e2e sweeps browser oracles clean

VENV := .venv
BIN := $(VENV)/bin
# The constraints are tested with Python 3.11; a newer one is used where there is no 3.11.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# One thread per process: the pipeline runs processes side by side, one a core.
export OMP_NUM_THREADS ?= 1

help:
	@sed -n 's/^# make/make/p' Makefile

$(VENV)/stamp: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "margrpo needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

repro: $(VENV)/stamp
	$(BIN)/margrpo reproduce $(if $(PROFILE),--profile $(PROFILE))

test: lint types unit e2e

lint: $(VENV)/stamp
	$(BIN)/ruff check .

types: $(VENV)/stamp
	$(BIN)/mypy

unit: $(VENV)/stamp
	$(BIN)/pytest -q -n 2 --dist loadfile -m 'not e2e and not slow and not browser'

e2e: $(VENV)/stamp
	$(BIN)/pytest -q -m e2e

sweeps: $(VENV)/stamp
	$(BIN)/pytest -q -s -m slow tests/pipeline/test_sweeps_served.py

browser: $(VENV)/stamp
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[browser]'
	$(BIN)/pytest -q -s -m browser

# The original packages pin old versions of what margrpo needs: an environment of their own.
$(VENV)-oracles/stamp: tests/oracles/requirements.txt
	$(PYTHON) -m venv $(VENV)-oracles
	$(VENV)-oracles/bin/pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

oracles: $(VENV)-oracles/stamp $(VENV)/stamp
	$(VENV)-oracles/bin/python tests/oracles/record.py tests/golden/rewards/oracles.json
	PYTHONPATH=. $(BIN)/python -m tests.oracles.compare

clean:
	rm -rf $(VENV) $(VENV)-oracles build *.egg-info .margrpo
