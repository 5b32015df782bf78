"""The `lastbit` command, and what its commands share: the common options, the session, confirmations."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import click

from lastbit import __version__, errors
from lastbit.cli import faults, jq, profiles
from lastbit.cli.arguments import UTF8
from lastbit.cli.output import Output, plain_text
from lastbit.retry import Retry

if TYPE_CHECKING:
    from lastbit.client import Client

F = TypeVar("F", bound=Callable[..., Any])

MOST_CANDIDATES = 20
"""The maximum number of batches that an ambiguous key lists."""

# A person is waiting, so retry for less time than the library does: about a second if the service is unreachable.
PATIENCE = Retry(attempts=5, deadline=30.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The options that all commands have. They stand before the command's name or after it."""

    url: str | None = None
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    profile: str | None = None
    json: bool = False
    jq: str | None = None
    before: Settings | None = None
    """Those before the command's name."""

    def after(self, before: Settings) -> Settings:
        """These, which were given after the command's name, and override `before`."""
        return replace(self, before=before)

    @property
    def levels(self) -> tuple[Settings, ...]:
        return (self,) if self.before is None else (self, self.before)

    def secret(self) -> str | None:
        """The token of the options, if any. Raises `click.UsageError`."""
        # Level by level, so that --token-file after the command may override --token before it.
        return next((secret for level in self.levels if (secret := _secret(level.token, level.token_file))), None)

    def service(self) -> tuple[str | None, str | None]:
        """The address and the token: of the options, else of the environment, else of a profile. None: by default.
        Raises `click.UsageError`, `ProfileFailed`."""
        secret = self.secret()
        for level in self.levels:
            if level.url is not None and level.profile is not None:
                raise click.UsageError("--url and --profile exclude each other: a profile has an address of its own")
            if level.url is not None:
                return level.url, secret
            if level.profile is not None:
                profile = profiles.existing(level.profile, "--profile")
                return profile.url, secret or profile.token or ""  # not that of the environment
        if os.environ.get("LASTBIT_URL"):
            return None, secret
        chosen = profiles.chosen_by_environment()
        if chosen is None:
            return None, secret
        return chosen.url, secret or os.environ.get("LASTBIT_TOKEN") or chosen.token

    @contextmanager
    def output(self) -> Iterator[Output]:
        """Raises `click.UsageError`, and `JqFailed` at the end."""
        expression = next((level.jq for level in self.levels if level.jq is not None), None)
        if expression is None:
            yield Output(any(level.json for level in self.levels))
        else:
            with jq.filtering(expression) as documents:
                yield Output(True, documents)


@dataclass
class Session:
    """The client and the output of one command."""

    client: Client
    output: Output


class Commands(click.Group):
    """A group whose commands report client errors as a message and an exit code, never as a traceback. If `--json` is
    on the command line, the message is a JSON document, also for wrong usage."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        # Before parsing, which may fail.
        as_json = "--json" in (args[: args.index("--")] if "--" in args else args)
        with faults.quiet_without_a_reader(), faults.reporting(as_json):
            ctx = super().make_context(info_name, args, parent, **extra)
        ctx.meta[_AS_JSON] = as_json
        return ctx

    def invoke(self, ctx: click.Context) -> Any:
        with faults.quiet_without_a_reader(), faults.reporting(ctx.meta.get(_AS_JSON, False)), faults.streams():
            return super().invoke(ctx)

    def main(self, *arguments: Any, **extra: Any) -> Any:
        with faults.quiet_without_a_reader():  # click shows usage errors here
            return super().main(*arguments, **extra)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of a batch's life, not alphabetically


class Signed(click.Command):
    """A command with an argument that may be a negative number, which looks like an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Unknown options are refused here, as the second parser takes them for arguments.
        self.make_parser(ctx).parse_args([re.sub("^-(?=[0-9])", "", arg) for arg in args])
        ctx.ignore_unknown_options = True
        return super().parse_args(ctx, args)


_AS_JSON = "lastbit.json"


def examples(*lines: str) -> str:
    """The end of a command's help: command lines to copy."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def end(code: int) -> NoReturn:
    """End the command with an exit code, after its output."""
    click.get_current_context().exit(code)


def yes_option(command: F) -> F:
    """Adds `--yes` to a command that calls `confirm`."""
    return click.option("--yes", is_flag=True, help="Don't ask for confirmation.")(command)


def confirm(yes: bool, question: Callable[[], str]) -> None:
    """Ask for confirmation of something that can't be undone, if the command runs on a terminal. Scripts aren't asked.
    Raises `faults.Declined`, and `click.UsageError` if nobody would see the question."""
    if yes or sys.stdin is None or not sys.stdin.isatty():
        return
    if not sys.stderr.isatty():
        raise click.UsageError("it would ask first, but standard error is redirected: add --yes")
    try:
        is_confirmed = click.confirm(plain_text(question()), err=True)
    except click.Abort as abort:
        if not isinstance(abort.__context__, EOFError):
            raise
        is_confirmed = False
    if not is_confirmed:
        raise faults.Declined


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Treat Ctrl-C or SIGTERM as the normal end of a command that would otherwise run forever."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


COMMON: Final = (
    click.option("--url", type=UTF8, help="Address of the service.  [LASTBIT_URL; default: http://127.0.0.1:8000]"),
    click.option("--token", help="Sent as a bearer token; others on this machine can see it.  [LASTBIT_TOKEN]"),
    click.option("--token-file", type=click.Path(path_type=Path), help="A file that holds the token."),
    click.option("--profile", type=profiles.ProfileName(), help="A service that login has stored.  [LASTBIT_PROFILE]"),
    click.option("--json", is_flag=True, help="Print the result as one JSON document."),
    click.option("--jq", metavar="FILTER", help="Print the JSON as this filter of jq makes it."),
)
GIVEN: Final = [setting.name for setting in fields(Settings) if setting.name != "before"]


def _service_options(command: F) -> F:
    for option in reversed(COMMON):
        command = option(command)
    return command


@click.group(
    cls=Commands,
    epilog="\n\n".join(
        [
            examples(
                "lastbit open --key catalog-42 --items 1000 --sealed",
                "lastbit watch catalog-42",
                "lastbit list --state open --label team:search",
                "lastbit list --unchanged-for 10m",
                "lastbit explain 7 --json",
            ),
            faults.EXIT_CODES,
        ]
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@_service_options
@click.version_option(__version__, prog_name="lastbit")
@click.pass_context
def cli(ctx: click.Context, /, **given: Any) -> None:
    """Know exactly when a fanned-out batch of work is finished.

    Open a batch, extend it with items, seal it; ack each item when it is done. An item's id is batch:group:index, like
    7:0:42. BATCH is a batch's number or its key; digits alone are a number, so write key=2026 for the key 2026. These
    options may also follow the command.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character gets a question mark, not a traceback.
            stream.reconfigure(errors="replace")
    ctx.obj = Settings(**given)


def _secret(token: str | None, file: Path | None) -> str | None:
    """The token from the options, if any. Raises `click.UsageError`."""
    if file is None:
        return token
    if token:
        raise click.UsageError("--token and --token-file exclude each other: use one of them")
    try:
        content = file.read_text("utf-8-sig").strip()  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        raise click.UsageError(f"--token-file: there is no such file: {str(file)!r}") from None
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", "it is not UTF-8")
        raise click.UsageError(f"--token-file: {str(file)!r} can't be read: {cause}") from None
    if not content or not content.isascii() or len(content.split()) > 1:
        raise click.UsageError(
            f"--token-file: {str(file)!r} holds no token: expected one line like lastbit_…; the lines of `lastbit "
            "token new` that begin with a name are for the service"
        )
    return content


def numbered(client: Client, key: str) -> int:
    """The number of the only batch with this key. Raises `UnknownKey` and `AmbiguousKey`."""
    try:
        matching = list(islice(client.batches(key=key, page_size=MOST_CANDIDATES + 1), MOST_CANDIDATES + 1))
    except errors.Forbidden as error:
        # The command itself may be allowed, such as a seal for a producer's token.
        detail = f"batches can't be found by their key: {error.detail}; name the batch by its number"
        raise errors.Forbidden(error.status, error.code, detail) from error
    if not matching:
        raise faults.UnknownKey(key)
    if len(matching) > 1:
        raise faults.AmbiguousKey(key, matching[:MOST_CANDIDATES], len(matching) > MOST_CANDIDATES)
    return matching[0].id


def _require_utf8(ctx: click.Context) -> None:
    """Raises `click.BadParameter` with the name of an option or argument that can't be encoded as UTF-8. Python also
    makes strings of arguments that are not UTF-8."""
    for param in ctx.command.params:
        if param.name == "token" or param.nargs == -1:
            continue  # a token is in no error; a malformed id is named by its place
        value = ctx.params.get(param.name or "")
        try:
            for text in _texts(value):
                text.encode()
        except UnicodeEncodeError:
            raise click.BadParameter(f"expected text in UTF-8, not {value!r}", ctx, param) from None


def _texts(value: Any) -> Iterator[str]:
    """The texts of an option, which may be repeated or have parts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _texts(part)


def common_options(command: F) -> F:
    """Adds the options that all commands have, and passes them as `settings`."""

    @_service_options
    @click.pass_context
    @wraps(command)
    def with_settings(ctx: click.Context, /, *arguments: Any, **options: Any) -> Any:
        given = Settings(**{name: options.pop(name) for name in GIVEN})
        return command(*arguments, settings=given.after(ctx.obj), **options)

    return with_settings  # type: ignore[return-value]  # click replaces the signature


def session(command: F) -> F:
    """Adds the common options to a command, and passes a `Session` as its first argument."""

    @common_options
    @click.pass_context
    @wraps(command)
    def with_session(ctx: click.Context, /, *arguments: Any, settings: Settings, **options: Any) -> Any:
        from lastbit.client import Client  # and httpx: importing it here keeps --help and usage errors fast

        faults.name_options_of(ctx.command)
        url, token = settings.service()
        _require_utf8(ctx)
        with settings.output() as output, Client(url, token=token, retry=PATIENCE) as client:
            batch = options.get("batch")
            faults.named_by_number(batch if isinstance(batch, int) else None)
            if isinstance(batch, str):
                options["batch"] = numbered(client, batch)
            return command(Session(client, output), *arguments, **options)

    return with_session  # type: ignore[return-value]  # as above
