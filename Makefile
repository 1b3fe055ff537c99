# Every target works from a fresh clone: it makes its own environment first.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PYTHON     ?= python3
UV_VERSION := 0.13.8
VENV       := .venv
BIN        := $(VENV)/bin
STAMP      := $(VENV)/.in-step-with-uv.lock
LINT       := .cache/lint
WIRE       := agent/wire
PROTOS     := $(sort $(wildcard protos/*.proto))
MANIFESTS  := $(sort $(wildcard deploy/*.yaml deploy/manifests/*.yaml))
KUBERNETES := 1.36
TESTS      ?= tests
# Most of what the tests do is waiting for other processes.
WORKERS    ?= $(shell echo $$((2 * $$(nproc))))
PARALLEL    = -n $(WORKERS) --dist worksteal
BENCH      ?=
PEERS      ?=
WATCH      ?= 5
LONG       ?=
SYSTEMD    ?=
HOSTILE    ?=
CHART      ?=
PROMETHEUS ?=
BROWSER    ?=
RELEASE    ?=

# uv takes the interpreter that made the environment, never a downloaded one, whatever is active.
unexport VIRTUAL_ENV
# Each worker would compile the tests anew.
unexport PYTHONDONTWRITEBYTECODE
export UV_PROJECT_ENVIRONMENT := $(VENV)
export UV_PYTHON_DOWNLOADS := never
# As pip does: a company's own authority is in the system's store.
export UV_SYSTEM_CERTS := true

.PHONY: help
help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; name one: make PYTHON=/path/to/python3")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv==$(UV_VERSION)"

$(STAMP): uv.lock pyproject.toml | $(BIN)/uv
	$(BIN)/uv sync --quiet --locked
	@touch $@

$(LINT)/.in-step-with-uv.lock: uv.lock pyproject.toml | $(BIN)/uv
	UV_PROJECT_ENVIRONMENT=$(LINT) $(BIN)/uv sync --quiet --locked --only-group lint --python $(BIN)/python
	@touch $@

.PHONY: setup
setup: $(STAMP)  ## make .venv with the locked dependencies and tools

.PHONY: demo
demo: $(STAMP)  ## run the agent on a simulated node and check every claim
	$(BIN)/hami-agent sandbox

.PHONY: test
test: $(STAMP)  ## run all tests but the slow ones (TESTS=tests/unit/core runs some, WORKERS=0 one by one)
	$(BIN)/python -m pytest -q -m "not histories and not slow" $(PARALLEL) $(TESTS)

# Debian 12 has Python 3.11.2, in which a cancelled task meets its deadlines as cancellations.
.PHONY: test-system
test-system:  ## the same with the system's Python, if it is 3.11 or later: Debian 12 has the oldest that is promised
	@if /usr/bin/python3 -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))'; \
	then $(MAKE) test VENV=.cache/system PYTHON=/usr/bin/python3; \
	else $(MAKE) test; \
	fi

# A module's tests stay together, for some share what takes a minute.
.PHONY: test-slow
test-slow: $(STAMP)  ## run the tests that wait or compute for more than 5 s
	$(BIN)/python -m pytest -q -m slow -n $(WORKERS) --dist loadscope $(TESTS)

.PHONY: test-long
test-long: $(STAMP)  ## play 10,000 random histories of each kind (LONG=--histories=500)
	$(BIN)/python -m pytest -q -rP -m histories $(LONG) tests/machine
	$(BIN)/python -m pytest -q -m "not slow" --hypothesis-profile=night --timeout=900 $(PARALLEL) tests/unit tests/wire

.PHONY: test-hostile
test-hostile: $(STAMP)  ## attack a running agent while it serves pods, as root (HOSTILE='-k word')
	tests/hostile/run $(HOSTILE)

.PHONY: test-prometheus
test-prometheus: $(STAMP)  ## let a real Prometheus scrape an agent and judge alerts and dashboard (PROMETHEUS='-k word')
	tests/prometheus/run $(PROMETHEUS)

.PHONY: test-browser
test-browser: $(STAMP)  ## test the page in Debian's chromium and by axe-core (BROWSER='-k word')
	tests/browser/run $(BROWSER)

.PHONY: test-gpu
test-gpu: $(STAMP)  ## hold the driver to its contract on a real GPU and print what it says (WATCH=300 seconds)
	@if reason=$$($(BIN)/python -m tests.contract.real_driver 2>&1); \
	then $(BIN)/python -m pytest -q -m gpu --gpu-watch=$(WATCH) tests/contract; \
	else echo "test-gpu: skipped: $$reason"; fi

GPU_STUB = build/gpu-stub
.PHONY: test-gpu-stub
test-gpu-stub: $(STAMP)  ## the same over a stub of the driver's library, under its name
	rm -rf $(GPU_STUB) && mkdir -p $(GPU_STUB)
	cc -shared -fPIC -O1 -o $(GPU_STUB)/libnvidia-ml.so.1 tests/fakes/nvml_stub.c -ldl
	LD_LIBRARY_PATH=$(GPU_STUB) $(BIN)/python -m tests.contract.real_driver
	LD_LIBRARY_PATH=$(GPU_STUB) $(BIN)/python -m pytest -q -m gpu --gpu-watch=2 tests/contract

.PHONY: check
check: $(STAMP) $(LINT)/.in-step-with-uv.lock proto-check systemd-check manifests-check  ## formatting, lint, types, import directions, spelling, wire, units, manifests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(LINT)/bin/lint-imports
	$(BIN)/codespell

.PHONY: systemd-check
systemd-check:
	systemd/verify

.PHONY: manifests-check
manifests-check: $(STAMP)
	$(BIN)/kubernetes-validate -k $(KUBERNETES) --strict $(MANIFESTS)

.PHONY: manifests
manifests: $(STAMP)  ## render deploy/manifests and tests/golden/chart.txt from the chart, and its schema from the settings
	PYTHONPATH=. $(BIN)/python deploy/render.py "$$(tests/chart/build)/helm"
	HAMI_CHART_TOOLS="$$(tests/chart/build)" $(BIN)/python -m tests.chart.test_golden

.PHONY: settings
settings: $(STAMP)  ## write the settings into SETTINGS.md and into the schema of the chart's values
	PYTHONPATH=. $(BIN)/python deploy/render.py
	PYTHONPATH=. $(BIN)/python deploy/settings_page.py

.PHONY: metrics
metrics: $(STAMP)  ## write METRICS.md from the code
	PYTHONPATH=. $(BIN)/python deploy/metrics.py

.PHONY: golden
golden: $(STAMP)  ## write tests/golden: what the verbs, the page, /metrics and the API say
	PYTHONPATH=. $(BIN)/python -m tests.cli.test_explain > /dev/null
	HAMI_GOLDEN=1 $(BIN)/python -m pytest -q tests/cli tests/doors

.PHONY: chart-check
chart-check: $(STAMP)  ## judge the chart by helm, schemas and kube-score (first time 3 minutes; CHART='-k word')
	tests/chart/run $(CHART)

# $(call generate,DIR) writes the messages of protos/ to DIR. protoc finds its plugin, and the
# plugin its formatter, by name; that the plugin lists what it writes is of no interest.
generate = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iprotos \
	--python_betterproto2_out="$(1)" \
	--python_betterproto2_opt=server_generation=async,client_generation=async $(PROTOS) 2>$(1)/.log \
	|| { cat $(1)/.log; exit 1; }; rm -f $(1)/.log

.PHONY: proto
proto: $(STAMP)  ## generate agent/wire from protos/
	rm -rf $(WIRE) && mkdir -p $(WIRE)
	$(call generate,$(WIRE))

.PHONY: proto-check
proto-check: $(STAMP)
	@new=$$(mktemp -d); trap 'rm -rf "$$new"' EXIT; \
	$(call generate,$$new); \
	diff -ru --exclude=__pycache__ $(WIRE) "$$new" \
	|| { echo "agent/wire is not what protos/ say: run make proto"; exit 1; }

.PHONY: cover
cover: $(STAMP)  ## run all tests and hold the coverage to its limits
	rm -f .coverage .coverage.*
	$(BIN)/python -m pytest -q -m "not histories" $(PARALLEL) --cov --cov-report= --cov-fail-under=0 $(TESTS)
	@mkdir -p build
	$(BIN)/coverage json -q --fail-under=0 -o build/coverage.json
	$(BIN)/python -m tests.shape.subjects build/coverage.json
	$(BIN)/coverage report
	$(BIN)/coverage report --include="$$($(BIN)/python -m tests.shape.subjects pure)" --fail-under=100

.PHONY: bench
bench: $(STAMP)  ## measure the budgets (BENCH holds arguments)
	$(BIN)/python -m tests.bench $(BENCH)

.PHONY: peers
peers:  ## build the real peers into a cache folder (once, about 8 minutes)
	tests/peers/build

.PHONY: test-peers
test-peers: $(STAMP)  ## run the agent beside the real peers (PEERS=tests/peers/test_x.py or '-k word')
	tests/peers/run -m "not long" $(PEERS)

.PHONY: test-peers-long
test-peers-long: $(STAMP)  ## run what takes minutes beside the real peers (PEERS as above)
	tests/peers/run -m long $(PEERS)

.PHONY: test-systemd
test-systemd: $(STAMP)  ## run the service on a real systemd, in a container (SYSTEMD='-k word')
	tests/systemd/run $(SYSTEMD)

.PHONY: fmt
fmt: $(STAMP)  ## format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: build
build: $(STAMP)  ## build the wheel into dist/
	rm -rf dist
	$(BIN)/uv build --quiet --wheel
	ls -l dist/*.whl

.PHONY: image
image: $(STAMP)  ## build the image twice, byte for byte the same, into build/image/
	deploy/image/build

.PHONY: test-image
test-image: $(STAMP)  ## build the image and run it read-only under runc
	tests/image/run

.PHONY: release
release: $(STAMP)  ## build wheel, sources, chart, manifests, image, SBOM and checksums into build/release
	deploy/release

.PHONY: test-release
test-release: $(STAMP)  ## build a release and install it under a systemd and in a real cluster (RELEASE=files: look at it only)
	tests/release/run $(RELEASE)

.PHONY: facts
facts: $(STAMP)  ## print exposure, sizes, gaps and rights, as far as they were measured here
	$(BIN)/python deploy/facts.py

.PHONY: size
size: $(STAMP)  ## print lines and statements by room, and the words of the documents
	$(BIN)/python -m tests.shape.size

.PHONY: walk
walk: $(STAMP)  ## print the files that one Allocate, one scrape and one XID go through
	$(BIN)/python -m tests.shape.walk

.PHONY: clean
clean:  ## remove everything that make made
	rm -rf $(VENV) .cache build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
