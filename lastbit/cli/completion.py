"""`lastbit completion`: the script with which a shell completes commands and options."""

from __future__ import annotations

import click

from lastbit.cli.app import examples


@click.command(
    epilog=examples(
        "lastbit completion bash > ~/.local/share/bash-completion/completions/lastbit",
        "lastbit completion fish > ~/.config/fish/completions/lastbit.fish",
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script with which SHELL completes commands.

    bash (4.4 or later) and zsh can also read it at each start: eval "$(lastbit completion zsh)" in ~/.zshrc, after
    compinit.
    """
    from click.shell_completion import get_completion_class

    complete = get_completion_class(shell)
    assert complete is not None
    click.echo(complete(ctx.find_root().command, {}, "lastbit", "_LASTBIT_COMPLETE").source(), nl=False)
