"""Each mutant fits the code: its text occurs once, and its test exists. `make mutants` runs the tests themselves."""

from __future__ import annotations

from pathlib import Path

from tests.guarantees.mutants import MUTANTS


def test_each_mutant_fits_the_code() -> None:
    faults = []
    for mutant in MUTANTS:
        try:
            mutant.build()
        except Exception as error:  # noqa: BLE001  # all of them are listed
            faults.append(f"{mutant.name}: {error!r}")
    assert faults == []


def test_each_mutant_names_a_test_that_exists() -> None:
    faults = []
    for mutant in MUTANTS:
        file, _, name = mutant.test.partition("::")
        path = Path(__file__).parent / file
        if not path.exists() or f"def {name.partition('[')[0]}(" not in path.read_text():
            faults.append(f"{mutant.name}: {mutant.test}")
    assert faults == []
