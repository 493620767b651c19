"""The page of all commands, from the command line's own help."""

import re

import typer
from typer.cli import get_docs_for_click

from hmoe_repro.cli.app import COMMANDS, DATA_COMMANDS, app, load_command


def help_of(name: str, entry) -> str:
    """The help of one command as Markdown."""
    command = load_command(name.split()[-1], entry)
    context = typer.Context(command, info_name=f"hmoe {name}")
    text = get_docs_for_click(obj=command, ctx=context, name=f"hmoe {name}")
    return re.sub(r"^(#+) `(.*)`$", r"## \2", text, count=1, flags=re.M).strip()


def commands_page() -> str:
    """Every command with its arguments and options."""
    said = typer.main.get_command(app).help
    entries = {**COMMANDS, **{f"data {name}": entry for name, entry in DATA_COMMANDS.items()}}
    helps = [help_of(name, entry) for name, entry in entries.items()]
    intro = (
        f"# Every command\n\n`hmoe`: {said} The text is what `hmoe COMMAND --help` prints. "
        "[Commands](/docs/commands.md) shows those of every day, in use."
    )
    return "\n\n".join([intro, *helps]).replace("```console", "```text") + "\n"
