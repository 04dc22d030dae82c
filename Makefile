# make demo: a real prompt through a split cluster on this machine.   make test: the tests for a change.
# PYTHON=python3.12: the Python to use; default: the first of 3.11, 3.12 and 3.13 that exists.
# TORCH_INDEX=URL: a package index with the torch build to install; default: PyPI, whose torch includes CUDA.
ifndef PYTHON
PYTHON := $(firstword $(foreach each,python3.11 python3.12 python3.13,$(shell $(each) -c 'print("$(each)")' 2>/dev/null)))
endif
VENV := .venv
BIN := $(VENV)/bin
SERVES := $(VENV)/.serves
READY := $(VENV)/.ready
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# NIXL's build for the CUDA of the torch that is installed.
NIXL_EXTRA = $(BIN)/python -P kvtransfer/backends/nixl_build.py
JOBS ?= 2
# Tests start dozens of interpreters; with bytecode files each module is compiled once.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q
# Tests of `make quick`: without Ray and without a model.
QUICK := tests/test_imports.py tests/test_docs.py tests/test_configuration.py tests/engine tests/policy tests/costs

.PHONY: demo quick test test-all format check bench bench-engine study elastic sim-vs-real literature proto clean chaos fuzz pairs plan-acceptance shift autoscaler
.PHONY: gpu campaigns image image-test compare bench-outside clients pods

# make pairs MODEL=smollm2-135m: split equals colocated on every pair of parallel settings, with a real model.

# make fuzz ROUNDS=10: the property tests with new examples, ROUNDS times.
# make chaos ROUNDS=10: kill workers under load, ROUNDS times, with other prompts each time.

demo: $(SERVES)
	@$(BIN)/diptych demo

quick: $(READY)
	@$(PYTEST) -n $(JOBS) -m "not full and not ray and not model" $(QUICK)

# In three processes, which on two cores wait a quarter of the time; tests/conftest.py selects the tests. JOBS=0: in one process.
test: JOBS = 3
test: $(READY)
	@$(PYTEST) -n $(JOBS) --no-loadscope-reorder -m "not full"

# All tests, with reasons of skips: grids, small runs of benchmarks and searches, the autoscaler and the pods.
test-all: $(READY)
	@$(PYTEST) -rs -n $(JOBS) --no-loadscope-reorder
	@$(MAKE) --no-print-directory autoscaler
	@$(MAKE) --no-print-directory pods

# Small runs of benchmarks and searches: that they work and print their figures.
campaigns: $(READY)
	@$(PYTEST) -n $(JOBS) -m campaign

format: $(READY)
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict cluster benchmarks workers kvtransfer proto/diptych tests
	@$(BIN)/python -m pytest -q tests/test_imports.py tests/test_versions.py

# Checks and measures everything that a GPU must prove, in ten minutes at most. ARGS="--tiny --device cpu": here.
gpu: $(READY)
	@$(BIN)/python -m benchmarks.gpu $(ARGS)

bench: $(READY)
	@$(BIN)/python -m benchmarks

# The engine beside its peers (first: .venv/bin/python -m benchmarks peer-install), with a chart in bench-results/.
bench-engine: $(VENV)/.bench
	@$(BIN)/python -m benchmarks engine step --out bench-results

$(VENV)/.bench: $(READY)
	@$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[bench]'
	@touch $@

# The batching policies compared: docs/batching.md and its pictures. ARGS=--fitted: from the committed measurements.
study: $(VENV)/.bench
	@$(BIN)/python -m benchmarks.study $(ARGS)

# Shifting loads: ours against every system, every static split, colocated, and the best per phase, all simulated; writes
# benchmarks/results/elastic-campaign.md and its pictures. ARGS=--quick, ARGS=--full, ARGS="bursts day", ARGS=--recorded.
elastic: $(VENV)/.bench
	@$(BIN)/python -m benchmarks.elastic $(ARGS)

# A small load on the real cluster and in the simulator, 25 minutes: docs/simulator.md. ARGS=--recorded: simulate the same runs again.
sim-vs-real: $(READY)
	@$(BIN)/python -m benchmarks.sim_vs_real $(ARGS)

# Roles follow a shifting load on a real cluster, with equal tokens: four minutes. ARGS=--simulated: four workers that sleep.
shift: $(READY)
	@$(BIN)/python -m benchmarks.shift $(ARGS)

# A pool grows and shrinks with the load, and Ray's autoscaler adds and removes nodes: a minute.
autoscaler: $(READY)
	@DIPTYCH_AUTOSCALER=1 $(BIN)/python -m pytest -q tests/ray/test_autoscaler.py -k load

# The chart installed and upgraded under requests, its pods as processes in network namespaces: four minutes, as root.
pods: $(READY)
	@DIPTYCH_PODS=1 $(BIN)/python -m pytest -q -s tests/helm/test_processes.py tests/helm/test_guarded_processes.py \
		tests/helm/test_autoscaled_processes.py

# The image, under the name that the chart asks for. BUILDER="buildah bud", ARGS="--build-arg BASE_IMAGE=...".
image:
	$(or $(BUILDER),docker build) -t diptych:0.1.0 $(ARGS) .

# Builds the image with buildah on a bootstrapped Debian and runs it: ten minutes, as root, with buildah and debootstrap.
image-test: $(READY)
	@DIPTYCH_IMAGE=1 $(BIN)/python -m pytest -q -s tests/image/test_image.py

# One worker on both cores (whole prompts first, five chunk sizes, ours), and two workers (mixed, split, ours), on the same
# two cores, under three loads, with five seeds: about three hours. It goes on where it stopped, so it can run in pieces:
# LOADS=shifting ARGS="--seeds 2", COMPARED="examples/interference/split.yaml ...". See docs/benchmarking.md.
LOADS := interference decode-heavy shifting
CONFIGURATIONS := colocated chunk-64 chunk-128 chunk-256 chunk-512 chunk-1024 colocated-two split ours ours-two
COMPARED := $(CONFIGURATIONS:%=examples/interference/%.yaml)
compare: $(LOADS:%=compare-%)
compare-interference: LOAD = --workload poisson:rate=0.6,count=36,lengths=2x64/48+2x128/48+1024/48 --rates 0.6,3
compare-decode-heavy: LOAD = --workload poisson:rate=3,count=32,lengths=64-128/192-320
compare-decode-heavy: TPOT = 0.05
compare-shifting: LOAD = --workload "poisson:rate=1.2,count=15,lengths=1024/12 + poisson:rate=1.5,count=21,lengths=64/96"
TPOT = 0.15
compare-%: $(VENV)/.bench
	@$(BIN)/diptych bench --compare $(COMPARED) $(LOAD) --ttft 3 --tpot $(TPOT) --seeds 5 --resume -o bench-results/$* $(ARGS)

# guidellm and aiperf, unmodified, against our HTTP server; the first run creates an environment for each (minutes).
bench-outside: $(VENV)/.bench
	@$(BIN)/python -m benchmarks.outside $(ARGS)

# Client libraries, compliance suites and lm-eval, unmodified, against our HTTP server; the first run creates an environment
# for each (minutes).
clients: $(VENV)/.bench
	@$(BIN)/python -m benchmarks.clients $(ARGS)

chaos: $(READY)
	@DIPTYCH_CHAOS_ROUNDS=$(or $(ROUNDS),10) $(BIN)/python -m pytest -q tests/ray/test_exactness.py -k death

pairs: $(READY)
	@DIPTYCH_PAIRS_MODEL=$(or $(MODEL),smollm2-135m) $(BIN)/python -m pytest -q tests/cluster/test_pairs.py

# Full searches of placements from the literature; minutes to a quarter of an hour.
plan-acceptance: $(READY)
	@DIPTYCH_PLAN_ACCEPTANCE=1 $(BIN)/python -m pytest -q -s -o timeout=3600 tests/offline/plan/test_acceptance.py

fuzz: $(READY)
	@for round in $$(seq $(or $(ROUNDS),3)); do \
		HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -q -m hypothesis || exit 1; \
	done

# Long checks against the papers' own traces; needs the public traces (see tests/shared.py).
literature: $(READY)
	@DIPTYCH_LITERATURE=1 $(BIN)/python -m pytest -q -s tests/literature

proto: $(READY)
	@$(BIN)/python proto/generate_stubs.py

# For serving. torch comes first and pinned, so that its dependents do not install the largest build.
$(SERVES): pyproject.toml constraints.txt
	@$(if $(strip $(PYTHON)),,echo "Python 3.11, 3.12 or 3.13 is needed: install one, or name it: make PYTHON=/path/to/python" >&2; exit 1)
	@echo "== creating $(VENV) ($$($(PYTHON) --version))"
	@$(PYTHON) -m venv $(VENV)
	@echo "== installing torch (1 of 2)"
	@$(INSTALL) $(addprefix --index-url ,$(TORCH_INDEX)) torch==2.13.0
	@echo "== installing diptych (2 of 2)"
	@$(INSTALL) -e ".[$$($(NIXL_EXTRA)),http,structured]"
	@touch $@

$(READY): $(SERVES)
	@echo "== installing the tools for checks and tests"
	@$(INSTALL) -e ".[$$($(NIXL_EXTRA)),http,dev]"
	@touch $@

clean:
	rm -rf $(VENV)
