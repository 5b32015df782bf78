"""Locked packages, the bill of materials, and the meaning of an audit's answer."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts import audit, constraints, sbom
from tests.support.servers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DIGEST = "0" * 64


def pinned(name: str) -> dict[str, constraints.Pin]:
    return {pin.name: pin for pin in constraints.read(name)}


def requirements_of(name: str) -> list[Requirement]:
    """The requirements that a set is resolved from: its own, those of included sets, and the project's."""
    lines = (ROOT / f"requirements/{name}.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]
    for line in lines:
        if line.startswith("-r "):
            requirements += requirements_of(line.removeprefix("-r ").removesuffix(".txt"))
    extras = {"run": ["cli"], "dev": constraints.extras(), **constraints.APART}.get(name)
    if extras is not None:
        requirements += map(Requirement, PROJECT["project"]["dependencies"])
        requirements += map(Requirement, PROJECT["build-system"]["requires"])
        requirements += [
            Requirement(line) for extra in extras for line in PROJECT["project"]["optional-dependencies"][extra]
        ]
    return requirements


@pytest.mark.parametrize("name", constraints.SETS)
def test_every_locked_package_has_its_exact_version_and_hashes_and_no_address(name: str) -> None:
    """Every line is such a package, so none can name an index, a file or a path in a repository."""
    text = (constraints.FOLDER / f"{name}.txt").read_text()
    pins = constraints.parse(text)
    assert pins
    assert all(pin.hashes and len(pin.hashes) == len(set(pin.hashes)) for pin in pins)
    assert not re.search(r"://|@|--(?!hash=)|file:", text)
    assert text == constraints.render(constraints.SETS[name], pins, [])


@pytest.mark.parametrize(
    "line",
    [
        f"h11>=0.16 --hash=sha256:{DIGEST}",
        "h11==0.16.0",
        f"h11==0.16.* --hash=sha256:{DIGEST}",
        f"h11 @ https://files.test/h11.whl --hash=sha256:{DIGEST}",
        f"h11==0.16.0 --index-url https://index.test --hash=sha256:{DIGEST}",
        f"h11==0.16.0 --hash=md5:{DIGEST}",
        "--index-url https://index.test",
        "-e .",
    ],
)
def test_a_line_that_locks_less_is_refused(line: str) -> None:
    """A range, no hash, a wildcard, an address, a weaker hash, an option."""
    with pytest.raises(ValueError, match="exact version and hashes"):
        constraints.parse(line)


@pytest.mark.parametrize("name", constraints.SETS)
def test_the_locked_versions_are_within_the_ranges(name: str) -> None:
    """Each requirement is locked within its range, in each set that has it; otherwise run `make constraints`."""
    pins = pinned(name)
    requirements = requirements_of(name)
    assert requirements
    for requirement in requirements:
        pin = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin.version, prereleases=True), str(requirement)


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    """Of the adapters' extras; otherwise run `make constraints`."""
    text = (constraints.FOLDER / "oldest.txt").read_text()
    pins = {pin.name: pin for pin in constraints.parse(text)}
    assert text == constraints.render(constraints.OLDEST, pins.values(), [])
    for requirement in constraints.direct(constraints.OLDEST):
        (lowest,) = (Version(each.version).release for each in requirement.specifier if each.operator == ">=")
        # The lowest release may have been withdrawn.
        assert Version(pins[canonicalize_name(requirement.name)].version).release[: len(lowest)] == lowest


@pytest.mark.parametrize("name", ["server", "run", "dev"])
def test_exactly_the_needed_packages_are_locked(name: str) -> None:
    """By the requirements of the installed packages. Tests run with the locked versions."""
    pins = {pin.name: pin for pin in constraints.read(name) if sbom.applies(pin.requirement)}
    needed = sbom.needs([requirement for requirement in requirements_of(name) if sbom.applies(requirement)], pins)
    assert set(needed) == set(pins)


@pytest.fixture(scope="module")
def bills(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two folders that `make sbom` filled, one after the other."""
    folders = [tmp_path_factory.mktemp("dist") for _ in range(2)]
    for folder in folders:
        sbom.main(folder)
    return folders


def test_the_bill_of_materials_is_valid_and_the_same_each_time(bills: list[Path]) -> None:
    """Checked against CycloneDX's own schema; and the wheel that it describes is the same, byte by byte."""
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in bills)
    assert first == second
    assert set(first) == {"sbom.cdx.json", f"lastbit-{PROJECT['project']['version']}-py3-none-any.whl"}
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(first["sbom.cdx.json"].decode()) is None


def test_the_bill_of_materials_names_each_package_its_hashes_and_its_license(bills: list[Path]) -> None:
    """The image's has every Linux package of constraints/server.txt; the wheel's has the dependencies of
    lastbit[cli]."""
    bill = json.loads((bills[0] / "sbom.cdx.json").read_text())
    pins = pinned("run")
    packages = {component["name"]: component for component in bill["components"] if "externalReferences" in component}
    for name, component in packages.items():
        assert (component["version"], component["purl"]) == (
            pins[name].version,
            f"pkg:pypi/{name}@{pins[name].version}",
        )
        assert {hash_["content"] for hash_ in component["externalReferences"][0]["hashes"]} == set(pins[name].hashes)
        assert component["licenses"], name
    dependencies = {component["ref"]: component.get("dependsOn", []) for component in bill["dependencies"]}
    assert dependencies["lastbit"] == ["image", f"pkg:pypi/lastbit@{PROJECT['project']['version']}"]

    def reachable(reference: str) -> set[str]:
        return {reference}.union(*(reachable(component) for component in dependencies[reference]))

    image = {reference.split("/")[-1].split("@")[0] for reference in reachable("image") if reference.startswith("pkg:")}
    assert image == {pin.name for pin in constraints.read("server") if sbom.applies(pin.requirement)}
    wheel = {reference.split("/")[-1].split("@")[0] for reference in reachable(dependencies["lastbit"][1])} - {
        "lastbit"
    }
    assert {"httpx", "click", "rich"} <= wheel
    assert image | wheel == set(packages)


def test_licences_of_the_image_that_ask_for_more_than_a_notice_are_named(bills: list[Path]) -> None:
    """Beside the image's own, and on the page."""
    components = json.loads((bills[0] / "sbom.cdx.json").read_text())["components"]
    image = pinned("server")
    licences = {each["name"]: json.dumps(each["licenses"]) for each in components if each["name"] in image}
    copyleft = {name: text for name, text in licences.items() if re.search("GPL|MPL|Mozilla", text)}
    assert copyleft == dict.fromkeys(("psycopg", "psycopg-binary"), '[{"license": {"id": "LGPL-3.0-only"}}]')
    assert 'licenses="Apache-2.0 AND LGPL-3.0-only"' in (ROOT / "Dockerfile").read_text()
    page = (ROOT / "docs/supply-chain.md").read_text()
    assert all(text in page for text in ("LGPL-3.0-only", "`psycopg`", "`psycopg-binary`"))


def test_the_bill_of_materials_contains_no_path(bills: list[Path]) -> None:
    """No path of the machine that made it, and no index."""
    text = (bills[0] / "sbom.cdx.json").read_text()
    for place in (str(ROOT), str(bills[0]), str(Path.home()), "file:"):
        assert place not in text
    assert set(re.findall(r"\w+://[^\"]*", text)) == {"http://cyclonedx.org/schema/bom-1.6.schema.json"}


SAFE = {"name": "h11", "version": "0.16.0", "vulns": []}
UNSAFE = {"name": "idna", "version": "3.6", "vulns": [{"id": "PYSEC-2024-60", "fix_versions": ["3.7"]}]}
SKIPPED = {"name": "mako", "skip_reason": "Dependency not found on PyPI and could not be audited: mako (1.4.3)"}


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        ([SAFE], 0, "no vulnerability is known"),
        ([SAFE, UNSAFE], 1, "idna 3.6: PYSEC-2024-60, mended in 3.7"),
        ([SAFE, SKIPPED], 2, "could not check 1 of 2 packages: mako"),
        ([UNSAFE, SKIPPED], 1, "could not check 1 of 2 packages: mako"),
        ([], 2, "could not check 0 of 0"),
    ],
)
def test_an_incomplete_audit_does_not_report_success(
    answer: list[dict[str, object]], status: int, message: str
) -> None:
    """pip-audit's exit status is 0 for packages that the service doesn't know."""
    verdict, lines = audit.verdict(answer)
    assert verdict == status
    assert message in "\n".join(lines)
