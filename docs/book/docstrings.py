"""Docstrings of the library as reStructuredText: prose, sections as fields, examples."""

import re

SECTION = re.compile(r"^(Args|Returns|Yields|Raises):\n((?:(?: {4}.*)?(?:\n|$))+)", re.M)
ENTRY = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)", re.S)
FIELDS = {"Args": "param", "Raises": "raises", "Returns": "returns", "Yields": "yields"}


def escaped(text: str) -> str:
    "A text whose only marks are `code`: other characters mean nothing to reStructuredText."
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([*|_\\])", r"\\\1", part) for part in parts[::2]]
    # Letters beside a mark, as of a plural, need a separator that is not shown.
    spans = range(1, len(parts), 2)
    for i in spans:
        before = "\\ " if parts[i - 1][-1:].isalnum() else ""
        after = "\\ " if parts[i + 1][:1].isalnum() else ""
        parts[i] = before + parts[i] + after
    return "".join(parts)


def entries_of(body: str) -> list[str]:
    "The entries of a section: each begins at four spaces, and its further lines stand deeper."
    entries = []
    for line in body.splitlines():
        if re.match(r" {4}\S", line):
            entries.append(line.strip())
        elif line.strip():
            entries[-1] += " " + line.strip()
    return entries


def as_fields(title: str, body: str) -> list[str]:
    "A section of a docstring as the fields that Sphinx draws as a list."
    field = FIELDS[title]
    if title in ("Returns", "Yields"):
        return [f":{field}: {escaped(' '.join(body.split()))}", ""]
    lines = []
    for entry in entries_of(body):
        match = ENTRY.fullmatch(entry)
        if not match:
            raise ValueError(f"not an entry 'name: text' of {title}: {entry}")
        names, text = match.groups()
        lines.append(f":{field} {escaped(names.replace(', ', '/'))}: {escaped(text)}")
    return [*lines, ""]


def as_paragraphs(text: str) -> list[str]:
    """Prose as lines of reStructuredText. What it indents, or draws as a list, keeps its lines;
    examples stay as they are."""
    lines = []
    for block in filter(None, re.split(r"\n\s*\n", text.strip())):
        if block.lstrip().startswith(">>>"):
            lines += [line.strip() for line in block.splitlines()] + [""]
            continue
        if block.startswith("Example:\n"):
            lines += ["Example::", "", *block.splitlines()[1:], ""]
            continue
        block = escaped(block)
        drawn = re.search(r"^(\s+\S|- |\d\. )", block, re.M)
        lines += [("| " if drawn else "") + line.strip() for line in block.splitlines()] + [""]
    return lines


def as_rst(text: str) -> list[str]:
    "A docstring, with its sections, as lines of reStructuredText."
    parts = SECTION.split(text)
    lines = as_paragraphs(parts[0])
    for title, body, prose in zip(parts[1::3], parts[2::3], parts[3::3]):
        lines += as_fields(title, body)
        lines += as_paragraphs(prose)
    return lines
