# Ringfence's menu. `make` shows it; every entry makes what it needs by itself.

MAKEFLAGS += --no-print-directory
VENV := .venv
RUN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The first Python of at least 3.11 that can make virtual environments.
PYTHON ?= $(shell for each in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$each -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$each && break; done)

.PHONY: help demo test test-user lint fix docs bench clean
.DEFAULT_GOAL := help

help:  ## this menu
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:[^#]*## /\t/' | while IFS="$$(printf '\t')" read -r name text; do \
		printf '  make %-10s %s\n' "$$name" "$$text"; done

demo: $(STAMP)  ## analyse a real data set in a sandbox, then let eleven attacks try others (under a minute)
	@$(RUN)/python demo/demo.py $(ARGS)

test: $(STAMP)  ## every test that can run here; as root, then the sandbox's laws again as an ordinary user
	$(RUN)/python -m pytest -q $(ARGS)
	@if [ "$$(id -u)" = 0 ]; then $(MAKE) test-user; fi

test-user: $(STAMP)  ## the sandbox's laws as an ordinary user, with and without subordinate ids (needs root)
	$(RUN)/python tools/as_user.py --subordinate-ids -- $(ARGS)
	$(RUN)/python tools/as_user.py -- $(ARGS)

lint: $(STAMP)  ## ruff, pyright, and that generated files are current
	$(RUN)/ruff check .
	$(RUN)/pyright
	$(RUN)/python tools/generate_reference.py --check
	@if [ -e tools/generate_sync.py ]; then $(RUN)/python tools/generate_sync.py --check; fi

fix: $(STAMP)  ## what ruff can repair by itself
	$(RUN)/ruff check --fix .

docs: $(STAMP)  ## write docs/reference again from the code
	$(RUN)/python tools/generate_reference.py

bench: $(STAMP)  ## the speed and memory figures, beside the peers, in one run
	$(RUN)/python -m bench $(ARGS)

clean:  ## remove what these entries made
	rm -rf $(VENV) build demo-output .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml
	@if [ -z "$(PYTHON)" ]; then \
		echo "make: no Python 3.11 or newer that can make virtual environments was found."; \
		echo "      Debian and Ubuntu: sudo apt-get install python3 python3-venv"; \
		echo "      or name one:       make PYTHON=/path/to/python3.12 ..."; exit 1; fi
	@test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing ringfence and what the demo and the tests need into $(VENV) ..."
	@$(RUN)/python -m pip install --quiet --disable-pip-version-check -e '.[data,demo,dev]'
	@echo "Copying the packages that sandboxes see (numpy, pandas, matplotlib, IPython) into ringfence's cache ..."
	@$(RUN)/python -c "from ringfence.node import environments as e; e.python_environment('base'); e.python_environment('data')"
	@touch $@
