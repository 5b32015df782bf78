"""Build the wheel, and write sbom.cdx.json next to it: the components of the image's Python and of the wheel, as
CycloneDX.

The image has the packages that the Dockerfile installs, constraints/server.txt, on Linux. The wheel's dependencies are
ranges; their versions here are those of constraints/. Licences and dependencies between packages come from the
environment that runs this. The same input gives the same bytes: no time, no random serial number, no address.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tomllib
import uuid
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, distribution
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import License
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import dist
from scripts.constraints import ROOT, Pin, read

IMAGE = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": "3.11.14",
    "python_version": "3.11",
    "sys_platform": "linux",
}
"""The environment in which markers are evaluated: the image's, on every machine."""
LICENSE_CLASSIFIER = re.compile(r"^License :: (?:OSI Approved :: )?(?!OSI Approved$)(.+)$")


def applies(requirement: Requirement, extras: Iterable[str] = ("",)) -> bool:
    """Whether a requirement applies in the image, with any of the given extras."""
    return requirement.marker is None or any(requirement.marker.evaluate({**IMAGE, "extra": extra}) for extra in extras)


def requirements(name: str) -> list[Requirement]:
    """The lines of requirements/NAME.txt that apply in the image."""
    lines = (ROOT / f"requirements/{name}.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]
    return [requirement for requirement in requirements if applies(requirement)]


def needs(root: Iterable[Requirement], pins: Mapping[str, Pin]) -> dict[str, set[str]]:
    """All packages that the requirements need: each package's name, with the names of its own dependencies."""
    graph: dict[str, set[str]] = {}
    pairs: set[tuple[str, str]] = set()
    queue = list(root)
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in pairs:
                continue
            pairs.add((name, extra))
            declarations = map(Requirement, installed(pins[name]).requires or ())
            dependencies = [dependency for dependency in declarations if applies(dependency, (extra,))]
            graph.setdefault(name, set()).update(canonicalize_name(dependency.name) for dependency in dependencies)
            queue += dependencies
    return graph


def installed(pin: Pin) -> Distribution:
    package = distribution(pin.name)
    if package.version != pin.version:
        sys.exit(f"{pin.name} is {package.version} here but {pin.version} in constraints/: run `make venv` first")
    return package


def licenses(pin: Pin) -> list[License]:
    """The licence in the package's metadata: an expression, or its classifiers, or a short text."""
    metadata = installed(pin).metadata
    matches = map(LICENSE_CLASSIFIER.match, metadata.get_all("Classifier", []))
    classifiers = [match[1] for match in matches if match]
    expressions = metadata.get_all("License-Expression", [])
    texts = [text for text in metadata.get_all("License", []) if len(text) < 80 and "\n" not in text]
    return [LicenseFactory().make_from_string(text) for text in expressions or classifiers or texts]


def sha256(digest: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=digest)


def package(pin: Pin) -> Component:
    """A pinned package; the hashes are those of all its files, one of which is installed."""
    purl = PackageURL("pypi", None, pin.name, pin.version)
    files = ExternalReference(
        type=ExternalReferenceType.DISTRIBUTION, url=XsUri(str(purl)), hashes=[sha256(digest) for digest in pin.hashes]
    )
    return Component(
        name=pin.name,
        version=pin.version,
        bom_ref=str(purl),
        purl=purl,
        licenses=licenses(pin),
        external_references=[files],
    )


def render(wheel: Path) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = project["version"]
    pins = {pin.name: pin for pin in read("run") if applies(pin.requirement)}
    of_wheel = [*map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["cli"]])]
    of_image = requirements("server")
    graph = needs([*of_image, *of_wheel], pins)
    packages = {name: package(pins[name]) for name in sorted(graph)}

    license = LicenseFactory().make_from_string(project["license"])
    purl = PackageURL("pypi", None, "lastbit", version)
    client = Component(
        name="lastbit",
        version=version,
        bom_ref=str(purl),
        purl=purl,
        licenses=[license],
        description="The wheel: client, command line and Spark parts; its dependencies with those of lastbit[cli]",
        hashes=[sha256(hashlib.sha256(wheel.read_bytes()).hexdigest())],
    )
    base = re.search(r"^ARG BASE=(\w+):(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert base is not None
    system = Component(type=ComponentType.CONTAINER, name=base[1], version=base[2], bom_ref="base-image")
    image = Component(
        type=ComponentType.CONTAINER,
        name="lastbit-image",
        version=version,
        bom_ref="image",
        licenses=[license],
        description="The service, its jobs and their Python packages; the contents of the base image are not listed",
    )
    root = Component(
        type=ComponentType.APPLICATION, name="lastbit", version=version, bom_ref="lastbit", licenses=[license]
    )

    bom = Bom(components=[client, image, system, *packages.values()])
    bom.metadata.component = root
    bom.register_dependency(root, [client, image])
    bom.register_dependency(client, {packages[canonicalize_name(pin.name)] for pin in of_wheel})
    bom.register_dependency(image, [system, *{packages[canonicalize_name(pin.name)] for pin in of_image}])
    bom.register_dependency(system)
    for name, dependencies in graph.items():
        bom.register_dependency(packages[name], [packages[dependency] for dependency in sorted(dependencies)])
    bom.metadata.timestamp = None  # type: ignore[assignment]  # optional in the schema
    bom.serial_number = uuid.UUID(int=0)
    content = JsonV1Dot6(bom).output_as_string()
    bom.serial_number = uuid.uuid5(uuid.NAMESPACE_OID, content)
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def main(folder: Path) -> None:
    wheel = dist.wheel(dist.sdk(), folder)
    (folder / "sbom.cdx.json").write_text(render(wheel))
    print(f"wrote {wheel.name} and sbom.cdx.json", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
