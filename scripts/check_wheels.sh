#!/usr/bin/env bash
# Install the wheels of dist/ in an empty environment of each given Python, and use what they install. Their dependencies
# come from the package index, the newest that the wheels allow.
set -u
cd "$(dirname "$0")/.."
wheels=("$PWD"/dist/lastbit-*.whl "$PWD"/dist/lastbit_server-*.whl)
first_use="$PWD/scripts/first_use.py"
passed="" failed=""

check() {
    local python="$1" folder="$2"
    "$python" -m venv "$folder" &&
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "${wheels[@]}" &&
        "$folder/bin/python" -m pip check --disable-pip-version-check &&
        (cd "$folder" && env -u PYTHONPATH bin/python -I "$first_use")
}

for python in "$@"; do
    folder=$(mktemp -d)
    if check "$python" "$folder"; then passed="$passed $python"; else failed="$failed $python"; fi
    rm -rf "$folder"
done
echo "passed:${passed:- none}; failed:${failed:- none}"
[ -z "$failed" ] && [ -n "$passed" ]
