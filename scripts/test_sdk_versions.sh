#!/usr/bin/env bash
# Run the tests of the SDK and of its streams with each given Python, in an environment for each: .venv-X.Y.
# A Python that isn't installed is listed as missing. The script fails if tests fail with a Python, or if all are missing.
#
# The tests' service runs on the same Python, because tests/conftest.py imports it. constraints/ has the hashes of the
# wheels for Python 3.11 and later. PySpark alone has no wheel; it is built without running other packages' code.
set -u
cd "$(dirname "$0")/.."
passed="" failed="" missing=""

is_current() {
    for input in pyproject.toml constraints/server.txt constraints/run.txt constraints/dev.txt; do
        [ -n "$(find "$1/.ready" -newer "$input" 2>/dev/null)" ] || return 1
    done
}

install() {
    local python="$1" folder="$2"
    local pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
    local locked=(--require-hashes --no-build-isolation --only-binary :all: --no-binary pyspark)
    "$python" -m venv "$folder" &&
        "${pip[@]}" "${locked[@]}" -r constraints/run.txt &&
        "${pip[@]}" "${locked[@]}" -r constraints/dev.txt &&
        "${pip[@]}" --no-deps --no-build-isolation -e . &&
        touch "$folder/.ready"
}

for python in "$@"; do
    # A version manager can have a shim on the path without its Python.
    if ! version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
        missing="$missing $python"
        continue
    fi
    folder=".venv-$version"
    if { is_current "$folder" || install "$python" "$folder"; } &&
        "$folder/bin/python" -m pytest -m "not slow" -n "${TEST_PROCESSES:-2}" --dist loadgroup tests/sdk tests/streams; then
        passed="$passed $version"
    else
        failed="$failed $version"
    fi
done
echo "passed:${passed:- none}; failed:${failed:- none}; missing:${missing:- none}"
[ -z "$failed" ] && [ -n "$passed" ]
