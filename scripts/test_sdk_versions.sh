#!/bin/sh
# Run the tests of the SDK and of its streams on each of the given Pythons that is there, in an environment of its own.
# What is missing is named. Fails if the tests fail on one that is there, or if none is there.
#
# The service of these tests runs on the same Python: tests/conftest.py imports it, and constraints/ hold for Python 3.11
# and later, with the hashes of the wheels of each. PySpark alone has none; it is built without running other packages' code.
set -u
cd "$(dirname "$0")/.."
tested="" failed="" missing=""
for python in "$@"; do
    # A shim of a version manager may be on the path without its Python.
    if ! version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
        missing="$missing $python"
        continue
    fi
    folder=".venv-$version"
    current=yes
    for locked in pyproject.toml constraints/server.txt constraints/run.txt constraints/dev.txt; do
        [ -n "$(find "$folder/.ready" -newer "$locked" 2>/dev/null)" ] || current=""
    done
    if [ -z "$current" ]; then
        locked="--require-hashes --no-build-isolation --only-binary :all: --no-binary pyspark"
        pip="$folder/bin/python -m pip install --quiet --disable-pip-version-check"
        # Unquoted: several words.
        "$python" -m venv "$folder" &&
            $pip $locked -r constraints/run.txt &&
            $pip $locked -r constraints/dev.txt &&
            $pip --no-deps --no-build-isolation -e . &&
            touch "$folder/.ready"
    fi && "$folder/bin/python" -m pytest -m "not slow" -n "${TEST_PROCESSES:-2}" --dist loadgroup tests/sdk tests/streams
    if [ $? -eq 0 ]; then tested="$tested $version"; else failed="$failed $version"; fi
done
echo "passed:${tested:- none}; failed:${failed:- none}; missing:${missing:- none}"
[ -z "$failed" ] && [ -n "$tested" ]
