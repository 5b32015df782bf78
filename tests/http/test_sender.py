"""The sender: where it connects, what it sends, and how it reports receivers that misbehave."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import structlog

from core.webhooks.addresses import NOT_FOUND, NOT_PUBLIC, Unfit
from core.webhooks.sender import SendResult
from lastbit import __version__
from senders import webhooks
from senders.webhooks import WebhookSender
from tests.mutants import mutant
from tests.support.names import Names
from tests.support.receivers import Got, Handler, Receiver, raw, receiving, status

BODY = b'{"type":"x"}'


def send(url: str, sender: WebhookSender | None = None) -> SendResult:
    sender = sender or WebhookSender(allow_private=True)
    return sender.send(url, {"webhook-id": "one"}, BODY)


class Resolver:
    """Returns these lists of addresses one after the other, and repeats the last one."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def test_a_request_identifies_lastbit_and_carries_nothing_else(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cookies, no proxy from the environment, no unrelated header."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    receiver.reply = status(200, Set_Cookie="a=b")
    sender = WebhookSender(allow_private=True)
    for _ in range(2):
        assert send(receiver.url + "?a=b", sender).delivered
    for delivery in receiver.got:
        assert delivery.path == "/hook?a=b"
        assert delivery.body == BODY
        assert delivery.headers == {
            "host": receiver.url.split("/")[2],
            "user-agent": f"Lastbit/{__version__}",
            "content-type": "application/json",
            "accept": "*/*",
            "content-length": str(len(BODY)),
            "webhook-id": "one",
        }


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_a_failure_and_not_followed(receiver: Receiver, code: int) -> None:
    """Wherever it leads."""
    with receiving() as other:
        receiver.reply = status(code, Location=other.url)
        answer = send(receiver.url)
        assert (answer.status, answer.error, answer.delivered) == (code, "a redirect, which is not followed", False)
        assert other.got == []


@pytest.mark.parametrize(
    ("reply", "status", "message"),
    [
        (b"", None, "closed before the response"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", None, "closed before the response"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nten bytes.", 200, "in the middle of the response"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nten", 200, "in the middle of the response"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", None, "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: nine\r\n\r\n", None, "not HTTP"),
        (b"\x00\xff" * 50_000, None, "not HTTP"),
    ],
)
def test_an_incomplete_answer_is_a_failure(receiver: Receiver, reply: bytes, status: int | None, message: str) -> None:
    """With any status, and with a readable error."""
    receiver.reply = raw(reply)
    answer = send(receiver.url)
    assert answer.status == status
    assert message in (answer.error or "")
    assert not answer.delivered


def test_only_a_few_kilobytes_of_a_large_answer_are_read(receiver: Receiver) -> None:
    """It doesn't wait for the rest."""
    written = threading.Event()

    def endless(handler: Handler, _: Got) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                handler.wfile.write(b"x" * 65_536)
        except ConnectionError:
            written.set()

    receiver.reply = endless
    assert send(receiver.url).delivered
    assert written.wait(30)


@pytest.mark.parametrize("part", [b"", b"H", b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"])
def test_the_timeout_covers_the_whole_exchange(receiver: Receiver, part: bytes) -> None:
    """Single bytes don't extend it: neither before the answer, nor in its head, nor in its body."""
    finish = threading.Event()

    def drip(handler: Handler, _: Got) -> None:
        handler.wfile.write(part)
        while not finish.wait(0.02):
            if part:
                handler.wfile.write(b"T")

    receiver.reply = drip
    answer = send(receiver.url, WebhookSender(allow_private=True, timeout=0.3))
    finish.set()
    assert answer.error is not None
    assert "within 0.3 s" in answer.error or "not HTTP" in answer.error
    assert answer.milliseconds < 5000


@mutant(
    "a-lookup-may-take-the-whole-time",
    "senders.webhooks:WebhookSender._look_up",
    "min(LOOKUP, deadline.left())",
    "deadline.left()",
)
@pytest.mark.parametrize(("timeout", "lookup"), [(0.2, 60), (5, 0.2)])
def test_a_resolver_that_hangs_is_not_waited_for(
    timeout: float, lookup: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time counts too, and it has less than the whole send."""
    finish = threading.Event()

    def hang(host: str, port: int) -> list[str]:
        finish.wait(60)
        return ["127.0.0.1"]

    monkeypatch.setattr(webhooks, "LOOKUP", lookup)
    answer = send("http://hooks.example/", WebhookSender(resolve=hang, timeout=timeout))
    finish.set()
    assert answer.error == f"not sent: {NOT_FOUND}"
    assert answer.milliseconds < 3000


def test_a_refused_connection_is_reported(receiver: Receiver) -> None:
    """The error doesn't contain the address."""
    with socket.socket() as closed_port:
        closed_port.bind(("127.0.0.1", 0))
        answer = send(f"http://hooks.example:{closed_port.getsockname()[1]}/", to("127.0.0.1"))
    assert (answer.status, answer.error) == (None, "the connection was refused")


def to(*addresses: str, **options: bool) -> WebhookSender:
    return WebhookSender(resolve=Resolver(addresses), **{"allow_private": True, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("120", 120), ("0", 0), ("9" * 40, 999_999_999_999), ("soon", None), ("-5", None), ("1.5", None), ("١", None)],
)
def test_retry_after_is_read(receiver: Receiver, header: str, seconds: float | None) -> None:
    """In seconds; an unreadable value counts as none."""
    receiver.reply = raw(
        f"HTTP/1.1 503 Busy\r\nRetry-After: {header}\r\nContent-Length: 0\r\n\r\n".encode("latin-1", "replace")
    )
    assert send(receiver.url).retry_after == seconds


def test_retry_after_can_be_a_date(receiver: Receiver) -> None:
    """A past date means now."""
    receiver.replies(
        status(503, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"),
        status(503, Retry_After="Fri, 31 Dec 9998 07:28:00 GMT"),
    )
    assert send(receiver.url).retry_after == 0
    assert (send(receiver.url).retry_after or 0) > 10**9


def test_a_date_in_retry_after_is_relative_to_the_receivers_clock(receiver: Receiver) -> None:
    """Its clock may be years off, and so may this machine's."""
    headers = b"Date: Wed, 21 Oct 2015 07:28:00 GMT\r\nRetry-After: Wed, 21 Oct 2015 07:30:00 GMT\r\nContent-Length: 0"
    receiver.reply = raw(b"HTTP/1.1 503 Busy\r\n" + headers + b"\r\n\r\n")
    assert send(receiver.url).retry_after == 120


@mutant("localhost-is-resolved", "core.webhooks.addresses:is_private", '".localhost"', '".local"')
@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254", "10.0.0.1", "0.0.0.0", "[::]"),
        *("[fe80::1]", "[fd00::1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "100.64.0.1", "224.0.0.1"),
        *("localhost", "LocalHost.", "hooks.localhost"),
    ],
)
def test_addresses_that_are_not_public_are_refused(receiver: Receiver, host: str) -> None:
    """Without a lookup, when the webhook is created and when it is sent; nothing arrives."""
    url = f"http://{host}:{receiver.url.split(':')[2]}"
    sender = WebhookSender(resolve=Resolver(["93.184.216.34"]))
    with pytest.raises(Unfit, match="an address that is not public"):
        sender.check(url)
    answer = send(url, sender)
    assert (answer.status, answer.error) == (None, f"not sent: the host is {NOT_PUBLIC}")
    assert receiver.got == []


@pytest.mark.parametrize("url", ["http://localhostess.example/", "http://local.host/", "http://8.8.8.8/"])
def test_other_hosts_are_accepted_without_a_lookup(url: str) -> None:
    """A request that creates a webhook must not wait for a server of its client's choice."""
    resolver = Resolver([])
    WebhookSender(resolve=resolver).check(url)
    assert resolver.asked == []


@mutant(
    "an-error-tells-that-a-name-exists",
    "senders.webhooks:WebhookSender._addresses",
    """"the host can't be resolved" if self._allow_private else NOT_FOUND""",
    """NOT_PUBLIC if addresses else NOT_FOUND""",
)
@pytest.mark.parametrize("addresses", [[], ["10.9.8.7"], ["93.184.216.34", "10.9.8.7"]])
def test_a_refused_name_is_not_told_from_one_that_does_not_exist(addresses: list[str]) -> None:
    """Every address is checked, since the connection could use any of them. The error names none of them; the log says
    the cause."""
    with structlog.testing.capture_logs() as lines:
        error = send("http://hooks.example/", WebhookSender(resolve=Resolver(addresses))).error
    assert error == f"not sent: {NOT_FOUND}"
    assert "10.9.8.7" not in error
    (line,) = lines
    assert (line["event"], line["host"]) == ("host_refused", "hooks.example")
    assert ("public" in line["cause"]) == bool(addresses)
    unresolved = send("http://hooks.example/", to()).error
    assert unresolved == "not sent: the host can't be resolved"  # where private addresses are allowed


def test_a_name_that_resolves_differently_after_the_check_is_not_followed(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is resolved once for each send: the connection goes to the address that was checked."""
    url = f"http://hooks.example:{receiver.url.split(':')[2]}"
    addresses: list[str] = []

    def connect(address: tuple[str, int], timeout: float | None = None) -> socket.socket:
        addresses.append(address[0])
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    resolver = Resolver(["93.184.216.35"], ["127.0.0.1"])
    sender = WebhookSender(resolve=resolver)
    assert send(url, sender).error == "the connection was refused"
    assert addresses == ["93.184.216.35"]  # not resolved a second time, which would return loopback
    assert send(url, sender).error == f"not sent: {NOT_FOUND}"
    assert addresses == ["93.184.216.35"]
    assert resolver.asked == ["hooks.example"] * 2
    assert receiver.got == []


class Lasting:
    """A receiver that keeps its connections open. `answers` are its answers to the requests of one connection; after
    the last one it closes. `peers` has the client's address of each connection, `requests` that of each request."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = answers
        self.peers: list[str] = []
        self.requests: list[str] = []
        self._listener = socket.create_server(("", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=self._listener.accept(), daemon=True).start()

    def _serve(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        name = f"{connection.getsockname()[0]}:{peer[1]}"
        self.peers.append(name)
        for answer in self.answers:
            text = b""
            while not text.endswith(BODY):
                part = connection.recv(65_536)
                if not part:
                    connection.close()
                    return
                text += part
            self.requests.append(name)
            connection.sendall(answer)
        connection.close()

    def close(self) -> None:
        self._listener.close()


ACCEPTED = b"HTTP/1.1 204 No Content\r\n\r\n"


@contextlib.contextmanager
def lasting(*answers: bytes) -> Iterator[Lasting]:
    receiver = Lasting(*answers)
    try:
        yield receiver
    finally:
        receiver.close()


def test_a_connection_stays_open_for_the_next_request() -> None:
    """And every request looks up the host again."""
    resolver = Resolver(["127.0.0.1"])
    sender = WebhookSender(resolve=resolver, allow_private=True)
    with lasting(*[ACCEPTED] * 10) as receiver:
        for _ in range(3):
            assert send(f"http://hooks.example:{receiver.port}/", sender).delivered
        assert (len(receiver.peers), len(receiver.requests), len(resolver.asked)) == (1, 3, 3)


@mutant(
    "an-open-connection-leads-to-any-address",
    "senders.connection:Kept.take",
    "connection.origin == origin and connection.address in addresses",
    "connection.origin == origin",
)
def test_an_open_connection_to_an_address_that_the_host_has_no_more_is_not_used() -> None:
    """Nor is one to an address that is refused now."""
    sender = WebhookSender(
        resolve=Resolver(["127.0.0.1"], ["127.0.0.2"], ["127.0.0.1", "10.0.0.1"]), allow_private=True
    )
    with lasting(*[ACCEPTED] * 10) as receiver:
        url = f"http://hooks.example:{receiver.port}/"
        assert send(url, sender).delivered
        assert send(url, sender).delivered
        assert [peer.split(":")[0] for peer in receiver.requests] == ["127.0.0.1", "127.0.0.2"]
        sender._allow_private = False
        assert send(url, sender).error == f"not sent: {NOT_FOUND}"
        assert len(receiver.requests) == 2


@mutant(
    "one-public-address-is-enough",
    "senders.webhooks:WebhookSender._addresses",
    "not all(map(is_public, addresses))",
    "not any(map(is_public, addresses))",
)
def test_a_name_that_is_rebound_at_each_lookup_leads_only_to_checked_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the system's resolver and a DNS server whose answers alternate. The receiver listens on all of this
    machine's addresses; here one of them is public."""
    monkeypatch.setattr(webhooks, "is_public", lambda address: address == "127.0.0.2")
    answers = ["127.0.0.2"], ["127.0.0.1"], ["127.0.0.2", "127.0.0.1"]
    with Names(*answers).served() as names, lasting(*[ACCEPTED] * 20) as receiver:
        sender = WebhookSender(resolve=names.resolve)
        results = [send(f"http://rebind.example:{receiver.port}/", sender) for _ in range(12)]
        assert [result.delivered for result in results] == [True, False, False] * 4
        assert {result.error for result in results} == {None, f"not sent: {NOT_FOUND}"}
        assert [request.split(":")[0] for request in receiver.requests] == ["127.0.0.2"] * 4


@pytest.mark.parametrize("last", [b"", ACCEPTED])
def test_a_connection_that_the_receiver_has_closed_is_replaced(last: bytes) -> None:
    """Before the request, or after it without any part of an answer: then the request is sent again at once."""
    sender = WebhookSender(allow_private=True)
    with lasting(ACCEPTED, last) as receiver:
        for _ in range(4):
            assert send(f"http://127.0.0.1:{receiver.port}/", sender).delivered
        if last:  # two of each connection
            assert (len(receiver.peers), len(receiver.requests)) == (2, 4)
        else:
            assert (len(receiver.peers), len(receiver.requests)) == (4, 7)


def test_a_request_is_not_sent_again_after_a_part_of_an_answer() -> None:
    """Nor is a request over a new connection: the receiver may have acted on it."""
    sender = WebhookSender(allow_private=True)
    with lasting(ACCEPTED, b"HTTP/1.1 204") as receiver:
        url = f"http://127.0.0.1:{receiver.port}/"
        assert send(url, sender).delivered
        assert send(url, sender).error == "the connection was closed before the response"
        assert len(receiver.requests) == 2
    with lasting(b"") as receiver:
        assert send(f"http://127.0.0.1:{receiver.port}/", sender).error is not None
        assert len(receiver.requests) == 1


def test_an_answer_that_came_before_its_request_does_not_count() -> None:
    """A receiver that answers a request twice has not accepted the next one."""
    sender = WebhookSender(allow_private=True)
    with lasting(ACCEPTED + ACCEPTED, ACCEPTED) as receiver:
        for _ in range(2):
            assert send(f"http://127.0.0.1:{receiver.port}/", sender).delivered
        assert (len(receiver.peers), len(receiver.requests)) == (2, 2)


def test_the_next_address_is_tried_if_one_refuses(receiver: Receiver) -> None:
    """A host with two addresses, one of which refuses."""
    answer = send(f"http://hooks.example:{receiver.url.split(':')[2]}", to("127.0.0.2", "127.0.0.1"))
    assert answer.delivered
    assert receiver.got[0].headers["host"] == f"hooks.example:{receiver.url.split(':')[2].split('/')[0]}"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for hooks.example."""
    folder = tmp_path_factory.mktemp("certificate")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=hooks.example"),
            *(
                "-addext",
                "subjectAltName=DNS:hooks.example",
                "-keyout",
                folder / "key.pem",
                "-out",
                folder / "cert.pem",
            ),
        ],
        check=True,
        capture_output=True,
    )
    return folder


@contextlib.contextmanager
def receiving_tls(certificate: Path) -> Iterator[Receiver]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    with receiving(tls=context) as running:
        yield running


def test_the_certificate_is_checked_against_the_name_not_the_address(certificate: Path) -> None:
    """The connection goes to an address; SNI, Host and the certificate use the name. Another name is refused."""
    trusting = ssl.create_default_context(cafile=certificate / "cert.pem")
    sender = WebhookSender(resolve=Resolver(["127.0.0.1"]), allow_private=True, certificates=trusting)
    with receiving_tls(certificate) as receiver:
        port = receiver.url.split(":")[2]
        assert send(f"https://hooks.example:{port}", sender).delivered
        wrong_name = send(f"https://other.example:{port}", sender)
        assert (wrong_name.status, wrong_name.error) == (None, "the TLS certificate was not accepted")
        untrusted = send(f"https://hooks.example:{port}", to("127.0.0.1"))
        assert untrusted.error == "the TLS certificate was not accepted"
        assert len(receiver.got) == 1
    with receiving() as plain:
        answer = send(f"https://hooks.example:{plain.url.split(':')[2]}", sender)
        assert answer.error == "TLS failed"
