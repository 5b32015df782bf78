"""Command line arguments shared by the jobs."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path
from typing import Any

from lastbit.errors import InvalidArgument
from lastbit.spark._partitions import is_connect


def add_reader(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=_option,
        metavar="NAME=VALUE",
        help="an option of Spark's reader; repeat for several options",
    )
    parser.add_argument("--where", metavar="SQL", help="use only these rows")


def add_service(parser: ArgumentParser, parallel: str) -> None:
    """`parallel`: the help text for --parallel."""
    parser.add_argument("--url", help="the service's address (LASTBIT_URL of the driver, else http://127.0.0.1:8000)")
    parser.add_argument("--token-file", type=Path, metavar="PATH", help="a file on the driver (else LASTBIT_TOKEN)")
    parser.add_argument("--parallel", type=int, default=8, metavar="N", help=f"{parallel} (8)")


def add_connect(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--artifact", type=Path, metavar="PATH", help="on Spark Connect: the zip of lastbit, for the server"
    )


def send_artifact(spark: Any, artifact: Path | None) -> None:
    """Send the package to the server of Spark Connect. Raises `InvalidArgument`."""
    if artifact is None:
        return
    if not is_connect(spark):
        raise InvalidArgument("--artifact is for Spark Connect; spark-submit takes the zip in --py-files")
    if not artifact.is_file():
        raise InvalidArgument(f"there is no file {artifact}")
    spark.addArtifacts(str(artifact), pyfile=True)


def token_of(file: Path | None) -> str | None:
    """The token from the file. Raises `InvalidArgument`."""
    try:
        return file.read_text().strip() if file else None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the token can't be read: {error}") from error


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ArgumentTypeError(f"{text!r} is not a reader option; expected NAME=VALUE")
    return name, value
