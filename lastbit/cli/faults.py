"""What an error of a command shows, and the exit code with which it ends the command."""

from __future__ import annotations

import errno
import os
import select
import shlex
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from lastbit import errors
from lastbit.cli import places
from lastbit.cli.arguments import key_hint
from lastbit.cli.output import encoded, holds_unicode, plain_text
from lastbit.ids import InvalidItemId, ItemId

if TYPE_CHECKING:
    from lastbit.models import Batch

REFUSED = 1
WRONG_USE = 2
NOT_SUCCEEDED = 3
INTERRUPTED = 130
"""As shells report a command that Ctrl-C ended."""
READER_GONE = 141
"""As shells report a command that SIGPIPE ended."""

EXIT_CODES = """\b
Exit codes:
  0  done
  1  the service refused, or could not be reached; or you declined a question;
     or jq failed
  2  wrong usage or malformed input; nothing of that request was applied
  3  ack, fail: something was rejected; watch: the batch ended without
     success, or not in time; verify: the counts disagree with the bits;
     repair --dry-run: there is something to repair;
     webhooks test: not delivered; with filters, cancel, reopen,
     delete and redrive: the service refused some batches
  130  interrupted with Ctrl-C; 0 for commands with --follow
  141  the reader of the output, such as head, closed the pipe
"""


class UnknownKey(errors.LastbitError):
    """No batch has the key."""

    def __str__(self) -> str:
        key: str = self.args[0]
        try:
            advice = f"an item's id begins with the number of its batch, here {ItemId.parse(key).batch}"
        except InvalidItemId:
            advice = "`lastbit list` shows the batches"
        return f"no batch has the key {key!r}; {advice}"


class AmbiguousKey(errors.LastbitError):
    """Several batches have the key; `candidates` are the newest of them."""

    def __init__(self, key: str, candidates: Sequence[Batch], has_more: bool) -> None:
        super().__init__(key, candidates, has_more)
        self.key = key
        self.candidates = candidates
        self.has_more = has_more

    def __str__(self) -> str:
        lines = [f"several batches have the key {self.key!r}; name one by its number, newest first:"]
        lines += [
            f"  {batch.id}  {batch.state}, {batch.resolved:,} of {batch.items:,} resolved, "
            f"opened {batch.created_at:%Y-%m-%d %H:%M:%S} UTC"
            for batch in self.candidates
        ]
        if self.has_more:
            lines.append(f"  … and more: lastbit list --key {shlex.quote(self.key)}")
        return "\n".join(lines)


class Declined(errors.LastbitError):
    """The user declined a confirmation."""

    def __str__(self) -> str:
        return "nothing was changed"


class StreamFailed(errors.LastbitError):
    """Standard input or output can't be used, such as a file on a full disk."""

    def __str__(self) -> str:
        return f"standard input or output failed: {self.args[0]}"


class JsonError(click.ClickException):
    """An error that is shown as one JSON document on standard error."""

    def __init__(self, fields: Mapping[str, Any], code: int) -> None:
        super().__init__(str(fields["message"]))
        self.fields = fields
        self.exit_code = code  # type: ignore[misc]  # a class variable in click's own classes

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(encoded(self.fields, as_ascii=not holds_unicode(sys.stderr)), file=file, err=file is None)


_COMMAND = "lastbit.command"
"""The command that runs, for messages that name its options."""
_NUMBER = "lastbit.number"
"""The batch that was named by its number."""
_FINDINGS = "lastbit.findings"
"""What the command found out before its error: fields of the error's document."""
_REPEAT = "lastbit.repeat"
"""A `Repeat`, once a request that must not be sent twice may have been sent."""


def name_options_of(command: click.Command) -> None:
    """Name the options of this command in errors that name fields of the request."""
    click.get_current_context().meta[_COMMAND] = command


def named_by_number(batch: int | None) -> None:
    """Keep the batch that was named by its number: if there is none, its error says how to name a key of digits."""
    click.get_current_context().meta[_NUMBER] = batch


@contextmanager
def reporting(as_json: bool) -> Iterator[None]:
    """End with a message, or a document, and the exit code of the error that ends the command."""
    try:
        yield
    except errors.LastbitError as error:
        code = exit_code(error)
        if as_json:
            raise JsonError(document(error), code) from error
        click.secho("lastbit: ", err=True, nl=False, fg="red")
        click.echo(plain_text(explained(error), keep="\n"), err=True)
        if (repeat := _repeat(error)) is not None:
            click.echo(repeat.sentence, err=True)
        click.get_current_context().exit(code)
    except (KeyboardInterrupt, click.Abort) as error:
        if (repeat := _repeat(error)) is not None:
            if as_json:
                fields = {"error": "Interrupted", "message": repeat.sentence, **repeat.fields}
                raise JsonError(fields, INTERRUPTED) from error
            click.echo(repeat.sentence, err=True)
        # click would print "Aborted!" and end with 1, which means a refusal.
        raise click.exceptions.Exit(INTERRUPTED) from None
    except click.ClickException as error:
        if not as_json or isinstance(error, JsonError):
            # It may quote an argument.
            error.message = plain_text(error.message, keep="\n")  # type: ignore[misc]  # final in newer clicks
            raise
        is_wrong_use = isinstance(error, click.UsageError)
        fields = {
            "error": "WrongUse" if is_wrong_use else type(error).__name__,
            # A group without a command shows its help.
            "message": "Missing command." if _is_help(error) else error.format_message(),
        }
        raise JsonError(fields, error.exit_code) from error


@contextmanager
def streams() -> Iterator[None]:
    """Raises `StreamFailed` instead of the error of a stream."""
    try:
        yield
    except OSError as error:
        # EPIPE is no failure: the reader, such as `head`, has read enough.
        if isinstance(error, errors.LastbitError) or error.errno == errno.EPIPE:
            raise
        raise StreamFailed(error.strerror) from error


@contextmanager
def quiet_without_a_reader() -> Iterator[None]:
    """End with `READER_GONE` if the pipe of the output is closed. click and rich would end with 1."""
    try:
        yield
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        for stream in (sys.stdout, sys.stderr):
            try:
                if stream is not None:
                    stream.flush()
            except BrokenPipeError:
                # Python flushes it again at its exit, and would report the error.
                with Path(os.devnull).open("wb") as nothing:
                    os.dup2(nothing.fileno(), stream.fileno())
        raise SystemExit(READER_GONE) from None


@contextmanager
def ending_without_a_reader() -> Iterator[None]:
    """End with `READER_GONE` at once when the pipe of the output is closed, while the command waits for something to
    print. It must have nothing to finish."""
    ended = threading.Event()

    def wait(output: select.poll) -> None:
        output.poll()
        if not ended.is_set():
            os._exit(READER_GONE)  # the main thread waits for a response, and no exception reaches it

    # Windows has no poll, standard output may be closed, and the process may have no more threads.
    with suppress(AttributeError, OSError, RuntimeError):
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)  # POLLERR and POLLHUP are always reported
        threading.Thread(target=wait, args=(output,), daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _is_help(error: click.ClickException) -> bool:
    return type(error).__name__ == "NoArgsIsHelpError"  # click 8.2 and later


@dataclass(frozen=True, slots=True)
class Repeat:
    """How to repeat a command that may have been carried out, although it ended with an error."""

    idempotency_key: str | None
    deadline: datetime | None = None

    @property
    def sentence(self) -> str:
        if self.idempotency_key is None:
            return "It may have been carried out: check that before you repeat it."
        # A deadline from now is a later one in the second run, which the service would refuse as another request.
        deadline = "" if self.deadline is None else f" --deadline {self.deadline.isoformat()}"
        options = f"--idempotency-key {self.idempotency_key}{deadline}"
        return f"It may have been carried out. To repeat it safely, add {options}"

    @property
    def fields(self) -> dict[str, Any]:
        named = {"idempotency_key": self.idempotency_key, "deadline": self.deadline}
        return {name: value for name, value in named.items() if value is not None}


def sent_once(idempotency_key: str | None, deadline: datetime | None = None) -> str:
    """The idempotency key of a request that has another effect when it is sent again: the user's, or a new one, which
    an error of the command then names. Call it just before the request."""
    if idempotency_key is not None:
        return idempotency_key
    key = str(uuid.uuid4())
    click.get_current_context().meta[_REPEAT] = Repeat(key, deadline)
    return key


def not_repeatable() -> None:
    """Say that the command may have been carried out if it ends with an error after this call."""
    click.get_current_context().meta[_REPEAT] = Repeat(None)


def add_to_error(findings: Mapping[str, Any]) -> None:
    """Add these fields to the document of the error that ends the command."""
    click.get_current_context().meta[_FINDINGS] = findings


def _repeat(error: BaseException) -> Repeat | None:
    """How to repeat the command that this error ended; None if it had no effect, or has none when it is repeated."""
    context = click.get_current_context(silent=True)
    repeat: Repeat | None = context.meta.get(_REPEAT) if context else None
    if isinstance(error, errors.LastbitError) and not isinstance(error, StreamFailed):
        is_refused = not error.is_temporary or isinstance(error, errors.RateLimited)
        is_unsent = isinstance(error, errors.ServiceUnreachable) and not error.sent
        return None if is_refused or is_unsent else repeat
    return repeat


def exit_code(error: errors.LastbitError) -> int:
    """The exit code that belongs to an error."""
    if isinstance(error, errors.WaitTimeout):
        return NOT_SUCCEEDED
    if isinstance(error, errors.IdempotencyKeyReused):
        return REFUSED  # the command line is right, but conflicts with an earlier one
    if isinstance(error, errors.InvalidRequest) and error.status == 405:
        return REFUSED  # as a 404: no argument is wrong, but perhaps the service's release or address
    return WRONG_USE if isinstance(error, errors.InvalidArgument | errors.InvalidRequest) else REFUSED


def document(error: errors.LastbitError) -> dict[str, Any]:
    """The error as JSON, for scripts."""
    fields: dict[str, Any] = {"error": type(error).__name__, "message": str(error)}
    if isinstance(error, errors.ServiceUnreachable | errors.MalformedItem):
        fields["message"] = explained(error).replace("\n", " ")
    if isinstance(error, errors.ServiceError):
        fields |= {"status": error.status, "code": error.code, "errors": error.errors}
        if error.retry_after is not None:
            fields["retry_after"] = error.retry_after
    if isinstance(error, AmbiguousKey):
        fields |= {
            "message": f"several batches have the key {error.key!r}",
            "candidates": error.candidates,
            "more": error.has_more,
        }
    if isinstance(error, errors.WaitTimeout):
        fields["batch"] = error.batch
    if (repeat := _repeat(error)) is not None:
        fields |= {"message": f"{fields['message']} {repeat.sentence}", **repeat.fields}
    if error.partial is not None:
        fields["partial"] = error.partial
    context = click.get_current_context(silent=True)
    return fields | (context.meta.get(_FINDINGS, {}) if context else {})


_REMEDIES: Mapping[errors.Obstacle | None, str] = {
    None: "Start the service there (`lastbit-server` starts one at http://127.0.0.1:8000, `make serve` in a checkout)",
    "name": "Check the name of the host",
    "plain": "The service seems to speak plain HTTP there: use http:// instead of https://",
    "tls": "Check the certificate and the TLS settings of the service",
    "response": "A connection was made, but there was no response: check that it is a Lastbit service",
}


def explained(error: errors.LastbitError) -> str:
    """The error message for command line users."""
    if isinstance(error, errors.ServiceUnreachable):
        attempts = "1 attempt" if error.attempts == 1 else f"{error.attempts} attempts"
        advice = "" if error.repeatable or _repeat(error) is not None else f"\n{error.advice}"
        return (
            f"no response from {error.url}: {error.cause} ({error.request}, {attempts}).\n"
            f"{_REMEDIES[error.obstacle]}, or set another address with --url, --profile or LASTBIT_URL.{advice}"
        )
    if isinstance(error, errors.Unauthorized):
        return f"{error}\nPass a token with LASTBIT_TOKEN or --token-file; `lastbit token new` makes one."
    if isinstance(error, errors.MalformedItem):
        return f"ID {error.position + 1}: {error.fact}"
    if not isinstance(error, errors.ServiceError):
        return str(error)
    context = click.get_current_context(silent=True)
    command = context.meta.get(_COMMAND) if context else None
    number = context.meta.get(_NUMBER) if context else None
    if isinstance(error, errors.BatchNotFound) and number is not None:
        hint = key_hint(number)
        return f"{error}\n{hint[0].upper()}{hint[1:]}."
    others = [place for place in map(_place, error.errors) if place and place not in error.detail]
    return "\n".join([_in_options(str(error), command), *(f"  {_in_options(other, command)}" for other in others)])


def _place(problem: Any) -> str:
    """One entry of a problem's `errors` as text. The entry may have any fields."""
    if not isinstance(problem, dict):
        return str(problem)
    return ": ".join(str(value) for value in problem.values() if isinstance(value, str | int))


def _in_options(text: str, command: click.Command | None) -> str:
    """`text`, a place and what was expected there, with the option or argument of `command` instead of the place."""
    place, colon, expected = text.partition(": ")
    typed = places.in_options(command, place) if command and colon else None
    if typed is None:
        return text
    assert command is not None
    return f"{typed}: {places.worded(command, expected)}"
