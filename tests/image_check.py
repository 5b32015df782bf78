"""Tests of the image without Docker: the Dockerfile's steps run in overlays of this machine's own files, with this
Python as the base's, and the service runs from the result: as its user, without capabilities, on a read-only file
system.

For `make image-check`. Needs Linux, root and the package index; it mounts in its own namespace."""

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
    """A stage while it is built: `top` has the files that its steps changed, `root` is the whole file system."""

    top: Path
    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH, "LD_LIBRARY_PATH": "/usr/local/lib"})
    folder: str = "/"
    instructions: dict[str, str] = field(default_factory=dict)

    def at(self, path: str) -> Path:
        """A path of the stage, as its steps write it."""
        return self.root / os.path.normpath(Path(self.folder) / path).lstrip("/")

    def changed(self) -> Iterator[Path]:
        """Each file that the steps added or removed, relative to the stage's root."""
        for path in self.top.rglob("*"):
            if not path.is_dir() or path.is_symlink():
                yield path.relative_to(self.top)

    def removed(self, path: Path) -> bool:
        status = (self.top / path).lstat()
        return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


@dataclass(frozen=True)
class Image:
    layer: Layer

    def command(self, *words: str) -> list[str]:
        """The command, run as the container's user, without any capability or a way to gain one."""
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
    """Memory to build in, visible to this process only and gone with it."""
    unshare = getattr(ctypes.CDLL(None), "unshare", None)
    need("root, or a Linux with mount namespaces,", unshare is not None and unshare(NEW_MOUNT_NAMESPACE) == 0)
    mount("--make-rprivate", "/")
    folder = tmp_path_factory.mktemp("image")
    mount("-t", "tmpfs", "tmpfs", folder)
    return folder


@pytest.fixture(scope="session")
def base(place: Path) -> Path:
    """The stand-in for python:slim: this Python with its pip at /usr/local, and nothing else there."""
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
    """The files that .dockerignore lets into the build: the wheels of `make dist` and a file of the checkout."""
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
    """The last stage, after all steps of all stages."""
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


def carry_out(instruction: str, arguments: str, layer: Layer, built: Mapping[str, Layer], context: Path) -> None:
    layer.instructions[instruction] = arguments
    if instruction == "RUN":
        passed_on = {name: value for name, value in os.environ.items() if re.match(r"PIP_|SSL_|\w+_proxy$", name, re.I)}
        environment = {**passed_on, **layer.environment, "HOME": "/root"}
        command = ["chroot", layer.root, "env", "-C", layer.folder, "/bin/sh", "-c", arguments]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert process.returncode == 0, process.stdout + process.stderr
    elif instruction == "COPY":
        *sources, target = [source for source in shlex.split(arguments) if not source.startswith("--")]
        origin = re.search(r"--from=(\w+)", arguments)
        copied = (
            [built[origin[1]].at(source) for source in sources]
            if origin
            else [path for source in sources for path in context.glob(source)]
        )
        assert copied, arguments
        for path_ in copied:
            if path_.is_dir():
                shutil.copytree(path_, layer.at(target), symlinks=True, dirs_exist_ok=True)
            else:
                shutil.copy2(path_, layer.at(target) / path_.name if target.endswith("/") else layer.at(target))
    elif instruction == "WORKDIR":
        layer.folder = arguments
        layer.at(arguments).mkdir(parents=True, exist_ok=True)
    elif instruction == "ENV":
        for source in shlex.split(arguments):
            name, _, value = source.partition("=")
            layer.environment[name] = value.replace("$PATH", layer.environment["PATH"])
    else:
        assert instruction in {"LABEL", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "CMD"}, instruction


@pytest.fixture(scope="session")
def image(layer: Layer) -> Image:
    """The image: read-only, with an empty /tmp, and a volume with the owner that the image sets."""
    data = (layer.root / "data").stat()
    mount("-o", "remount,ro", layer.root)
    mount("-t", "tmpfs", "tmpfs", layer.root / "tmp")
    options = f"uid={data.st_uid},gid={data.st_gid},mode={stat.S_IMODE(data.st_mode):o}"
    mount("-t", "tmpfs", "-o", options, "tmpfs", layer.root / layer.instructions["VOLUME"].lstrip("/"))
    return Image(layer)


def test_the_image_has_the_files_of_the_wheels_and_no_more_of_the_checkout(layer: Layer, context: Path) -> None:
    """No tests, no documents, nothing for developers; each module is compiled, as nothing can be written later."""
    own_paths = [path for path in layer.changed() if path.is_relative_to(SITE) and path.parts[4].startswith("lastbit")]
    own_files = {path.relative_to(SITE).as_posix() for path in own_paths if ".dist-info" not in path.parts[4]}
    compiled = {file_name for file_name in own_files if file_name.endswith(".pyc")}
    expected = {
        name
        for wheel in (context / "dist").glob("*.whl")
        for name in zipfile.ZipFile(wheel).namelist()
        if ".dist-info/" not in name
    }
    assert own_files - compiled == expected
    assert len(compiled) == len([file_name for file_name in expected if file_name.endswith(".py")])


def test_the_image_has_the_locked_packages_and_no_others(layer: Layer) -> None:
    """The versions in constraints/server.txt, the two wheels of this project, and no installer."""
    folder = layer.root / SITE
    installed = {tuple(path.name.removesuffix(".dist-info").split("-")) for path in folder.glob("*.dist-info")}
    names = {(re.sub(r"[-_.]+", "-", name).lower(), version) for name, version in installed}
    others = {(name, version) for name, version in names if name not in ("lastbit", "lastbit-server")}
    assert len(names) == len(others) + 2
    assert others == {(pin.name, pin.version) for pin in read("server") if applies(pin.requirement)}
    assert not list((layer.root / "venv/bin").glob("pip*"))


def test_otherwise_the_image_changes_only_its_accounts(layer: Layer) -> None:
    """Everything else that was removed is in /usr/local; programs belong to root, and only root may write them."""
    for path in layer.changed():
        if path.parts[0] == "venv":
            status = (layer.top / path).lstat()
            assert status.st_uid == 0, path
            assert stat.S_ISLNK(status.st_mode) or not status.st_mode & 0o022, path
        elif layer.removed(path):
            assert path.parts[:2] == ("usr", "local"), path
        else:
            assert path.as_posix() in ACCOUNTS, path
    data = (layer.top / "data").stat()
    assert (str(data.st_uid), stat.S_IMODE(data.st_mode)) == (USER, 0o700)


@pytest.mark.parametrize("python", ["python", "/usr/local/bin/python3"])
@pytest.mark.parametrize("installer", ["pip", "ensurepip", "setuptools"])
def test_nothing_can_be_installed(image: Image, python: str, installer: str) -> None:
    """Neither the environment nor the base has an installer."""
    assert f"No module named {installer}" in image.run(python, "-m", installer).stderr


@pytest.mark.parametrize("path", [f"/{SITE}/lastbit_server/api/new.py", "/venv/new", "/etc/new", "/new"])
def test_nothing_can_be_written(image: Image, path: str) -> None:
    """Except in the volume and in /tmp."""
    process = image.run("python", "-c", f"open({path!r}, 'w')")
    assert re.search(r"PermissionError|Read-only file system", process.stderr)
    assert image.run("python", "-c", "open('/data/new', 'w'), open('/tmp/new', 'w')").returncode == 0


@contextlib.contextmanager
def serving(image: Image, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run the image's CMD; yield its process, and its URL once it is live."""
    url = f"http://127.0.0.1:{environment['LASTBIT_PORT']}"
    process = subprocess.Popen(
        image.command(*json.loads(image.layer.instructions["CMD"])), env={**image.layer.environment, **environment}
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
    command: list[str] = json.loads(image.layer.instructions["HEALTHCHECK"].partition("CMD ")[2])
    return command


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_service_runs_from_the_image_and_stops_on_its_signal(image: Image, workers: str) -> None:
    """As its user, without capabilities, with its defaults; healthy while it runs; its stop signal ends it."""
    result = CliRunner().invoke(cli, ["token", "new", "--role", "admin", "--name", "me", "--json"])
    token = json.loads(result.stdout)
    variables = {"LASTBIT_PORT": str(free_port()), "LASTBIT_WORKERS": workers, "LASTBIT_TOKENS": token["line"]}
    headers = {"Authorization": f"Bearer {token['token']}"}
    with serving(image, **variables) as (process, url):
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert re.search(rf"^Uid:\t{USER}\t{USER}\t{USER}\t{USER}$", status, re.MULTILINE)
        assert re.findall(r"^(?:CapEff|CapPrm|CapBnd):\t0+$", status, re.MULTILINE) != []
        assert "NoNewPrivs:\t1" in status
        assert image.run(*health(image), **variables).returncode == 0
        response = httpx.post(f"{url}/v1/batches", json={"key": "image", "items": 1, "sealed": True}, headers=headers)
        assert response.status_code == 201, response.text
        assert httpx.get(f"{url}/v1/batches").status_code == 401
        assert (image.layer.root / "data/lastbit.db").stat().st_uid == int(USER)
        for job in (["janitor"], ["dispatcher", "--once"]):
            job_process = image.run("lastbit-server", *job, **variables)
            assert job_process.returncode == 0, job_process.stderr
        stop = getattr(signal, image.layer.instructions["STOPSIGNAL"])
        process.send_signal(stop)
        # After draining, uvicorn raises the signal again, which ends every process except a container's first.
        assert process.wait(timeout=60) in (0, -stop)
    assert image.run(*health(image), **variables).returncode != 0
