"""The page of all commands, from the command line's own help."""

import re

import typer
from book_text import outside_fences
from typer.cli import get_docs_for_click

from hmoe_repro.cli.app import app


def safe(text: str) -> str:
    """Help as Markdown: what looks like a tag, such as <domain>, is shown as it is."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([<$\[])", r"\\\1", p) for p in parts[::2]]
    return "".join(parts)


def help_of(name: str, command) -> str:
    """The help of one command as Markdown."""
    context = typer.Context(command, info_name=name)
    text = outside_fences(get_docs_for_click(obj=command, ctx=context, name=name), safe)
    return re.sub(r"^(#+) `(.*)`$", r"## \2", text, count=1, flags=re.M).strip()


def commands_page() -> str:
    """Every command with its arguments and options."""
    group = typer.main.get_command(app)
    commands = {f"hmoe {name}": command for name, command in group.commands.items()}
    data = commands.pop("hmoe data").commands
    commands |= {f"hmoe data {name}": command for name, command in data.items()}
    intro = (
        f"# Every command\n\n`hmoe`: {group.help} The text is what `hmoe COMMAND --help` prints. "
        "[Commands](/docs/commands.md) shows those of every day, in use."
    )
    helps = [help_of(name, command) for name, command in commands.items()]
    return "\n\n".join([intro, *helps]).replace("```console", "```text") + "\n"
