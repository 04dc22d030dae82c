# make demo: a real prompt through a split cluster on this machine.   make test: the whole suite.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-again check bench bench-engine study elastic sim-vs-real literature proto clean chaos fuzz pairs plan-acceptance shift autoscaler
.PHONY: campaigns image image-test compare bench-outside pods

# make pairs MODEL=smollm2-135m: split equals colocated on every pair of parallel settings, with a real model.

# make fuzz ROUNDS=10: the property tests with new examples, over and over.
# make chaos ROUNDS=10: kill workers under load, over and over, with other prompts each time.

demo: $(READY)
	@$(BIN)/diptych demo

# On two processes, see tests/conftest.py. JOBS=0: in one.
test: $(READY)
	@$(BIN)/python -m pytest -q -n $(or $(JOBS),2) --no-loadscope-reorder

# What failed in the last run, one test after the other, with the machine to itself.
test-again: $(READY)
	@echo "== again, alone: what failed"
	@$(BIN)/python -m pytest -q --last-failed --last-failed-no-failures none

# Benchmarks and searches in small: that they run, and that what they print is there.
campaigns: $(READY)
	@DIPTYCH_CAMPAIGNS=1 $(BIN)/python -m pytest -q -n $(or $(JOBS),2) -m campaign

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict cluster workers kvtransfer proto/diptych
	@$(BIN)/python -m pytest -q tests/test_imports.py

bench: $(READY)
	@$(BIN)/python -m benchmarks

# The engine beside its peers (once: bin/python -m benchmarks peer-install), with a chart in bench-results/.
bench-engine: $(VENV)/.bench
	@$(BIN)/python -m benchmarks engine step --out bench-results

$(VENV)/.bench: $(READY)
	@$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[bench]'
	@touch $@

# The batching policies compared: docs/batching.md and its pictures. ARGS=--fitted: from the committed measurements.
study: $(VENV)/.bench
	@$(BIN)/python -m benchmarks.study $(ARGS)

# Loads that shift: ours against every system, every static split, colocated, and the best per phase, all simulated; writes
# benchmarks/results/elastic-campaign.md and its pictures. ARGS=--quick, ARGS=--full, ARGS="bursts day", ARGS=--recorded.
elastic: $(VENV)/.bench
	@$(BIN)/python -m benchmarks.elastic $(ARGS)

# A small load on the real cluster and in the simulator: docs/simulator.md. ARGS=--recorded: simulate the same runs again.
sim-vs-real: $(READY)
	@$(BIN)/python -m benchmarks.sim_vs_real $(ARGS)

# Roles follow a load that shifts, on the real cluster, token for token: four minutes. ARGS=--modelled: four workers that sleep.
shift: $(READY)
	@$(BIN)/python -m benchmarks.shift $(ARGS)

# A pool grows and shrinks by load alone, and Ray's autoscaler brings the nodes: a minute.
autoscaler: $(READY)
	@DIPTYCH_AUTOSCALER=1 $(BIN)/python -m pytest -q tests/ray/test_autoscaler.py -k load

# The chart installed and upgraded under requests, its pods as processes in network namespaces: four minutes, as root.
pods: $(READY)
	@DIPTYCH_PODS=1 $(BIN)/python -m pytest -q -s tests/helm/test_processes.py tests/helm/test_guarded_processes.py \
		tests/helm/test_autoscaled_processes.py

# The image, under the name that the chart asks for. BUILDER="buildah bud", ARGS="--build-arg BASE_IMAGE=...".
image:
	$(or $(BUILDER),docker build) -t diptych:0.1.0 $(ARGS) .

# The image built by buildah on a Debian of its own, and run: ten minutes, as root, with buildah and debootstrap.
image-test: $(READY)
	@DIPTYCH_IMAGE=1 $(BIN)/python -m pytest -q -s tests/image/test_image.py

# Long prompts arrive while others decode: whole prompts first, four sizes of chunks, and split, on the same two cores, with
# five seeds; about an hour and a half. ARGS="--seeds 2 --rates 0.6": less. See docs/benchmarking.md.
INTERFERENCE := $(addprefix examples/interference/,$(addsuffix .yaml,colocated chunk-64 chunk-128 chunk-256 chunk-512 split))
compare: $(VENV)/.bench
	@$(BIN)/diptych bench --compare $(INTERFERENCE) \
		--workload poisson:rate=0.6,count=40,lengths=2x64/48+2x128/48+1024/48 --rates 0.35,0.6 \
		--ttft 3 --tpot 0.15 --seeds 5 -o bench-results/interference $(ARGS)

# guidellm and aiperf as they are, against our HTTP server; makes an environment for each at the first time (minutes).
bench-outside: $(VENV)/.bench
	@$(BIN)/python -m benchmarks.outside $(ARGS)

chaos: $(READY)
	@DIPTYCH_CHAOS_ROUNDS=$(or $(ROUNDS),10) $(BIN)/python -m pytest -q tests/ray/test_death.py

pairs: $(READY)
	@DIPTYCH_PAIRS_MODEL=$(or $(MODEL),smollm2-135m) $(BIN)/python -m pytest -q tests/cluster/test_pairs.py

# Placements of the literature, searched in full; minutes to a quarter of an hour.
plan-acceptance: $(READY)
	@DIPTYCH_PLAN_ACCEPTANCE=1 $(BIN)/python -m pytest -q -s -o timeout=3600 tests/offline/plan/test_acceptance.py

fuzz: $(READY)
	@for round in $$(seq $(or $(ROUNDS),3)); do \
		HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -q -m hypothesis || exit 1; \
	done

# What the papers' own traces say, at length; needs the public traces (tests/shared.py says where).
literature: $(READY)
	@DIPTYCH_LITERATURE=1 $(BIN)/python -m pytest -q -s tests/literature

proto: $(READY)
	@$(BIN)/python -m cluster.frontend.grpc.generate_stubs

# torch first and pinned: anything else that asks for torch then finds it, instead of the largest build there is.
$(READY): pyproject.toml constraints.txt
	@echo "== creating $(VENV) ($$($(PYTHON) --version))"
	@$(PYTHON) -m venv $(VENV)
	@echo "== installing torch (1 of 2)"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt torch==2.13.0
	@echo "== installing diptych and the rest (2 of 2)"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[nixl,http,dev]'
	@touch $(READY)

clean:
	rm -rf $(VENV)
