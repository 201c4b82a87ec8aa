# SPDX-License-Identifier: Apache-2.0
.DEFAULT_GOAL := help
SHELL := /bin/bash
CLUSTER ?= local
PYTHON ?= python3
# Each process takes the next file: tests of one file share their database and servers.
PROCESSES ?= --numprocesses auto --dist loadfile
# Tests that wait for databases, servers and processes more than half of the time: two processes for each core.
WAITING ?= --numprocesses $(shell echo $$(( $$(nproc) * 2 ))) --dist loadfile
# One process takes the tests of the servers that several files share, the other all others (tests/vllm/conftest.py).
SERVERS ?= --numprocesses 2 --dist loadfile

# What failed runs once more: one test among thousands that a busy machine held up shall not hide that all else passed.
define tests
$(1) || { test $$? = 1 && echo 'These failed, and run once more. One that passes now hangs on chance, in the test or in the code:' && \
	$(1) --last-failed --last-failed-no-failures none; }
endef

# Whatever the environment says: processes that tests start would compile all their modules each time.
unexport PYTHONDONTWRITEBYTECODE

# The theme's banner about its successor is no news: docs/develop/decisions has a page on it.
MKDOCS := NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs
# mike looks for mkdocs on the PATH.
MIKE := PATH="$(CURDIR)/.venv/bin:$$PATH" NO_MKDOCS_2_WARNING=1 mike

.PHONY: help
help: ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

.PHONY: demo
demo: ## From a bare machine to a completed round (CLUSTER=current: on the cluster of your kubeconfig)
	@$(PYTHON) -m hack.demo --cluster $(CLUSTER) \
		$(if $(OPERATOR_VALUES),--operator-values $(OPERATOR_VALUES)) $(if $(FLEET),--fleet $(FLEET))

.PHONY: demo-down
demo-down: ## End what the demo started on this machine
	@$(PYTHON) -m hack.cluster down

.PHONY: test
test: ## Everything that this machine can prove
	@mkdir -p build; \
	set -m; nice -n 19 $(PYTHON) -m hack.prepare >build/prepare.log 2>&1 </dev/null & set +m; \
	prepared=$$!; trap 'kill -- -$$prepared 2>/dev/null' EXIT; \
	$(MAKE) --no-print-directory check test-unit test-docs || exit; \
	echo 'What the builds beside these tests say:'; \
	wait $$prepared; ended=$$?; trap - EXIT; cat build/prepare.log; test $$ended = 0 || exit $$ended; \
	set -m; PATIENCE=3 nice -n 10 $(MAKE) --no-print-directory test-worker >build/test-worker.log 2>&1 </dev/null & set +m; \
	worker=$$!; trap 'kill -- -$$worker 2>/dev/null' EXIT; \
	PATIENCE=3 $(MAKE) --no-print-directory test-cluster 2>&1 | tee build/test-cluster.log; failed=$${PIPESTATUS[0]}; \
	echo 'What the tests of the worker beside these say:'; \
	wait $$worker; ended=$$?; trap - EXIT; cat build/test-worker.log; \
	test $$failed = 0 || { echo 'The tests on the cluster failed. The end of what they said:'; tail -n 50 build/test-cluster.log; exit $$failed; }; \
	exit $$ended

.PHONY: prepare
prepare: ## Build and download what a cluster needs; `make test` does it beside tests that need no cluster
	@$(PYTHON) -m hack.prepare

.PHONY: generate
generate: .venv/.lock ## Write the CRDs and reference pages anew from the typed API and the charts' values
	PYTHONPATH=operator:image .venv/bin/python -m hack.generate

.PHONY: verify
verify: .venv/.lock ## Fail if a generated file differs from what `make generate` would write
	PYTHONPATH=operator:image .venv/bin/python -m hack.generate --verify

.PHONY: check
check: .venv/.lock verify ## Format, lint, types, layers, generated files, links of the docs site
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	git ls-files '*.yaml' '*.yml' | xargs .venv/bin/yamllint --strict
	.venv/bin/mypy operator image hack benchmarks tests
	PYTHONPATH=operator:image .venv/bin/lint-imports
	$(MKDOCS) build --strict --quiet

unit_tests = tests/unit tests/wire tests/browser --ignore tests/unit/vllm_poc/maths --ignore tests/unit/vllm_poc/worker

.PHONY: test-unit
test-unit: .venv/.lock postgresql chromium ## Tests that need neither torch nor a cluster; both sides of the REST contract; the web page
	@$(call tests,.venv/bin/pytest $(WAITING) -m 'not long' $(unit_tests))

.PHONY: test-unit-long
test-unit-long: .venv/.lock postgresql ## Those of them that take long: gateways that are killed or hang, copies of one in use
	.venv/bin/pytest $(WAITING) -m long $(unit_tests)

.PHONY: postgresql
postgresql:
	@compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || $(PYTHON) -m hack.toolchain packages postgresql

.PHONY: chromium
chromium:
	@command -v chromium >/dev/null || $(PYTHON) -m hack.toolchain packages chromium

.PHONY: screenshots
screenshots: .venv/.lock chromium ## Take the docs' pictures of the web page anew
	PYTHONPATH=operator:image:. .venv/bin/python -m hack.screenshots

.PHONY: recording
recording: .venv/.lock ## Record the README's picture of a terminal anew, on the demo's cluster (CLUSTER=current)
	PYTHONPATH=operator:image:. .venv/bin/python -m hack.recording --cluster $(CLUSTER) $(if $(CAST),--cast $(CAST))

.PHONY: test-docs
test-docs: .venv/.lock ## Blocks of README and docs/, the chart, alerts, dashboards; builds Helm and promtool where they are missing
	@$(call tests,.venv/bin/pytest $(PROCESSES) tests/docs tests/monitoring tests/chart -m 'not cluster')

.PHONY: fuzz
fuzz: .venv/.lock postgresql ## Ten thousand mutated requests to the pod's routes, and as many to the gateway's
	FUZZ_EXAMPLES=10000 .venv/bin/pytest tests/wire/test_fuzz.py tests/wire/test_openapi.py
	FUZZ_EXAMPLES=10000 .venv/bin/pytest --log-cli-level=INFO tests/unit/poc_gateway/test_fuzz.py

.PHONY: histories
histories: .venv/.lock ## Ten thousand random histories for each property of the plans (HISTORIES=10000)
	HISTORIES=$(or $(HISTORIES),10000) .venv/bin/pytest --timeout 0 tests/unit/poc_operator/rounds -k 'histories or Histories or every_combination or take_turns'

# A cache of its own: other tests run meanwhile, and would write down their failures in place of these. A report on a
# release has the long tests, too.
worker_tests = "$$python" -m pytest $(SERVERS) $(if $(REPORT),,-m 'not long') -o cache_dir=build/pytest-worker tests/unit/vllm_poc/maths tests/unit/vllm_poc/worker tests/vllm

.PHONY: test-worker
test-worker: toolchain ## The maths, parts of the worker, and real vLLM on CPU (VLLM=0.23: on that release)
	@export OMP_NUM_THREADS=1; python="$$($(PYTHON) -m hack.vllm path $(if $(VLLM),--version $(VLLM)))/bin/python"; \
	$(if $(REPORT),$(worker_tests) --junitxml $(REPORT),$(call tests,$(worker_tests)))

.PHONY: test-versions
test-versions: ## Tests of the worker, long ones too, on each supported release (VERSIONS='0.25 0.28'); keeps what ran for the table of releases
	@failed=; for version in $(or $(VERSIONS),$$($(PYTHON) -m hack.vllm versions)); do \
		report=build/reports/vllm-$$version.xml; echo "vLLM $$version"; \
		$(MAKE) --no-print-directory test-worker VLLM=$$version REPORT=$$report && \
		$(PYTHON) -m hack.vllm record --version $$version --report $$report || failed="$$failed $$version"; \
	done; \
	$(MAKE) --no-print-directory generate && test -z "$$failed" || { echo "not passed:$$failed" >&2; exit 1; }

.PHONY: test-long
test-long: toolchain ## Chat, faults, rates and fuzz at length on real vLLM, in up to an hour
	"$$($(PYTHON) -m hack.vllm path)/bin/python" -m pytest tests/long

.PHONY: test-cluster
test-cluster: .venv/.lock toolchain ## The chart, real rounds, bad input and the pages of docs/ on a real cluster
	@$(call tests,.venv/bin/pytest --numprocesses 2 --durations 40 -m 'cluster and not long' tests/chart tests/cluster tests/docs)

.PHONY: test-upgrade
test-upgrade: .venv/.lock toolchain ## Upgrade and rollback under a round, fleets that span nodes, and what idle fleets cost, on a real cluster
	.venv/bin/pytest -m 'cluster and long' tests/cluster

.PHONY: chaos
chaos: .venv/.lock toolchain ## Random faults on simulated pods and a real API server (MINUTES=10 SEED=1)
	MINUTES=$(or $(MINUTES),10) SEED=$(or $(SEED),1) .venv/bin/pytest --log-cli-level=INFO tests/chaos

.PHONY: simulation
simulation: .venv/.lock toolchain ## A fleet of simulated pods and an operator on the local cluster, until Ctrl-C (PODS=20)
	PYTHONPATH=operator:image .venv/bin/python -m tests.simulation $(if $(PODS),--pods $(PODS))

.PHONY: toolchain
toolchain:
	@$(PYTHON) -m hack.toolchain

.PHONY: images
images: toolchain ## Build the images and print their names
	@$(PYTHON) -m hack.images

.PHONY: release-artifacts
release-artifacts: .venv/.lock ## Build all files of a release into build/release/VERSION (DOWNLOADS=URL for Krew's manifest)
	@PYTHONPATH=. .venv/bin/python -m hack.release build --downloads '$(DOWNLOADS)'

.PHONY: release-lock
release-lock: .venv/.lock ## Pin the newest Debian packages for the base of the images
	@PYTHONPATH=. .venv/bin/python -m hack.release lock

.PHONY: test-release
test-release: .venv/.lock ## Build the release twice, compare the bytes, start the programs of the images; needs root
	.venv/bin/pytest tests/release

.PHONY: audit
audit: .venv/.lock ## Look the locked packages up among known vulnerabilities
	@PYTHONPATH=. .venv/bin/python -m hack.release audit

.PHONY: check-workflows
check-workflows: .venv/.lock ## Check .github/workflows by the schema of GitHub Actions
	@PYTHONPATH=. .venv/bin/python -m hack.release check-workflows

.PHONY: docs
docs: .venv/.lock ## Build the docs site into build/site
	$(MKDOCS) build --strict

.PHONY: docs-serve
docs-serve: .venv/.lock ## Serve the docs site, and rebuild it as you type
	$(MKDOCS) serve

.PHONY: docs-version
docs-version: .venv/.lock ## Add the docs site as a version to the branch gh-pages (VERSION=0.1)
	@test -n '$(VERSION)' || { echo 'VERSION is not set: for example make docs-version VERSION=0.1' >&2; exit 1; }
	$(MIKE) deploy --update-aliases $(VERSION) latest
	$(MIKE) set-default latest

.PHONY: format
format: .venv/.lock ## Format the code
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

.PHONY: lock
lock: ## Resolve all dependencies anew
	hack/lock.sh

.venv/.lock: locks/dev.txt
	@uv=$$($(PYTHON) -m hack.uv path) && \
	$$uv venv --quiet --allow-existing --python $(PYTHON) .venv && \
	$$uv pip sync --quiet --python .venv/bin/python --require-hashes locks/dev.txt
	@cp locks/dev.txt .venv/.lock
