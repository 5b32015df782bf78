"""nginx with a configuration of deploy/nginx, whose ports, addresses and names are replaced."""

from __future__ import annotations

import contextlib
import getpass
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tests.support.servers import ROOT

EXAMPLES: Final = ROOT / "deploy/nginx"
PROGRAM: Final = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin")
_MAIN: Final = """
user {user};
daemon off;
worker_processes 1;
pid {folder}/pid;
error_log {folder}/error.log warn;
events {{ worker_connections 512; }}
http {{
    log_format connections '$upstream_addr $request_uri $upstream_connect_time';
    access_log {log} connections;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/lastbit.conf;
}}
"""


def example(name: str, replacements: Mapping[str, str]) -> str:
    """The example, in which each key, which occurs once, is replaced."""
    text = (EXAMPLES / name).read_text()
    for old, new in replacements.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@contextlib.contextmanager
def running_nginx(folder: Path, configuration: str, port: int, *, logs: bool = True) -> Iterator[None]:
    """nginx with this configuration for its http block, until the context ends. It listens at `port`."""
    (folder / "lastbit.conf").write_text(configuration)
    log = folder / "access.log" if logs else "/dev/null"
    (folder / "nginx.conf").write_text(_MAIN.format(folder=folder, user=getpass.getuser(), log=log))
    command = [str(PROGRAM), "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]
    test = subprocess.run([*command, "-t"], capture_output=True, text=True)
    assert test.returncode == 0, test.stderr
    process = subprocess.Popen(command)
    try:
        _wait_until_it_listens(port)
        yield
    finally:
        process.terminate()
        process.wait(20)


def _wait_until_it_listens(port: int) -> None:
    pause = threading.Event()
    for _ in range(400):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        pause.wait(0.05)
    raise AssertionError("nginx did not start")
