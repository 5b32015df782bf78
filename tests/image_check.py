"""The image, without Docker: the Dockerfile's steps in overlays of this machine's own files, with this Python as the
base's, and the service run from what they leave: as its user, without capabilities, where nothing can be written.

For `make image-check`. Wants Linux, root and the package index; mounts in a namespace of its own."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from lastbit.cli import cli
from scripts import dist
from scripts.constraints import read
from scripts.sbom import applies
from tests.conftest import need
from tests.support.dockerfile import let_in, stages
from tests.support.servers import ROOT, free_port

USER = "10001"
NEW_MOUNT_NAMESPACE = 0x20000
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
PATH = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"
SITE = f"venv/lib/{PYTHON}/site-packages"
ACCOUNTS = {f"etc/{name}{end}" for name in ("passwd", "group", "shadow", "gshadow") for end in ("", "-")} | {
    "etc/.pwd.lock",
    *(f"etc/{name}{end}" for name in ("subuid", "subgid") for end in ("", "-")),
}


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


@dataclass
class Layer:
    """A stage while it is built: `top` has what its steps changed, `root` is the whole."""

    top: Path
    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH, "LD_LIBRARY_PATH": "/usr/local/lib"})
    folder: str = "/"
    told: dict[str, str] = field(default_factory=dict)

    def at(self, path: str) -> Path:
        """A path of the stage, as its steps write it."""
        return self.root / os.path.normpath(Path(self.folder) / path).lstrip("/")

    def changed(self) -> Iterator[Path]:
        """Each file that the steps brought, and each that they removed, from the stage's root."""
        for path in self.top.rglob("*"):
            if not path.is_dir() or path.is_symlink():
                yield path.relative_to(self.top)

    def removed(self, path: Path) -> bool:
        found = (self.top / path).lstat()
        return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


@dataclass(frozen=True)
class Image:
    layer: Layer

    def command(self, *words: str) -> list[str]:
        """As the container's user, without a capability and without a way to one."""
        group = (self.layer.root / "data").stat().st_gid
        drop = ["--clear-groups", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
        start = ["chroot", str(self.layer.root), "setpriv", "--reuid", USER, "--regid", str(group), *drop]
        return [*start, "env", "-C", self.layer.folder, *words]

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words),
            env={**self.layer.environment, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Memory to build in, seen by this process alone and gone with it."""
    unshare = getattr(ctypes.CDLL(None), "unshare", None)
    need("root, or a Linux with mount namespaces,", unshare is not None and unshare(NEW_MOUNT_NAMESPACE) == 0)
    mount("--make-rprivate", "/")
    folder = tmp_path_factory.mktemp("image")
    mount("-t", "tmpfs", "tmpfs", folder)
    return folder


@pytest.fixture(scope="session")
def base(place: Path) -> Path:
    """What stands in for python:slim: this Python with its pip at /usr/local, and nothing else there."""
    local, own = place / "base/usr/local", Path(sys.base_prefix)
    ignored = shutil.ignore_patterns("test", "tests", "idlelib", "tkinter", "__pycache__", "*.a", "config-*")
    shutil.copytree(own / "lib" / PYTHON, local / "lib" / PYTHON, symlinks=True, ignore=ignored)
    for library in (own / "lib").glob("libpython*"):
        shutil.copy2(library, local / "lib")
    (local / "bin").mkdir()
    shutil.copy2(own / "bin" / PYTHON, local / "bin" / PYTHON)
    for name in ("python", "python3"):
        (local / "bin" / name).symlink_to(PYTHON)
    pip = local / "bin/pip"
    pip.write_text(
        f"#!/usr/local/bin/{PYTHON}\nimport sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n"
    )
    pip.chmod(0o755)
    os.setxattr(local, "trusted.overlay.opaque", b"y")
    return place / "base"


@pytest.fixture(scope="session")
def context(place: Path) -> Path:
    """What .dockerignore lets into the build: the wheels of `make dist` and a file of the checkout."""
    folder = place / "context"
    wheels, names = "dist/*.whl", set(let_in())
    assert wheels in names
    dist.main(folder / "dist")
    for name in names - {wheels}:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def layer(place: Path, base: Path, context: Path) -> Layer:
    """The last stage, with all steps of all stages done."""
    built: dict[str, Layer] = {}
    for number, stage in enumerate(stages()):
        folder = place / f"stage-{number}"
        for part in ("top", "work", "root"):
            (folder / part).mkdir(parents=True)
        options = f"lowerdir={base}:/,upperdir={folder / 'top'},workdir={folder / 'work'}"
        mount("-t", "overlay", "overlay", "-o", options, folder / "root")
        mount("-t", "proc", "proc", folder / "root/proc")
        mount("--rbind", "/dev", folder / "root/dev")
        built[stage.name] = Layer(folder / "top", folder / "root")
        for word, rest in stage.steps:
            carry_out(word, rest, built[stage.name], built, context)
    return built[""]


def carry_out(word: str, rest: str, layer: Layer, built: Mapping[str, Layer], context: Path) -> None:
    layer.told[word] = rest
    if word == "RUN":
        passed = {name: value for name, value in os.environ.items() if re.match(r"PIP_|SSL_|\w+_proxy$", name, re.I)}
        environment = {**passed, **layer.environment, "HOME": "/root"}
        command = ["chroot", layer.root, "env", "-C", layer.folder, "/bin/sh", "-c", rest]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    elif word == "COPY":
        *sources, target = [each for each in shlex.split(rest) if not each.startswith("--")]
        origin = re.search(r"--from=(\w+)", rest)
        copied = (
            [built[origin[1]].at(each) for each in sources]
            if origin
            else [path for each in sources for path in context.glob(each)]
        )
        assert copied, rest
        for found in copied:
            if found.is_dir():
                shutil.copytree(found, layer.at(target), symlinks=True, dirs_exist_ok=True)
            else:
                shutil.copy2(found, layer.at(target) / found.name if target.endswith("/") else layer.at(target))
    elif word == "WORKDIR":
        layer.folder = rest
        layer.at(rest).mkdir(parents=True, exist_ok=True)
    elif word == "ENV":
        for each in shlex.split(rest):
            name, _, value = each.partition("=")
            layer.environment[name] = value.replace("$PATH", layer.environment["PATH"])
    else:
        assert word in {"LABEL", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "CMD"}, word


@pytest.fixture(scope="session")
def image(layer: Layer) -> Image:
    """Read-only, with an empty /tmp, and a volume that belongs to whom the image gives it."""
    data = (layer.root / "data").stat()
    mount("-o", "remount,ro", layer.root)
    mount("-t", "tmpfs", "tmpfs", layer.root / "tmp")
    options = f"uid={data.st_uid},gid={data.st_gid},mode={stat.S_IMODE(data.st_mode):o}"
    mount("-t", "tmpfs", "-o", options, "tmpfs", layer.root / layer.told["VOLUME"].lstrip("/"))
    return Image(layer)


def test_the_image_has_the_files_of_the_wheels_and_no_more_of_the_checkout(layer: Layer, context: Path) -> None:
    """No tests, no documents, nothing for developers; each module compiled, as nothing can be written later."""
    ours = [path for path in layer.changed() if path.is_relative_to(SITE) and path.parts[4].startswith("lastbit")]
    found = {path.relative_to(SITE).as_posix() for path in ours if ".dist-info" not in path.parts[4]}
    compiled = {each for each in found if each.endswith(".pyc")}
    expected = {
        name
        for wheel in (context / "dist").glob("*.whl")
        for name in zipfile.ZipFile(wheel).namelist()
        if ".dist-info/" not in name
    }
    assert found - compiled == expected
    assert len(compiled) == len([each for each in expected if each.endswith(".py")])


def test_the_image_has_the_locked_packages_and_no_others(layer: Layer) -> None:
    """Those of constraints/server.txt, in these versions, our two, and no installer."""
    folder = layer.root / SITE
    found = {tuple(path.name.removesuffix(".dist-info").split("-")) for path in folder.glob("*.dist-info")}
    names = {(re.sub(r"[-_.]+", "-", name).lower(), version) for name, version in found}
    others = {(name, version) for name, version in names if name not in ("lastbit", "lastbit-server")}
    assert len(names) == len(others) + 2
    assert others == {(pin.name, pin.version) for pin in read("server") if applies(pin.requirement)}
    assert not list((layer.root / "venv/bin").glob("pip*"))


def test_beside_these_the_image_changes_its_accounts_alone(layer: Layer) -> None:
    """What else is gone, is gone from /usr/local; nobody but root owns what runs, and nobody else may write it."""
    for path in layer.changed():
        if path.parts[0] == "venv":
            found = (layer.top / path).lstat()
            assert found.st_uid == 0, path
            assert stat.S_ISLNK(found.st_mode) or not found.st_mode & 0o022, path
        elif layer.removed(path):
            assert path.parts[:2] == ("usr", "local"), path
        else:
            assert path.as_posix() in ACCOUNTS, path
    data = (layer.top / "data").stat()
    assert (str(data.st_uid), stat.S_IMODE(data.st_mode)) == (USER, 0o700)


@pytest.mark.parametrize("python", ["python", "/usr/local/bin/python3"])
@pytest.mark.parametrize("installer", ["pip", "ensurepip", "setuptools"])
def test_nothing_can_be_installed(image: Image, python: str, installer: str) -> None:
    """Neither in the environment nor in the base is anything that could."""
    assert f"No module named {installer}" in image.run(python, "-m", installer).stderr


@pytest.mark.parametrize("path", [f"/{SITE}/lastbit_server/_app/api/new.py", "/venv/new", "/etc/new", "/new"])
def test_nothing_can_be_written(image: Image, path: str) -> None:
    """But in the volume and in /tmp."""
    refused = image.run("python", "-c", f"open({path!r}, 'w')")
    assert re.search(r"PermissionError|Read-only file system", refused.stderr)
    assert image.run("python", "-c", "open('/data/new', 'w'), open('/tmp/new', 'w')").returncode == 0


@contextlib.contextmanager
def serving(image: Image, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The image's CMD; its process, and its URL once it is alive."""
    url = f"http://127.0.0.1:{environment['LASTBIT_PORT']}"
    process = subprocess.Popen(
        image.command(*json.loads(image.layer.told["CMD"])), env={**image.layer.environment, **environment}
    )
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/healthz").status_code == 200:
                    break
            assert process.poll() is None, "the service has ended"
            assert time.monotonic() < deadline, "the service does not answer"
            time.sleep(0.05)
        yield process, url
    finally:
        process.kill()
        process.wait()


def health(image: Image) -> list[str]:
    found: list[str] = json.loads(image.layer.told["HEALTHCHECK"].partition("CMD ")[2])
    return found


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_service_runs_from_it_and_ends_when_it_is_told(image: Image, workers: str) -> None:
    """As its user, without capabilities, on its defaults; healthy while it runs; its signal ends it."""
    made = CliRunner().invoke(cli, ["token", "new", "--role", "admin", "--name", "me", "--json"])
    token = json.loads(made.stdout)
    told = {"LASTBIT_PORT": str(free_port()), "LASTBIT_WORKERS": workers, "LASTBIT_TOKENS": token["line"]}
    headers = {"Authorization": f"Bearer {token['token']}"}
    with serving(image, **told) as (process, url):
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert re.search(rf"^Uid:\t{USER}\t{USER}\t{USER}\t{USER}$", status, re.MULTILINE)
        assert re.findall(r"^(?:CapEff|CapPrm|CapBnd):\t0+$", status, re.MULTILINE) != []
        assert "NoNewPrivs:\t1" in status
        assert image.run(*health(image), **told).returncode == 0
        opened = httpx.post(f"{url}/v1/batches", json={"key": "image", "items": 1, "sealed": True}, headers=headers)
        assert opened.status_code == 201, opened.text
        assert httpx.get(f"{url}/v1/batches").status_code == 401
        assert (image.layer.root / "data/lastbit.db").stat().st_uid == int(USER)
        for job in (["janitor"], ["dispatcher", "--once"]):
            ran = image.run("lastbit-server", *job, **told)
            assert ran.returncode == 0, ran.stderr
        stop = getattr(signal, image.layer.told["STOPSIGNAL"])
        process.send_signal(stop)
        # Done with draining, uvicorn lets the signal have its way, which ends all processes but a container's first.
        assert process.wait(timeout=60) in (0, -stop)
    assert image.run(*health(image), **told).returncode != 0
