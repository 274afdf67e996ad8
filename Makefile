# Each target makes what it needs from nothing; stamps in $(VENV) make the second call instant.
# A deeper environment holds the shallower one: core < all (what README.md shows) < test < dev.
PYTHON      ?= python3
VENV        ?= .venv
CONSTRAINTS ?= constraints/default.txt
ARGS        ?=
CLIENTS     ?= .venv-clients
DEVICELESS  ?= .venv-deviceless
LMEVAL      ?= .venv-lm-eval
RELEASE     ?= .venv-release
BIN         := $(VENV)/bin
INSTALL      = $(BIN)/python -m pip install -qq --disable-pip-version-check -c $(CONSTRAINTS)

.DELETE_ON_ERROR:
.PHONY: help demo test test-all lint types docs site links notebooks colab parity wheel windows hashes sbom lm-eval browser clients load fuzz chaos multihost deviceless setup clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## */  make \1\t/'

demo: $(VENV)/.all  ## watch the embedded model turn noise into an answer
	@$(BIN)/mercury demo $(ARGS)

test: $(VENV)/.test  ## run the quick tests; ARGS="-k sample --jaxtyping" goes to pytest
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not long and not slow" $(ARGS)

test-all: $(VENV)/.test  ## run the long and the slow tests too
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: $(VENV)/.dev  ## formatting, lint and who imports whom, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/shellcheck .ci/run benchmarks/*.sh qa/wheel.sh launch/slurm/*.sbatch launch/tpu/*.sh

types: $(VENV)/.dev  ## the type checker
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.docs  ## the site, in docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs docs/_build/html $(ARGS)
	@echo "docs/_build/html/index.html"

# -E: a build that only reads changed pages forgets by which phrases the others are found.
site: $(VENV)/.docs $(VENV)/.browser  ## the site in a Chromium: what searches find, widths, links; CHROMIUM=/path/to/one
	@$(MAKE) --no-print-directory docs ARGS=-E
	$(BIN)/python -m pytest qa/browser/site_leg.py

links: $(VENV)/.docs  ## links to other sites; needs the network
	$(BIN)/python -m sphinx -b linkcheck -q docs docs/_build/links

parity: $(VENV)/.parity  ## make the golden checkpoints again that transformers can make; ARGS="llama3" for one
	$(BIN)/python qa/parity/released.py $(ARGS)
	$(BIN)/python qa/parity/written.py $(ARGS)
	$(if $(ARGS),,$(BIN)/python qa/parity/mutated.py)
	$(if $(ARGS),,$(BIN)/python qa/parity/finetuned.py)

notebooks: $(VENV)/.dev  ## execute colab/*.ipynb in a short form; STEPS=400 QUESTIONS=128 for a long one
	@set -- colab/*.ipynb; \
	if [ ! -e "$$1" ]; then echo "colab/ holds no notebook yet"; exit 0; fi; \
	STEPS=$${STEPS:-10} QUESTIONS=$${QUESTIONS:-32} MPLBACKEND=Agg PYTHONWARNINGS="error:No artists with labels" PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python -m pytest --nbmake --nbmake-timeout=600 "$$@" $(ARGS)

COLAB ?= python3.12
colab: $(VENV)/.dev  ## the notebooks as Colab runs them: an empty environment of Python 3.12 each, and their first cell; ARGS=quickstart for one
	$(BIN)/python qa/colab_leg.py --python $(COLAB) --constraints constraints/newest.txt $(ARGS)

lm-eval: $(LMEVAL)/.ready  ## lm-evaluation-harness on local tasks
	JAX_PLATFORMS=cpu $(LMEVAL)/bin/python -m pytest qa/harness_leg.py $(ARGS)

wheel: $(VENV)/.dev  ## the wheel in an empty environment: demo, init, train, chat, serve
	qa/wheel.sh $(BIN)/python $(CONSTRAINTS)

hashes: $(RELEASE)/.ready  ## constraints/hashed.txt again, after constraints/default.txt changed
	$(RELEASE)/bin/uv pip compile -q --generate-hashes --universal --python-version 3.11 --no-emit-index-url --no-header \
	  --no-annotate --extra serve --extra hub --extra plot -c $(CONSTRAINTS) -o constraints/hashed.txt pyproject.toml

# By the tags of wheels, and by what each package asks for on Windows; nothing is installed.
windows: $(RELEASE)/.ready  ## an installation on Windows finds a wheel of every package, for the oldest and the newest versions
	@for pair in 3.11:$(CONSTRAINTS) 3.13:constraints/newest.txt; do \
	  $(RELEASE)/bin/uv pip compile -q --python-platform x86_64-pc-windows-msvc --python-version "$${pair%%:*}" --only-binary :all: \
	    --no-emit-index-url --no-header --no-annotate --extra serve --extra hub --extra plot -c "$${pair#*:}" \
	    -o $(RELEASE)/windows.txt pyproject.toml >/dev/null || exit 1; \
	  echo "Python $${pair%%:*}: $$(grep -c == $(RELEASE)/windows.txt) packages, each with a wheel for Windows"; \
	done

# From the hashes, so what is listed is what they install.
sbom: $(RELEASE)/.ready  ## dist/mercury_jax.cdx.json: what the library brings along, for machines (CycloneDX)
	@rm -rf $(RELEASE)/runtime && $(PYTHON) -m venv $(RELEASE)/runtime && mkdir -p dist
	$(RELEASE)/runtime/bin/python -m pip install -qq --disable-pip-version-check --require-hashes -r constraints/hashed.txt
	$(RELEASE)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o dist/mercury_jax.cdx.json \
	  $(RELEASE)/runtime/bin/python
	@echo "dist/mercury_jax.cdx.json"

browser: $(VENV)/.browser  ## the playground in a Chromium; CHROMIUM=/path/to/one
	$(BIN)/python -m pytest qa/browser $(ARGS)

clients: $(VENV)/.test $(CLIENTS)/.openai3 $(CLIENTS)/.openai2 $(CLIENTS)/.node  ## clients of others at a real server
	$(BIN)/python -m qa.clients.run $(CLIENTS) $(ARGS)

LOAD ?= 1000
load: $(VENV)/.test  ## LOAD clients at a real server (LOAD=60 for a short form)
	MERCURY_LOAD=$(LOAD) $(BIN)/python -m pytest qa/load $(ARGS)

FUZZ ?= 1000
fuzz: $(VENV)/.test $(CLIENTS)/.fuzz  ## FUZZ hostile requests of each kind (FUZZ=40 for a short form)
	MERCURY_FUZZ=$(FUZZ) MERCURY_SCHEMATHESIS=$(abspath $(CLIENTS))/fuzz/bin/schemathesis \
	  $(BIN)/python -m pytest qa/fuzz $(ARGS)

KILLS ?= 100
chaos: $(VENV)/.test  ## kill a training run KILLS times, also during saves and exports, and compare its parameters with an undisturbed run's
	MERCURY_CHAOS=$(KILLS) $(BIN)/python -m pytest -s qa/chaos $(ARGS)

multihost: $(VENV)/.test  ## training in several processes: layouts, failures, another number of processes after a stop
	$(BIN)/python -m pytest -n 2 --dist loadfile qa/multihost $(ARGS)

deviceless: $(DEVICELESS)/.ready  ## programs compiled for GPUs and TPUs that are not here; ARGS="-k h200"
	$(DEVICELESS)/bin/python -m pytest qa/deviceless $(ARGS)

setup: $(VENV)/.core  ## only make the environment

clean:  ## remove environments, caches and built files; runs/ stays
	rm -rf $(VENV) .venv-newest .venv-image $(CLIENTS) $(DEVICELESS) $(LMEVAL) $(RELEASE) build dist docs/_build docs/api/generated *.egg-info .pytest_cache .ruff_cache .jax_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mercury_jax needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	@echo "Making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing mercury_jax into $(VENV)"
	@$(INSTALL) -e .
	@touch $@

$(VENV)/.all: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing mercury_jax[serve,hub,plot] into $(VENV)"
	@$(INSTALL) -e '.[serve,hub,plot]'
	@touch $@ $(VENV)/.core

$(VENV)/.test: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing mercury_jax[test] into $(VENV)"
	@$(INSTALL) -e '.[serve,hub,plot,test]'
	@touch $@ $(VENV)/.all $(VENV)/.core

$(VENV)/.parity: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing mercury_jax[parity] into $(VENV), torch included"
	@$(INSTALL) -e '.[parity]'
	@touch $@ $(VENV)/.core

$(VENV)/.docs: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing mercury_jax[docs] into $(VENV)"
	@$(INSTALL) -e '.[docs]'
	@touch $@ $(VENV)/.core

$(VENV)/.browser: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing mercury_jax[test,browser] into $(VENV)"
	@$(INSTALL) -e '.[serve,hub,plot,test,browser]'
	@touch $@ $(VENV)/.test $(VENV)/.all $(VENV)/.core

$(VENV)/.dev: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing mercury_jax with every extra into $(VENV)"
	@$(INSTALL) -e '.[serve,hub,plot,test,browser,dev]'
	@touch $@ $(VENV)/.test $(VENV)/.browser $(VENV)/.all $(VENV)/.core

# The compilers of chips (some 4 GB) stay out of it too: beside them JAX looks for a driver first.
$(LMEVAL)/.ready: pyproject.toml $(CONSTRAINTS)
	@echo "Installing mercury_jax[test,lm-eval] into $(LMEVAL)"
	@$(PYTHON) -m venv $(LMEVAL)
	@$(LMEVAL)/bin/python -m pip install -qq --disable-pip-version-check -c $(CONSTRAINTS) -e '.[test,lm-eval]'
	@touch $@

$(RELEASE)/.ready: pyproject.toml $(CONSTRAINTS)
	@echo "Installing the tools of a release into $(RELEASE)"
	@$(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python -m pip install -qq --disable-pip-version-check -c $(CONSTRAINTS) 'uv>=0.9' 'cyclonedx-bom>=7.2'
	@touch $@

$(DEVICELESS)/.ready: pyproject.toml $(CONSTRAINTS)
	@echo "Installing mercury_jax[test,deviceless] into $(DEVICELESS)"
	@$(PYTHON) -m venv $(DEVICELESS)
	@$(DEVICELESS)/bin/python -m pip install -qq --disable-pip-version-check -c $(CONSTRAINTS) -e '.[test,deviceless]'
	@touch $@

# What others wrote stays out of our own environment, each with the versions that it asks for.
$(CLIENTS)/.%: qa/clients/requirements-%.txt
	@echo "Installing the clients of $*"
	@$(PYTHON) -m venv $(CLIENTS)/$*
	@$(CLIENTS)/$*/bin/python -m pip install -qq --disable-pip-version-check -r $<
	@touch $@

$(CLIENTS)/.node: qa/clients/node/package.json
	@echo "Installing the clients for Node"
	@mkdir -p $(CLIENTS)/node
	@cp $< $(CLIENTS)/node/
	@npm install --prefix $(CLIENTS)/node --no-package-lock --no-audit --no-fund --loglevel=error
	@touch $@
