# `make demo` and `make test` work on a fresh machine: each sets up what it needs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := $(VENV)/clients
# Tests start many processes; without bytecode files each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
# pip would compile 35,000 files to bytecode, of which a tenth are imported; Python compiles those when it first does.
PIP_FLAGS := --quiet --disable-pip-version-check --no-compile
PIP_CLIENTS := $(CLIENTS)/bin/python -m pip install $(PIP_FLAGS)

# Tests run in as many processes as there are cores; a file stays in one, because its tests share engines and servers.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

.PHONY: install kernels clients client client-tools ui docs wheel sbom audit image schemas demo serve ten-minutes test test-slow test-long check format clean

install: $(STAMP)

# torch first and pinned: left to itself, pip would fetch the newest build with its CUDA libraries.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Bough needs Python 3.11 or later: make $(MAKECMDGOALS) PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_FLAGS) --constraint constraints.txt torch
	$(BIN)/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

# Pip compiles the kernels at installation; after an update they are compiled anew, where there is a compiler.
kernels: $(STAMP)
	@$(BIN)/python -c 'import sys; from bough.native.library import find_library; sys.exit(find_library() is None)' \
	|| $(BIN)/bough build-kernels || echo "no kernels: torch does their work, and their tests are skipped"

# Clients of the server whose requirements clash with ours have an environment of their own. Where they cannot be had,
# their tests are skipped and say so. SGLang's whole list of requirements is for its engine, not for its clients; its
# benchmark needs the second list besides, with its version of Transformers, for the tokenizer alone.
clients: $(CLIENTS)/.installed

$(CLIENTS)/.installed: Makefile | $(STAMP)
	$(PYTHON) -m venv $(CLIENTS)
	$(PIP_CLIENTS) playwright || echo "no playwright: the page is not tested in a browser"
	($(PIP_CLIENTS) litellm==1.106.2 requests aiohttp numpy tqdm pydantic ipython pybase64 orjson msgspec \
	transformers==5.3.0 pillow psutil pyzmq \
	&& $(PIP_CLIENTS) --no-deps sglang==0.5.10.post1 && touch $@) || echo "no litellm or sglang: their tests are skipped"

# What the TypeScript client and the page are built and tested with. Without npm, or offline, their tests are skipped and
# say so.
client-tools: clients/typescript/node_modules/.package-lock.json clients/ui/node_modules/.package-lock.json

clients/typescript/node_modules/.package-lock.json: clients/typescript/package-lock.json
	(cd clients/typescript && npm ci --ignore-scripts --no-audit --no-fund) || echo "no npm: the client's tests are skipped"

# The client's types, from the server's routes.
client: $(STAMP) client-tools
	$(BIN)/python -m tools.openapi | node clients/typescript/generate.mjs

# The page of /ui: its files are committed, so that nobody who installs Bough needs npm.
ui: clients/ui/node_modules/.package-lock.json
	cd clients/ui && npm run check && npm run build

clients/ui/node_modules/.package-lock.json: clients/ui/package-lock.json
	(cd clients/ui && npm ci --ignore-scripts --no-audit --no-fund) || echo "no npm: the page's bundle and accessibility are not tested"

# The same sources, compiler and SOURCE_DATE_EPOCH give the same bytes; the time is that of the last commit if not given.
EPOCH = SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)}

# WHEEL_MACHINE=x86_64 CC=x86_64-linux-gnu-gcc: a wheel for another machine than this one.
wheel: $(STAMP)
	rm -rf dist
	$(EPOCH) $(BIN)/python -m hatchling build --directory dist

# What this environment's Bough is made of, as CycloneDX.
sbom: $(STAMP)
	mkdir -p dist && $(EPOCH) $(BIN)/python -m tools.sbom > dist/bough.cdx.json

# Known vulnerabilities of what is installed, from the registry's own pages.
audit: $(STAMP)
	$(BIN)/python -m tools.audit

VARIANT ?= cpu
# The first that works: a docker without its daemon does not.
BUILDER ?= $(shell for each in podman docker buildah; do $$each info > /dev/null 2>&1 && echo $$each && break; done)

# BASE: another base image, of Debian or Ubuntu. BUILD_FLAGS: what else the builder is told.
image:
	@test -n "$(BUILDER)" || { echo "No podman, docker or buildah works here; install one, start its daemon, or name a builder with BUILDER=."; exit 1; }
	$(BUILDER) build $(BUILD_FLAGS) --file Containerfile --build-arg VARIANT=$(VARIANT) \
	$(if $(BASE),--build-arg BASE=$(BASE)) $(if $(TORCH_CPU_INDEX),--build-arg TORCH_CPU_INDEX=$(TORCH_CPU_INDEX)) --tag bough:$(VARIANT) .

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

demo: kernels
	$(BIN)/bough generate --temperature 0 --max-new-tokens 48 "The three primary colours are"

serve: kernels
	$(BIN)/bough serve

# What a stranger does first, in a clone, with its times: needs git, make and Python, and Chromium for the page.
ten-minutes:
	$(PYTHON) tools/ten_minutes.py $(TEN_MINUTES)

check: $(STAMP)
	$(BIN)/ruff check bough tests tools examples
	$(BIN)/ruff format --check bough tests tools examples
	$(BIN)/mypy

test: kernels clients schemas check
	$(PYTEST) -m "not slow and not long and not gpu"

# They wait for processes that they start and kill, so one more runs than there are cores.
test-slow: kernels clients client-tools schemas
	PYTEST_XDIST_AUTO_NUM_WORKERS=$$($(BIN)/python -c 'import psutil; print((psutil.cpu_count(logical=False) or 1) + 1)') \
	$(PYTEST) -m "slow and not long and not gpu"

test-long: kernels clients schemas
	$(PYTEST) -m "long and not gpu"

format: $(STAMP)
	$(BIN)/ruff check --fix bough tests tools examples
	$(BIN)/ruff format bough tests tools examples

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Schemas that other people wrote, for the tests of structured output. Where they cannot be had, those tests skip.
schemas: build/schemas/.fetched

build/schemas/.fetched: | $(STAMP)
	($(BIN)/python -m tests.constrained.fetch_suites && touch $@) || echo "no schemas: their tests are skipped"
