"""Install npm packages from a package-lock.json, once for each of its versions. This needs Node 20 and npm.

The lock files have versions and hashes but no addresses: npm takes the packages from its configured registry. `python
-m scripts.node_packages lock FOLDER…` writes them again after a change of package.json."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FILES = ("package.json", "package-lock.json")
OPTIONS = ("--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")


def install(source: Path, folder: Path) -> None:
    """Install the packages that `source` locks into `folder`/node_modules, unless they are there. Concurrent processes
    wait for each other, as npm would remove files that another one writes."""
    with (source / "package-lock.json").open() as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        _install(source, folder)


def _install(source: Path, folder: Path) -> None:
    digest = hashlib.sha256(b"".join((source / name).read_bytes() for name in FILES)).hexdigest()
    stamp = folder / "node_modules" / ".installed"
    if stamp.exists() and stamp.read_text() == digest:
        return
    folder.mkdir(parents=True, exist_ok=True)
    if folder != source:
        for name in FILES:
            shutil.copy(source / name, folder)
    subprocess.run(["npm", "ci", *OPTIONS], cwd=folder, check=True, stdout=subprocess.DEVNULL)  # noqa: S607
    stamp.write_text(digest)


def lock(source: Path) -> None:
    """Write `source`/package-lock.json."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(source / "package.json", folder)
        command = ["npm", "install", "--package-lock-only", "--omit-lockfile-registry-resolved", *OPTIONS]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        content = json.loads((folder / "package-lock.json").read_text())
    for package in content["packages"].values():
        package.pop("funding", None)  # the only other addresses
    (source / "package-lock.json").write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    command, *folders = sys.argv[1:] or [""]
    if command not in ("install", "lock") or not folders:
        raise SystemExit("usage: python -m scripts.node_packages install|lock FOLDER…")
    for name in folders:
        folder = Path(name).resolve()
        if command == "lock":
            lock(folder)
        else:
            install(folder, folder)


if __name__ == "__main__":
    main()
