"""A DNS server on a UDP port, and the system's resolver pointed at it."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from senders import webhooks

_ADDRESS: Final = 1
"""The type of a question for IPv4 addresses."""


class _Server(ctypes.Structure):
    """glibc's `struct sockaddr_in`."""

    _fields_ = (
        ("family", ctypes.c_uint16),
        ("port", ctypes.c_uint16),
        ("address", ctypes.c_uint8 * 4),
        ("zero", ctypes.c_uint8 * 8),
    )


class _Resolver(ctypes.Structure):
    """The beginning of glibc's `struct __res_state`. Each thread has its own."""

    _fields_ = (
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("server_count", ctypes.c_int),
        ("servers", _Server * 3),
    )


class Names:
    """Answers each question for IPv4 addresses with the next of these lists, whatever the name, and has no IPv6
    addresses."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = itertools.cycle(answers)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        while True:
            question, peer = self._socket.recvfrom(512)
            if not question:
                return
            end = question.index(b"\0", 12) + 5
            (kind,) = struct.unpack(">H", question[end - 4 : end - 2])
            addresses = next(self._answers) if kind == _ADDRESS else ()
            head = question[:2] + struct.pack(">HHHHH", 0x8180, 1, len(addresses), 0, 0)
            # Each for the name at byte 12, in class 1, valid for 0 seconds.
            records = [struct.pack(">HHHIH", 0xC00C, _ADDRESS, 1, 0, 4) + socket.inet_aton(text) for text in addresses]
            self._socket.sendto(head + question[12:end] + b"".join(records), peer)

    def resolve(self, host: str, port: int) -> list[str]:
        """The sender's `resolve`, with this thread's resolver pointed at the server."""
        libc = ctypes.CDLL(None)
        libc["__res_init"]()
        state = libc["__res_state"]
        state.restype = ctypes.POINTER(_Resolver)
        resolver = state().contents
        resolver.server_count = 1
        resolver.servers[0].address[:] = socket.inet_aton("127.0.0.1")
        resolver.servers[0].port = socket.htons(self._socket.getsockname()[1])
        return webhooks.resolve(host, port)

    @contextlib.contextmanager
    def served(self) -> Iterator[Names]:
        self._thread.start()
        try:
            yield self
        finally:
            self._socket.sendto(b"", self._socket.getsockname())
            self._thread.join()
            self._socket.close()
