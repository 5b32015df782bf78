# Everything that people run. Each target needs nothing before it but Debian, Python 3.11 and, for Spark, a JDK 17.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two steps, so that the first look does not wait for PySpark: the service and the SDK, then what tests need.
RUNS := $(VENV)/.runs
READY := $(VENV)/.ready
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
# pytest-xdist: three processes, one MariaDB each; with two, two cores would wait a third of the time.
TEST_PROCESSES ?= 3

.PHONY: demo test test-spark test-soak fuzz mutants serve lint format bench venv zip openapi screenshots clean

$(RUNS): pyproject.toml requirements/server.txt constraints.txt
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || scripts/need.sh python3-venv
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements/server.txt -e '.[cli]'
	@touch $@

$(READY): $(RUNS) requirements/dev.txt
	$(PIP) -r requirements/dev.txt
	@touch $@

venv: $(READY) ## .venv: the service, its jobs, all test dependencies, lastbit itself editable

demo: $(RUNS) ## a real fan-out, with crashes and duplicates, to its exact end
	@$(BIN)/python -m examples.demo

serve: $(RUNS) ## the service on SQLite at 127.0.0.1:8000
	$(BIN)/python -m api

test: $(READY) ## every test, on SQLite, a MariaDB, a RabbitMQ, a Redis, a Spark cluster of its own and in a Chromium
	@scripts/need.sh mariadb-server mariadb-backup sqlite3 rabbitmq-server redis-server default-jre-headless chromium
	$(BIN)/pytest -n $(TEST_PROCESSES) --dist loadgroup --durations 25

test-spark: $(READY) ## of these, lastbit.spark and its job alone
	@scripts/need.sh default-jre-headless
	$(BIN)/pytest tests/spark

test-soak: $(READY) ## the races and the state machine for much longer
	@scripts/need.sh mariadb-server mariadb-backup sqlite3
	LASTBIT_SOAK=1 $(BIN)/pytest -n $(TEST_PROCESSES) --timeout 7200 tests/guarantees

fuzz: $(READY) ## more requests, bodies and files than `make test` tries, others each time; within half an hour
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

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .import_linter_cache .hypothesis
