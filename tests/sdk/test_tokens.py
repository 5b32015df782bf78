"""Tokens: new ones parse, and invalid ones are refused without being printed."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastbit import Client, Forbidden, Unauthorized, tokens
from lastbit.tokens import InvalidTokens, Role, Token
from tests.sdk.test_cli import Lastbit
from tests.support.servers import running_service, sqlite_file

SECRET = tokens.new()
KNOWN = tokens.known(SECRET, "ci", [Role.PRODUCE, Role.CONSUME], "shop-")


def test_a_token_is_random_and_its_line_has_only_its_digest() -> None:
    """256 bits, in characters that fit a header, a shell and a URL."""
    new_tokens = {tokens.new() for _ in range(100)}
    assert len(new_tokens) == 100
    for token in new_tokens:
        assert token.startswith("lastbit_")
        assert len(token.removeprefix("lastbit_")) * 6 >= 256
        assert token.replace("-", "").replace("_", "").isalnum()
    assert KNOWN.digest == hashlib.sha256(SECRET.encode()).digest()
    assert KNOWN.line() == f"ci produce,consume sha256:{KNOWN.digest.hex()} prefix=shop-"
    assert SECRET not in repr(KNOWN)
    assert KNOWN.digest.hex() not in repr(KNOWN)


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"),
            st.sets(st.sampled_from(Role), min_size=1),
            st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=255),
            st.none() | st.integers(1, 10**9 - 1),
            st.none() | st.integers(1, 10**9 - 1),
        ),
        unique_by=lambda fields: fields[0],
        max_size=5,
    ),
    st.sampled_from(["\n", ";", "\n\n  # a comment\n"]),
)
def test_lines_are_parsed_as_written(
    token_fields: list[tuple[str, set[Role], str | None, int | None, int | None]], separator: str
) -> None:
    """The prefix may contain blanks, semicolons, newlines and any letters."""
    token_list = [
        tokens.known(tokens.new(), name, roles, prefix, requests=requests, items=items)
        for name, roles, prefix, requests, items in token_fields
    ]
    assert tokens.parse(separator.join(token.line() for token in token_list)) == token_list


@pytest.mark.parametrize(
    "line",
    [
        SECRET,
        f"ci read {SECRET}",
        f"ci read sha256:{'0' * 63}",
        f"ci write sha256:{'0' * 64}",
        f"ci , sha256:{'0' * 64}",
        f"c/i read sha256:{'0' * 64}",
        f"ci read sha256:{'0' * 64} prefix=",
        f"ci read sha256:{'0' * 64} shop-",
        f"ci read sha256:{'0' * 64} prefix={'x' * 256}",
        f"ci read sha256:{'0' * 64} prefix=a prefix=b",
        f"ci read sha256:{'0' * 64} requests=5",
        f"ci read sha256:{'0' * 64} requests=0/s",
        f"ci read sha256:{'0' * 64} requests=1.5/s",
        f"ci read sha256:{'0' * 64} items=5/s items=6/s",
        f"ci read sha256:{'0' * 64} rate=5/s",
        f"ci read sha256:{'0' * 64}\nci read sha256:{'1' * 64}",
        f"ci read sha256:{'0' * 64}\nother read sha256:{'0' * 64}",
    ],
    ids=range(17),  # SECRET is random, and each process must find the same names
)
def test_an_invalid_line_is_refused_without_being_printed(line: str) -> None:
    """It may be a token in the wrong place."""
    with pytest.raises(InvalidTokens, match=r"line [123]: ") as excinfo:
        tokens.parse(f"# first\n{line}")
    assert SECRET not in str(excinfo.value)


@pytest.mark.parametrize(
    ("roles", "key", "allowed", "covers"),
    [
        ([Role.READ], "shop-1", False, True),
        ([Role.CONSUME], "shop-", True, True),
        ([Role.ADMIN], "shop", True, False),
        ([Role.ADMIN], None, True, False),
    ],
)
def test_a_token_allows_its_roles_and_keys(roles: list[Role], key: str | None, allowed: bool, covers: bool) -> None:
    """Admin includes every role; a prefix limits admins too; without a prefix every key is covered."""
    restricted_token, full_token = (Token("x", frozenset(roles), b"", prefix) for prefix in ("shop-", None))
    assert restricted_token.has([Role.CONSUME]) is full_token.has([Role.CONSUME]) is allowed
    assert restricted_token.covers(key) is covers
    assert full_token.covers(key)


# The command line and the client


@pytest.fixture(scope="module")
def cli() -> Iterator[Lastbit]:
    """The command line, on a service that has tokens."""
    with sqlite_file() as url, running_service(url, LASTBIT_TOKENS=KNOWN.line()) as running:
        yield Lastbit(running.url)


def test_the_command_makes_a_token_with_its_line(cli: Lastbit) -> None:
    """Both are on standard output, with advice on standard error; without a name one is made up."""
    result = cli("token", "new", "--role", "read", "--role", "consume", "--prefix", "shop ü", "--name", "me")
    assert result.returncode == 0
    token, line = (text.split(maxsplit=1)[1] for text in result.stdout.splitlines())
    assert tokens.parse(line) == [tokens.known(token, "me", [Role.READ, Role.CONSUME], "shop ü")]
    assert "LASTBIT_TOKENS_FILE" in result.stderr
    output = cli.json("token", "new", "--role", "admin")
    (token_entry,) = tokens.parse(output["line"])
    assert (token_entry.name, token_entry.digest) == (output["name"], tokens.digest(output["token"].encode()))
    output_with_limits = cli.json("token", "new", "--role", "consume", "--requests", "20", "--items", "5000")
    (token_entry,) = tokens.parse(output_with_limits["line"])
    assert (token_entry.requests, token_entry.items) == (20, 5000)
    assert output_with_limits["line"].endswith(" requests=20/s items=5000/s")
    for arguments in (
        ["--role", "write"],
        [],
        ["--role", "read", "--name", "a b"],
        ["--role", "read", "--prefix", ""],
        ["--role", "read", "--items", "0"],
    ):
        assert cli("token", "new", *arguments).returncode == 2


def test_a_token_can_come_from_a_file(cli: Lastbit, tmp_path: Path) -> None:
    """Before or after the command; without a token, or with one that lacks the role, the command says what to do."""
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    for arguments in (
        ["--token-file", str(file), "open", "--key", "shop-1"],
        ["open", "--key", "shop-1", "--token-file", str(file)],
        ["--token", "wrong", "open", "--key", "shop-1", "--token-file", str(file)],
    ):
        assert cli(*arguments).returncode == 0

    def refused(*arguments: str, code: int = 1) -> str:
        result: subprocess.CompletedProcess[str] = cli(*arguments)
        assert result.returncode == code, result.stderr
        assert SECRET not in result.stderr
        return result.stderr

    assert "LASTBIT_TOKEN" in refused("list")
    assert "the token is invalid" in refused("list", "--token", "wrong")
    assert "this route requires the role read; the token ci has produce and consume" in refused(
        "list", "--token-file", str(file)
    )
    assert "prefix 'shop-'" in refused("open", "--key", "other", "--token-file", str(file))
    assert "--token-file: there is no such file: 'absent'" in refused("list", "--token-file", "absent", code=2)
    assert "can't be read: Is a directory" in refused("list", "--token-file", str(tmp_path), code=2)
    assert "use one" in refused("list", "--token", SECRET, "--token-file", str(file), code=2)


def test_a_file_for_the_service_holds_no_token(cli: Lastbit, tmp_path: Path) -> None:
    """The error names the option and the file, but nothing of its content. A byte order mark is no part of a token."""
    file = tmp_path / "tokens"
    for content in (b"", b"ci produce sha256:38119805\n", b"lastbit_a\nlastbit_b\n", b"lastbit_\xc3\xa9", b"\xff"):
        file.write_bytes(content)
        result = cli("list", "--token-file", str(file))
        assert result.returncode == 2
        assert f"--token-file: '{file}' " in result.stderr
        assert "38119805" not in result.stderr
        assert ("expected one line like lastbit_…" in result.stderr) is (content != b"\xff")
    file.write_bytes(b"\xef\xbb\xbf" + SECRET.encode() + b"\r\n")
    assert cli("open", "--key", "shop-1", "--token-file", str(file)).returncode == 0


def test_a_refusal_has_its_own_error_and_is_not_retried(cli: Lastbit) -> None:
    """By its class and by its code."""
    with Client(cli.url) as client, pytest.raises(Unauthorized) as excinfo:
        client.ack("1:0:0")
    assert excinfo.value.code == "unauthorized"
    with Client(cli.url, token=SECRET) as client:
        batch = client.open(key="shop-sdk", items=1, sealed=True)
        assert client.ack(batch.ids).completed[0].succeeded
        assert batch.refresh().succeeded
        with pytest.raises(Forbidden, match="the role read"):
            next(client.batches())


def test_a_pasted_line_with_its_heading_is_named() -> None:
    """`lastbit token new` prints the word `line` before the line."""
    line = tokens.known(tokens.new(), "me", [Role.READ]).line()
    with pytest.raises(InvalidTokens, match="line 1: remove the word `line`"):
        tokens.parse(f"line   {line}")
    (token,) = tokens.parse(line.replace("me ", "line ", 1))
    assert token.name == "line"
