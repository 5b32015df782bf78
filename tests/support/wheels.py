"""Wheels rebuilt from the files of installed packages: a folder of them takes the place of PyPI."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ADDED_BY_INSTALLERS = {"INSTALLER", "REQUESTED", "RECORD", "direct_url.json"}


def with_dependencies(requirements: Iterable[Requirement]) -> Iterator[metadata.Distribution]:
    """The installed packages that satisfy `requirements`, and their dependencies, each once."""
    pending = list(requirements)
    names: set[str] = set()
    while pending:
        requirement = pending.pop()
        distribution = metadata.distribution(requirement.name)
        extras = {"", *requirement.extras}
        for dependency in map(Requirement, distribution.requires or []):
            marker = dependency.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                pending += [] if canonicalize_name(dependency.name) in names else [dependency]
        if (name := canonicalize_name(requirement.name)) not in names:
            names.add(name)
            yield distribution


def repack(distribution: metadata.Distribution, folder: Path) -> None:
    """Write the wheel of an installed package, without the files that its installation added and without hashes."""
    description = distribution.read_text("WHEEL") or ""
    tags = [line.removeprefix("Tag: ").split("-") for line in description.splitlines() if line.startswith("Tag: ")]
    tag = "-".join(".".join(sorted(set(parts))) for parts in zip(*tags, strict=True))
    name = f"{canonicalize_name(distribution.name).replace('-', '_')}-{distribution.version}"
    files = [path for path in distribution.files or [] if ".." not in path.parts and path.suffix != ".pyc"]
    (information,) = {path.parts[0] for path in files if path.parts[0].endswith(".dist-info")}
    files = [path for path in files if path.parts[0] != information or path.name not in ADDED_BY_INSTALLERS]
    with zipfile.ZipFile(folder / f"{name}-{tag}.whl", "w") as archive:
        for path in files:
            archive.write(str(path.locate()), str(path))
        record = f"{information}/RECORD"
        archive.writestr(record, "".join(f"{path},,\n" for path in [*files, record]))
