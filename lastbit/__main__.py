"""The entry point of the command line. It is a separate module, so that it can name the missing extra if only the bare
client is installed."""

from __future__ import annotations


def main() -> None:
    """Run the `lastbit` command."""
    try:
        import click  # noqa: F401
        import rich  # noqa: F401
    except ImportError as cause:
        raise SystemExit(
            f"lastbit: the command line needs click and rich ({cause}): pip install 'lastbit[cli]'"
        ) from None
    try:
        from lastbit.cli import cli
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # as `cli.faults.INTERRUPTED`, which could not be imported

    cli(prog_name="lastbit")


if __name__ == "__main__":
    main()
