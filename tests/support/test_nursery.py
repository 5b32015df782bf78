"""Children of the nursery between their end and the report of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

from tests.support.nursery import Child


def test_a_signal_to_a_child_whose_end_is_not_reported_yet_goes_nowhere() -> None:
    """The child has been reaped, so its process id may already be another process's."""
    signals: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: signals.append(number))
    local, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(9)"])
    pidfd = os.pidfd_open(process.pid)
    socket.send_fds(remote, [str(os.getpid()).encode()], [pidfd])  # as if its process id were now ours
    os.close(pidfd)
    process.wait()
    child = Child(local)
    assert child.poll() is None
    child.send_signal(signal.SIGUSR1)
    remote.send(b"9")
    assert child.wait() == 9
    child.send_signal(signal.SIGUSR1)
    remote.close()
    signal.signal(signal.SIGUSR1, before)
    assert not signals
