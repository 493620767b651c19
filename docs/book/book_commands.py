"""The page of all commands, from the command line's own help."""

import re

import typer
from book_text import outside_fences
from typer.cli import get_docs_for_click

from hmoe_repro.cli.app import COMMANDS, DATA_COMMANDS, app, load_command


def safe(text: str) -> str:
    """Help as Markdown: what looks like a tag, such as <domain>, is shown as it is."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([<$\[])", r"\\\1", p) for p in parts[::2]]
    return "".join(parts)


def help_of(name: str, entry) -> str:
    """The help of one command as Markdown."""
    command = load_command(name.split()[-1], entry)
    context = typer.Context(command, info_name=f"hmoe {name}")
    text = get_docs_for_click(obj=command, ctx=context, name=f"hmoe {name}")
    text = outside_fences(text, safe)
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
