# Everything that people run. Each target needs nothing before it but Debian, Python 3.11 and, for Spark, a JDK 17.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two steps, so that the first look does not wait for PySpark: the service and the SDK, then what tests need.
RUNS := $(VENV)/.runs
READY := $(VENV)/.ready
# Of PySpark alone there is no wheel: no other package's code runs while it is installed.
PIP := -m pip install --quiet --disable-pip-version-check
LOCKED := $(PIP) --require-hashes --no-build-isolation --only-binary :all: --no-binary pyspark
TOOLS := .tools
# pytest-xdist: three processes, one MariaDB each; with two, two cores would wait a third of the time.
TEST_PROCESSES ?= 3
# For test-sdk-versions; from the path, or with their paths.
PYTHONS ?= python3.11 python3.12 python3.13

.PHONY: demo test test-slow test-spark test-sdk-versions test-soak explore chaos fuzz mutants serve lint prose format bench venv zip openapi screenshots constraints audit sbom image-check clean

$(RUNS): pyproject.toml constraints/server.txt constraints/run.txt
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || scripts/need.sh python3-venv
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(LOCKED) -r constraints/run.txt
	$(BIN)/python $(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(READY): $(RUNS) constraints/dev.txt
	$(BIN)/python $(LOCKED) -r constraints/dev.txt
	@touch $@

$(TOOLS)/.ready: constraints/tools.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python $(LOCKED) -r constraints/tools.txt
	@touch $@

venv: $(READY) ## .venv: the service, its jobs, all test dependencies, lastbit itself editable

demo: $(RUNS) ## a real fan-out, with crashes and duplicates, to its exact end
	@$(BIN)/python -m examples.demo

serve: $(RUNS) ## the service on SQLite at 127.0.0.1:8000
	$(BIN)/python -m api

test: $(READY) ## what holds the guarantees, on SQLite, a MariaDB, a RabbitMQ, a Redis, a Spark of its own and in a Chromium
	@scripts/need.sh curl mariadb-server mariadb-backup sqlite3 rabbitmq-server redis-server default-jre-headless chromium
	$(BIN)/pytest -m "not slow" -n $(TEST_PROCESSES) --dist loadgroup --durations 25

test-slow: $(READY) ## the rest: a Galera cluster, a Spark cluster and its pipeline, chaos, upgrades under load, clocks that jump, fuzz
	@scripts/need.sh mariadb-server galera-4 rsync sqlite3 default-jre-headless faketime
	$(BIN)/pytest -m slow -n $(TEST_PROCESSES) --dist loadgroup --durations 10

test-spark: $(READY) ## of these, lastbit.spark and its job alone
	@scripts/need.sh default-jre-headless
	$(BIN)/pytest tests/spark

test-sdk-versions: ## the SDK's tests on each Python of PYTHONS that is there, in .venv-X.Y; names those that are missing
	@scripts/need.sh rabbitmq-server redis-server
	@TEST_PROCESSES=$(TEST_PROCESSES) scripts/test_sdk_versions.sh $(PYTHONS)

test-soak: $(READY) ## the races and the state machine for much longer
	@scripts/need.sh mariadb-server mariadb-backup galera-4 rsync sqlite3 faketime
	LASTBIT_SOAK=1 $(BIN)/pytest -n $(TEST_PROCESSES) --timeout 7200 tests/guarantees

explore: $(READY) ## every pair of operations with all interleavings of their statements, every triple with two preemptions; can be interrupted
	@scripts/need.sh mariadb-server
	$(BIN)/python -m tests.explorer all --progress .explored
	$(BIN)/python -m tests.explorer --database sqlite all --of 2 --progress .explored-sqlite

chaos: $(READY) ## everything is killed at random for MINUTES (20), then judged to the last bit; SEED=N repeats, GALERA=1
	@scripts/need.sh mariadb-server galera-4 rsync default-jre-headless
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),20) $(if $(SEED),--seed $(SEED)) $(if $(GALERA),--galera)

fuzz: $(READY) ## more requests, bodies and files than `make test-slow` tries, others each time; within half an hour
	@scripts/need.sh default-jre-headless
	LASTBIT_FUZZ=1 $(BIN)/pytest -n $(TEST_PROCESSES) --dist loadgroup tests/fuzz tests/spark/test_bad_inputs.py

mutants: $(READY) ## break the code in known ways; each must make its test fail
	@scripts/need.sh mariadb-server
	$(BIN)/python -m tests.guarantees.mutants

lint: $(READY) ## ruff, strict types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

prose: $(READY) ## how plainly the sources are written; LIST=1 names each place to rewrite, COMPARE=1 adds other projects
	$(BIN)/python -m scripts.prose $(if $(LIST),--list,) $(if $(COMPARE),--compare,)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

screenshots: $(READY) ## the pictures of docs/page.md, taken anew
	@scripts/need.sh chromium fonts-inter
	$(BIN)/python -m tests.page.screenshots

openapi: $(READY) ## write openapi.yaml from the app
	$(BIN)/python -m scripts.openapi

bench: $(READY) ## the benchmark tables; QUICK=1 runs them small
	@scripts/need.sh mariadb-server redis-server
	$(BIN)/python -m bench $(if $(QUICK),--quick,)

zip: ## dist/lastbit.zip, the SDK for Spark's --py-files
	@mkdir -p dist
	$(PYTHON) -m scripts.zip_sdk dist/lastbit.zip

constraints: $(TOOLS)/.ready ## write constraints/ after a change of requirements/; UPGRADE=1 takes the newest that fit
	$(TOOLS)/bin/python -m scripts.constraints $(if $(UPGRADE),--upgrade,)

audit: $(TOOLS)/.ready ## ask for known vulnerabilities of all that is locked; exit 2: could not ask
	@$(TOOLS)/bin/python -m scripts.audit

sbom: $(READY) ## dist/: the wheel, and sbom.cdx.json of it and of the image
	$(BIN)/python -m scripts.sbom dist

image-check: $(READY) ## the Dockerfile's steps without Docker, and the service from what they leave; Linux, as root
	$(BIN)/pytest --timeout 900 tests/image_check.py

clean:
	rm -rf $(VENV) $(VENV)-* $(TOOLS) dist build .mypy_cache .ruff_cache .import_linter_cache .hypothesis
