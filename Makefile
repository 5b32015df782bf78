# The commands that people run. They need Debian or Ubuntu, Python 3.11 and, for Spark, a JDK 17. `make` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two steps, so that `make demo` doesn't wait for PySpark: first the service and the SDK, then what tests need.
RUNS := $(VENV)/.runs
READY := $(VENV)/.ready
# PySpark and a package of Airflow 2 have no wheels; no other package runs code while it is installed.
PIP := -m pip install --quiet --disable-pip-version-check
LOCKED := $(PIP) --require-hashes --no-build-isolation --only-binary :all: --no-binary pyspark,python-nvd3
TOOLS := .tools
BUILD := .build
APART := airflow airflow2 recipes
SPARK35 := .venv-spark35
OLDEST := .venv-oldest
SEEKDB := .venv-seekdb
# Processes of pytest-xdist, each with its own MariaDB. With only two, two cores would be idle a third of the time.
TEST_PROCESSES ?= 3
# The interpreters of test-sdk-versions: names on the path, or paths.
PYTHONS ?= python3.11 python3.12 python3.13
TEST_SERVERS := mariadb-server mariadb-backup postgresql sqlite3 rabbitmq-server redis-server default-jre-headless chromium \
	nginx openssl prometheus systemd curl jq
XDIST := -n $(TEST_PROCESSES) --dist loadgroup
QUICK_TESTS := pytest -m "not slow and not nightly" $(XDIST)

.DEFAULT_GOAL := help
.PHONY: help demo demo-celery serve venv lint format prose twins openapi openapi-lint docs screenshots constraints clean test test-slow test-galera test-postgresql test-oceanbase test-nightly test-spark test-spark-connect test-spark-35 \
	test-airflow test-recipes test-howtos test-typescript test-generated test-sdk-versions test-oldest test-newest coverage bench test-soak explore chaos failover fuzz mutants release release-check dist zip sbom audit image-check

help: ## print this list
	@awk 'BEGIN { FS = ":.*## " } \
		/^##@ / { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z0-9-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

$(RUNS): pyproject.toml constraints/server.txt constraints/run.txt
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || scripts/need.sh python3-venv
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(LOCKED) -r constraints/run.txt
	$(BIN)/python $(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(READY): $(RUNS) constraints/dev.txt
	$(BIN)/python $(LOCKED) -r constraints/dev.txt
	@touch $@

# The packages of Airflow, and of the queues of docs/recipes.md, conflict with those in .venv. Airflow 2 needs a package
# without a wheel, and one for which an older pip finds no hash: the pip and setuptools that can install them come first.
$(APART:%=$(VENV)-%/.ready): $(VENV)-%/.ready: pyproject.toml constraints/%.txt
	$(PYTHON) -m venv $(@D)
	$(if $(filter airflow2,$*),grep -EA 2 --no-group-separator '^(pip|setuptools)==' constraints/$*.txt \
		| $(@D)/bin/python $(LOCKED) -r /dev/stdin)
	$(@D)/bin/python $(LOCKED) -r constraints/$*.txt
	$(@D)/bin/python $(PIP) --no-deps --no-build-isolation -e .
	@touch $@

# PySpark 3.5 needs older versions of pandas and NumPy. The first step installs the setuptools that builds it.
$(SPARK35)/.ready: pyproject.toml constraints/run.txt constraints/spark35.txt
	$(PYTHON) -m venv $(SPARK35)
	$(SPARK35)/bin/python $(LOCKED) -r constraints/run.txt
	$(SPARK35)/bin/python $(LOCKED) -r constraints/spark35.txt
	$(SPARK35)/bin/python $(PIP) --no-deps --no-build-isolation -e .
	@touch $@

# The lowest versions that the SDK and its extras allow, in front of the packages of .venv.
$(OLDEST)/.ready: $(READY) constraints/oldest.txt
	rm -rf $(OLDEST)
	$(BIN)/python -m venv --without-pip $(OLDEST)
	$(BIN)/python $(LOCKED) --no-deps --target $(OLDEST)/packages -r constraints/oldest.txt
	printf '%s\n' $(CURDIR) $(CURDIR)/$(OLDEST)/packages $(CURDIR)/$(VENV)/lib/python3.*/site-packages \
		> "$$(echo $(OLDEST)/lib/python3.*/site-packages)/oldest.pth"
	printf '#!%s\nfrom lastbit.__main__ import main\n\nmain()\n' $(CURDIR)/$(OLDEST)/bin/python > $(OLDEST)/bin/lastbit
	chmod +x $(OLDEST)/bin/lastbit
	@touch $@

# OceanBase's engine, a program in a wheel of 54 MB that has nothing in common with the other packages.
$(SEEKDB)/.ready: constraints/seekdb.txt
	$(PYTHON) -m venv $(SEEKDB)
	$(SEEKDB)/bin/python $(LOCKED) -r constraints/seekdb.txt
	@touch $@

# The generator for most languages is a Java program of 32 MB.
$(VENV)-generators/.ready: constraints/generators.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(LOCKED) -r constraints/generators.txt
	@touch $@

$(TOOLS)/.ready: constraints/tools.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python $(LOCKED) -r constraints/tools.txt
	@touch $@

$(BUILD)/.ready: constraints/dist.txt
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || scripts/need.sh python3-venv
	$(PYTHON) -m venv $(BUILD)
	$(BUILD)/bin/python $(LOCKED) -r constraints/dist.txt
	@touch $@

##@ Try it

demo: $(RUNS) ## run a fan-out with crashes and duplicates to its exact end
	@$(BIN)/python -m examples.demo

demo-celery: $(READY) ## run a fan-out of Celery tasks, with a worker that is killed
	@scripts/need.sh redis-server
	@$(BIN)/python -m examples.adapters.celery_demo

serve: $(RUNS) ## run the service on SQLite at 127.0.0.1:8000
	$(BIN)/python -m api

##@ Develop

venv: $(READY) ## install everything into .venv, lastbit itself as editable


lint: $(READY) ## check style, types, import rules and prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m scripts.prose

format: $(READY) ## let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

prose: $(READY) ## measure the prose; LIST=1: what to rewrite, COMPARE=1
	$(BIN)/python -m scripts.prose $(if $(LIST),--list,) $(if $(COMPARE),--compare,)

twins: $(READY) ## write the SDK's awaited classes after its others
	$(BIN)/python -m scripts.async_twins

openapi: $(READY) ## write openapi.yaml and the page of calls, from the app
	$(BIN)/python -m scripts.openapi

openapi-lint: ## lint openapi.yaml with Redocly and Spectral; needs Node 20
	$(PYTHON) -m scripts.openapi_lint

docs: $(READY) ## build the documentation as a site, in build/site
	$(BIN)/python -m mkdocs build --strict --quiet

screenshots: $(READY) ## take the pictures in docs/page.md again
	@scripts/need.sh chromium fonts-inter
	$(BIN)/python -m tests.page.screenshots

constraints: $(TOOLS)/.ready ## write constraints/ from requirements/; UPGRADE=1
	$(TOOLS)/bin/python -m scripts.constraints $(if $(UPGRADE),--upgrade,)

clean: ## remove environments, caches and built files
	rm -rf $(VENV) $(VENV)-* $(TOOLS) $(BUILD) .node .helm clients/typescript/node_modules clients/typescript/dist \
		clients/typescript/build dist build .coverage .coverage.* .mypy_cache .ruff_cache .import_linter_cache .hypothesis

##@ Test

test: $(READY) ## run all tests but the slow ones, on real servers
	@scripts/need.sh $(TEST_SERVERS)
	$(BIN)/$(QUICK_TESTS) --durations 25

test-slow: $(READY) $(SEEKDB)/.ready ## run the slow tests, or those that TESTS names
	@scripts/need.sh $(TEST_SERVERS) galera-4 rsync faketime
	$(BIN)/pytest -m "slow and not nightly" $(XDIST) --durations 10 $(TESTS)

test-galera: $(READY) ## run only those of the slow tests that use a cluster
	@scripts/need.sh $(TEST_SERVERS) galera-4 rsync faketime
	$(BIN)/pytest -m galera --durations 10

test-postgresql: $(READY) ## run the quick tests that use a server on PostgreSQL
	@scripts/need.sh $(TEST_SERVERS) faketime
	LASTBIT_TEST_DATABASES=postgresql $(BIN)/$(QUICK_TESTS) --ignore tests/explorer --durations 10

test-oceanbase: $(READY) $(SEEKDB)/.ready ## run the tests that use a server on OceanBase (seekdb)
	@scripts/need.sh $(TEST_SERVERS)
	LASTBIT_TEST_DATABASES=oceanbase $(BIN)/pytest -m "not nightly" --ignore tests/explorer $(XDIST) --durations 10

test-nightly: $(READY) ## run what repeats other tests, and takes long
	@scripts/need.sh $(TEST_SERVERS) faketime
	$(BIN)/pytest -m nightly $(XDIST) --durations 10
	LASTBIT_TEST_DATABASES=postgresql $(BIN)/pytest -m "slow or nightly" $(XDIST) --durations 10

test-spark: $(READY) ## run only the tests of lastbit.spark and its job
	@scripts/need.sh default-jre-headless
	$(BIN)/pytest tests/spark

test-spark-connect: $(READY) ## run the tests of lastbit.spark on Spark Connect
	@scripts/need.sh default-jre-headless
	LASTBIT_SPARK=connect $(BIN)/pytest tests/spark

test-spark-35: $(RUNS) $(SPARK35)/.ready ## run the tests of lastbit.spark on PySpark 3.5
	@scripts/need.sh default-jre-headless
	$(SPARK35)/bin/python -m pytest --confcutdir tests/spark tests/spark

test-airflow: $(RUNS) $(VENV)-airflow/.ready $(VENV)-airflow2/.ready ## run lastbit.integrations.airflow's tests on Airflow 3 and 2
	for airflow in airflow airflow2; do LASTBIT_SERVICE_PYTHON=$(BIN)/python $(VENV)-$$airflow/bin/python -m pytest \
		--confcutdir tests/integrations/airflow tests/integrations/airflow || exit 1; done

test-recipes: $(READY) $(VENV)-recipes/.ready ## run the recipes of docs/recipes.md on their queues
	@scripts/need.sh redis-server postgresql curl jq
	$(BIN)/pytest tests/integrations/recipes_check.py

test-howtos: $(READY) ## follow the README and how-to pages, from wheels; LATEST=1
	@scripts/need.sh python3-venv redis-server rabbitmq-server default-jre-headless
	$(if $(LATEST),LASTBIT_LATEST=1 )$(BIN)/python -m pytest tests/integrations/howtos_check.py

test-typescript: $(READY) ## run the tests of clients/typescript; needs Node 20
	$(BIN)/pytest tests/clients

test-generated: $(READY) $(VENV)-generators/.ready ## generate clients from openapi.yaml, and use them
	@scripts/need.sh default-jdk-headless
	$(BIN)/pytest tests/clients/generated_check.py

test-sdk-versions: ## run the SDK's tests on each Python in PYTHONS
	@scripts/need.sh rabbitmq-server redis-server
	@TEST_PROCESSES=$(TEST_PROCESSES) scripts/test_sdk_versions.sh $(PYTHONS)

test-oldest: $(OLDEST)/.ready ## run SDK and adapters on the oldest allowed versions
	@scripts/need.sh rabbitmq-server redis-server
	$(OLDEST)/bin/python -m $(QUICK_TESTS) tests/sdk tests/integrations --ignore tests/integrations/airflow

test-newest: $(READY) ## run adapters on the newest libraries; ADAPTER=celery
	@scripts/need.sh rabbitmq-server redis-server
	$(BIN)/python -m scripts.newest $(ADAPTER)

coverage: $(READY) ## run the tests of `make test` and print their coverage
	@scripts/need.sh $(TEST_SERVERS)
	@rm -f .coverage .coverage.*
	$(BIN)/coverage run -m $(QUICK_TESTS); status=$$?; \
		$(BIN)/coverage combine --quiet && $(BIN)/coverage report && exit $$status

bench: $(READY) ## print the benchmark tables; QUICK=1: a small run
	@scripts/need.sh mariadb-server postgresql redis-server
	$(BIN)/python -m bench $(if $(QUICK),--quick,)

##@ Test for longer

test-soak: $(READY) ## run the races and the state machine for much longer
	@scripts/need.sh mariadb-server mariadb-backup galera-4 rsync sqlite3 faketime
	LASTBIT_SOAK=1 $(BIN)/pytest -n $(TEST_PROCESSES) --timeout 7200 tests/guarantees

explore chaos: $(if $(filter oceanbase,$(DATABASE)),$(SEEKDB)/.ready)

explore: $(READY) ## try each interleaving, and resume; DATABASE=D, MINUTES
	@scripts/need.sh $(or $(filter postgresql,$(DATABASE)),mariadb-server)
ifdef DATABASE
	$(BIN)/python -m tests.explorer --database $(DATABASE) all --of 2 --progress .explored-$(DATABASE) $(MINUTES:%=--minutes %)
else
	$(BIN)/python -m tests.explorer all --progress .explored $(MINUTES:%=--minutes %)
	$(BIN)/python -m tests.explorer --database sqlite all --of 2 --progress .explored-sqlite $(MINUTES:%=--minutes %)
endif

chaos: $(READY) ## kill everything at random; MINUTES, SEED, DATABASE, LOSE=N
	@scripts/need.sh mariadb-server galera-4 rsync postgresql default-jre-headless
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),20) $(if $(SEED),--seed $(SEED)) $(if $(DATABASE),--database $(DATABASE)) $(if $(LOSE),--lose $(LOSE))

failover: $(READY) ## promote a PostgreSQL standby under load; PROMOTIONS=50
	@scripts/need.sh postgresql
	LASTBIT_PROMOTIONS=$(or $(PROMOTIONS),50) $(BIN)/python -m pytest -s -k promotions tests/guarantees/test_failover.py

fuzz: $(READY) ## fuzz for up to half an hour, with new inputs each time
	@scripts/need.sh default-jre-headless
	LASTBIT_FUZZ=1 $(BIN)/pytest -n $(TEST_PROCESSES) --dist loadgroup tests/fuzz tests/spark/test_bad_inputs.py

mutants: $(READY) ## break the code in known ways; each break must fail a test
	@scripts/need.sh mariadb-server
	$(BIN)/python -m tests.mutants

##@ Release

# The same commit makes the same bytes: names in order, no account, the time of the commit.
PACK = tar --create --sort=name --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --mtime=@$$(git log -1 --format=%ct)

release: $(READY) $(BUILD)/.ready ## build all files of a release in dist/; TAG=v1.0.0
	rm -rf dist build/site
	$(BIN)/python -m scripts.version $(TAG)
	$(MAKE) --no-print-directory dist zip sbom docs
	$(PACK) --directory build site | gzip --no-name > dist/lastbit-site.tar.gz
	$(PACK) Dockerfile .dockerignore constraints/server.txt dist/*.whl | gzip --no-name > dist/lastbit-image.tar.gz
	cd dist && sha256sum * > SHA256SUMS && cat SHA256SUMS

release-check: ## install and use dist/'s wheels on each Python in PYTHONS
	scripts/check_wheels.sh $(PYTHONS)

dist: $(BUILD)/.ready ## build both wheels in dist/
	$(BUILD)/bin/python -m scripts.dist

zip: ## build dist/lastbit.zip, the SDK for Spark's --py-files
	@mkdir -p dist
	$(PYTHON) -m scripts.zip_sdk dist/lastbit.zip

sbom: $(READY) ## build the wheel and its bill of materials in dist/
	$(BIN)/python -m scripts.sbom dist

# Make's own exit status is 2 whether a vulnerability is known or no service answered; the output tells which.
audit: $(TOOLS)/.ready ## look up known vulnerabilities of all locked packages
	@$(TOOLS)/bin/python -m scripts.audit

image-check: $(READY) ## run the Dockerfile's steps without Docker; Linux, as root
	$(BIN)/pytest --timeout 900 tests/image_check.py
