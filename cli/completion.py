"""`holdfast completion`: scripts that let a shell complete commands, options, and names that the cluster knows."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import get_completion_class

from holdfast.cli.output import json_option, print_json

SHELLS: Final = ("bash", "zsh", "fish")
#: The variable that tells the command, called by the script, to complete the line in place of running it.
VARIABLE: Final = "_HOLDFAST_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@json_option
@click.pass_context
def completion(context: click.Context, shell: str, as_json: bool) -> None:
    """Print the script that completes `holdfast` in SHELL. It needs bash 4.4, zsh 5 or fish 3, or newer.

    It completes commands, options and their values. Names and ids (of services, deployments, invocations, nodes) are those
    of the cluster that the command would ask, if it answers within a second.

    \b
    bash, now:    source <(holdfast completion bash)
    bash, always: echo 'source <(holdfast completion bash)' >> ~/.bashrc
    zsh, now:     source <(holdfast completion zsh)
    zsh, always:  echo 'source <(holdfast completion zsh)' >> ~/.zshrc    after the line with compinit
    fish, now:    holdfast completion fish | source
    fish, always: holdfast completion fish > ~/.config/fish/completions/holdfast.fish
    """
    found = get_completion_class(shell)
    assert found is not None, "click knows these shells"
    made = found(context.find_root().command, {}, "holdfast", VARIABLE)
    # `source` of bash would first look whether the bash of this machine is new enough, which may not be the one in use.
    script = made.source_template % made.source_vars()
    if as_json:
        print_json({"shell": shell, "script": script})
        return
    click.echo(script, nl=False)
