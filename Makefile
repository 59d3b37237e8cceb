# make demo       render the template and train the result on two simulated replicas; STARTER=gan chooses another task
# make test       the tests (make test-all adds the long ones)
# make coverage   the tests of make test, and which lines of engine/ they run
# make pictures   the README's pictures, from a run
# make settings   the project's docs/settings.md and docs/calls.md, from the code
# make docs       the pages of the template and of a project as one site, in build/docs/site (in an environment of its own)
# make benchmark  train.py beside other loops (about an hour; Orbit and tf-keras in environments of their own)
# make lint       ruff, on the template and on the unrendered project, and mypy on the project
# make clean      remove all files that these targets made

PYTHON ?= python3
STARTER ?= image_classification
BIN := .venv/bin
DEMO := build/demo/my_training
# -rs prints what is skipped, and why. Tests wait for processes and signals, so there are more workers than two cores. The
# short tests of a file share what its fixtures made, so one worker runs them.
PYTEST := -m pytest -rs --numprocesses 3
SHORT := $(PYTEST) --dist loadfile -m "not long"

# The versions that Orbit and tf-keras are measured with. Without them pip looks for a solution for minutes.
ORBIT := tf-models-official==2.20.0 tensorflow==2.20.0 tensorflow-text==2.20.0 tf-keras==2.20.1 keras==3.15.1 numpy==2.4.6
TF_KERAS := tf-keras==2.21.0 tensorflow==2.21.0 keras==3.15.1 numpy==2.4.6

# Bytecode or caches inside the template's folder would be rendered into every project.
export PYTHONDONTWRITEBYTECODE := 1
export RUFF_NO_CACHE := true
export MYPY_CACHE_DIR := /dev/null

.PHONY: help demo test test-all coverage pictures settings docs benchmark lint clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

# Installs this folder's dependencies, with the extras that follow it.
install = if command -v uv >/dev/null; then uv pip install --quiet --python $(BIN)/python --editable '$(1)'; \
	else $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '$(1)'; fi

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else "Python 3.11, 3.12 or 3.13 is needed: make PYTHON=/path/to/python3.13")'
	@if command -v uv >/dev/null; then uv venv --quiet --clear --python $(PYTHON) .venv; \
	else $(PYTHON) -m venv --clear .venv; fi
	@$(call install,.)
	@touch $@

.venv/installed-for-tests: .venv/installed
	@$(call install,.[test])
	@touch $@

# This starter needs KerasHub too.
demo: $(if $(filter text_pair_classification,$(STARTER)),.venv/installed-for-tests,.venv/installed)
	@rm -rf build/demo
	@$(BIN)/cookiecutter --no-input --default-config --output-dir build/demo . starter=$(STARTER)
	@cd $(DEMO) && "$(CURDIR)/$(BIN)/python" train.py --simulated-devices 2
	@echo "The run's files are in $(DEMO)/runs/default, the project in $(DEMO)."

test: .venv/installed-for-tests
	$(BIN)/python $(SHORT)

test-all: test
	$(BIN)/python $(PYTEST) --dist worksteal -m long --durations 20

coverage: .venv/installed-for-tests
	@rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/coverage run --data-file=$(CURDIR)/build/coverage/data $(SHORT)
	$(BIN)/coverage combine --quiet --data-file=build/coverage/data build/coverage
	$(BIN)/coverage report --data-file=build/coverage/data --ignore-errors --show-missing

pictures: .venv/installed
	$(BIN)/python docs/pictures.py

settings: .venv/installed
	$(BIN)/python docs/make_settings.py
	$(BIN)/python docs/make_calls.py

# In build/, so that it is ignored, removed by make clean, and copied nowhere.
build/docs-environment/installed: docs/site/requirements.txt
	@$(PYTHON) -m venv --clear build/docs-environment
	@build/docs-environment/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

docs: build/docs-environment/installed
	@build/docs-environment/bin/python docs/make_site.py

.venv-orbit/installed:
	@$(PYTHON) -m venv --clear .venv-orbit
	@.venv-orbit/bin/python -m pip install --quiet --disable-pip-version-check $(ORBIT) --editable .
	@touch $@

.venv-tf-keras/installed:
	@$(PYTHON) -m venv --clear .venv-tf-keras
	@.venv-tf-keras/bin/python -m pip install --quiet --disable-pip-version-check $(TF_KERAS)
	@touch $@

benchmark: .venv/installed-for-tests .venv-orbit/installed .venv-tf-keras/installed
	$(BIN)/python benchmarks/run.py --orbit .venv-orbit/bin/python
	$(BIN)/python benchmarks/tables.py --orbit .venv-orbit/bin/python --tf-keras .venv-tf-keras/bin/python

lint: .venv/installed-for-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd '{{cookiecutter.project_slug}}' && "$(CURDIR)/$(BIN)/mypy"

clean:
	rm -rf .venv .venv-orbit .venv-tf-keras build *.egg-info
	find . -name __pycache__ -o -name '.*_cache' -prune | xargs -r rm -rf
