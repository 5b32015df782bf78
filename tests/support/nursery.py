"""Processes that start at once, forked from a process that has already imported the service and the command line.

`python -m tests.support.nursery FD` is that process: it receives requests over the socket FD, forks, and reports each
child's process id and exit status. A child behaves as `python -m MODULE ARGUMENTS`, without the second that imports
take. `Nursery` is its client.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
MESSAGE = 2**20
"""The size in bytes of the longest request."""


class Child:
    """The part of `subprocess.Popen` that tests need.

    This process isn't its parent and doesn't reap it: between the child's end and the report of it, its process id may
    belong to no process, or to another one. So signals go through the child's own pidfd, which the child has sent.
    """

    def __init__(self, news: socket.socket) -> None:
        self._news = news
        message, (self._pidfd,), _, _ = socket.recv_fds(news, 64, 1)
        self.pid = int(message)
        self.returncode: int | None = None

    def __del__(self) -> None:
        os.close(self._pidfd)

    def _receive(self, timeout: float | None) -> int:
        self._news.settimeout(timeout)
        self.returncode = int(self._news.recv(64))
        self._news.close()
        return self.returncode

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                return self._receive(0)
            except BlockingIOError:
                return None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return self._receive(timeout) if self.returncode is None else self.returncode

    def send_signal(self, number: int) -> None:
        """Does nothing if the child has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)


class Nursery:
    """The client of that process."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def _open(self) -> socket.socket:
        """Start the process when it is first needed."""
        if self._control is None:
            self._control, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE)
            command = [sys.executable, "-m", "tests.support.nursery", str(remote.fileno())]
            with remote:
                self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[remote.fileno()])
        return self._control

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdin: IO[bytes] | int = 0,
        stdout: IO[bytes] | int = 1,
        stderr: IO[bytes] | int = 2,
    ) -> Child:
        """Start a child in its own session, in the checkout's root."""
        control = self._open()
        local, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        standard = [stream if isinstance(stream, int) else stream.fileno() for stream in (stdin, stdout, stderr)]
        with remote:
            message = json.dumps({"module": module, "arguments": [*arguments], "environment": dict(environment)})
            socket.send_fds(control, [message.encode()], [remote.fileno(), *standard])
        return Child(local)

    def run(
        self, module: str, arguments: Sequence[str], *, environment: Mapping[str, str], input: bytes, timeout: float
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a child to its end."""
        with (
            tempfile.TemporaryFile() as input_file,
            tempfile.TemporaryFile() as output_file,
            tempfile.TemporaryFile() as err,
        ):
            input_file.write(input)
            input_file.seek(0)
            child = self.start(
                module, arguments, environment=environment, stdin=input_file, stdout=output_file, stderr=err
            )
            try:
                code = child.wait(timeout)
            finally:
                child.send_signal(signal.SIGKILL)
            output_file.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess([module, *arguments], code, output_file.read(), err.read())

    def close(self) -> None:
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.wait(30)


def _become(request: dict, files: list[int]) -> None:  # type: ignore[type-arg]
    """Set up the state of an interpreter that has just started."""
    news = socket.socket(fileno=files[0])
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for number, file in enumerate(files[1:]):
        os.dup2(file, number)
        os.close(file)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        raw = open(stream.fileno(), f"{mode}b", closefd=False)  # noqa: SIM115  # it stays open
        eager = name == "stderr" or (name == "stdout" and raw.isatty())
        setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=eager))
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["module"], *request["arguments"]]
    pidfd = os.pidfd_open(os.getpid())
    socket.send_fds(news, [str(os.getpid()).encode()], [pidfd])
    os.close(pidfd)
    news.close()


def _serve(control: socket.socket) -> str | None:
    """Fork for each request. Returns in the parent when no more requests can come; in a child, returns its module."""
    awake, wake = socket.socketpair()
    for end in (awake, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    children: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([control, awake], [], [])
        if awake in ready:
            awake.recv(1024)
            _report_ended(children)
        if control in ready:
            message, files, _, _ = socket.recv_fds(control, MESSAGE, 4)
            if not message:
                return None
            pid = os.fork()
            if not pid:
                for resource in (control, awake, wake, *children.values()):
                    resource.close()
                request = json.loads(message)
                _become(request, files)
                module: str = request["module"]
                return module
            children[pid] = socket.socket(fileno=files[0])
            for file in files[1:]:
                os.close(file)


def _report_ended(children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            break
        with children.pop(pid) as news, contextlib.suppress(OSError):  # the client may have gone
            news.send(str(os.waitstatus_to_exitcode(status)).encode())


if __name__ == "__main__":
    import api.app  # noqa: F401  # what `python -m api` imports by name
    import lastbit.cli
    import lastbit.client  # noqa: F401

    gc.collect()
    gc.freeze()
    module = _serve(socket.socket(fileno=int(sys.argv[1])))
    if module is not None:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
