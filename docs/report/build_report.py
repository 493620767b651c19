"""Build the reproduction report: numbers, tables and figures from the records, then the PDF.

`python docs/report/build_report.py` writes `docs/report/numbers.json`, `docs/report/report.pdf` and
`docs/report/slides.pdf`. Tables and figures go to `build/report`. `--numbers` stops before Typst.
"""

import hashlib
import json
import os
import re
import sys
import time
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import report_figures
import report_findings
import report_numbers as numbers
import report_tables
from report_numbers import HERE, ROOT, Value

BUILD = ROOT / "build" / "report"
STAMP = HERE / "inputs.sha256"
SOURCES = (
    "report.typ",
    "slides.typ",
    "layout.typ",
    "abstract.typ",
    "summary.typ",
    "phrases.toml",
    "paper_table4.toml",
    "references.bib",
)
OUTPUTS = ("report", "slides")
FIELDS = {"yes": "supported", "no": "contradicted"}  # verdict -> its phrase; else 'undecided'
QUOTED = re.compile(r'#n\("([^"]+)"\)')


def phrase_values(values: dict[str, Value]) -> dict[str, Value]:
    """Return the words of `phrases.toml` that fit the verdicts among the values."""
    with open(HERE / "phrases.toml", "rb") as file:
        phrases = tomllib.load(file)["phrases"]
    found = {}
    for name, phrase in phrases.items():
        verdict = values[f"{phrase['claim']}/{phrase['study']}/verdict"]
        text = phrase[FIELDS.get(verdict.text, "undecided")]
        found[f"phrase/{name}"] = Value(text, verdict.source)
    return found


def passages_to_reread(values: dict[str, Value]) -> list[str]:
    """Name the passages that were written for another verdict than that of the records."""
    with open(HERE / "phrases.toml", "rb") as file:
        passages = tomllib.load(file)["reread"]
    lines = []
    for passage in passages:
        claim = f"{passage['claim']}/{passage['study']}"
        known = values.get(f"{claim}/verdict")
        verdict = known.text if known else "not judged on this study"
        if verdict != passage["verdict"]:
            change = f"written for {passage['verdict']!r}, the records say {verdict!r}"
            lines.append(f"read again: {passage['passage']} ({claim}: {change})")
    return lines


def all_values(store: str = "") -> dict[str, Value]:
    """Return every value that the prose may quote."""
    values = numbers.collect(store) | report_findings.collect(store)
    values["deviations/all"] = report_tables.deviations_count()
    values |= report_tables.fault_values(store)
    return values | phrase_values(values)


def filled(name: str, values: dict[str, Value]) -> str:
    """Return a short text (`abstract.typ`, `summary.typ`) with its values, as plain text."""
    text = (HERE / name).read_text(encoding="utf-8")
    prose = text.partition("\n")[2]  # below the import
    return QUOTED.sub(lambda quoted: values[quoted[1]].text, prose).strip()


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def creation_date(values: dict[str, Value]) -> datetime:
    """Return the date in the PDF: SOURCE_DATE_EPOCH, or the day of the newest record."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if epoch:
        return datetime.fromtimestamp(int(epoch), UTC)
    return datetime.fromisoformat(values["all/newest"].text).replace(tzinfo=UTC)


def compile_pdf(name: str, output: Path, date: datetime):
    """Compile a Typst file with the fonts that Typst brings, and with no packages."""
    import typst

    typst.compile(
        str(HERE / f"{name}.typ"),
        output=str(output),
        root=str(ROOT),
        ignore_system_fonts=True,
        font_paths=[],
        timestamp=int(date.timestamp()),
        sys_inputs={"date": f"{date:%Y-%m-%d}"},
    )


def write_inputs() -> dict[str, Value]:
    """Write `numbers.json`, the tables and the figures."""
    BUILD.mkdir(parents=True, exist_ok=True)
    values = all_values()
    (HERE / "numbers.json").write_text(numbers.as_json(values), encoding="utf-8")
    tables = json.dumps(report_tables.all_tables(), indent=1, ensure_ascii=False)
    (BUILD / "tables.json").write_text(tables + "\n", encoding="utf-8")
    report_figures.draw_all(BUILD)
    return values


def write_stamp():
    """List the digests of the sources and of the PDFs that were built from them."""
    names = [*SOURCES, "numbers.json", *(f"{name}.pdf" for name in OUTPUTS)]
    lines = [f"{sha256(HERE / name)}  {name}" for name in names]
    STAMP.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main():
    """Build everything and report what to read again."""
    start = time.time()
    values = write_inputs()
    for line in passages_to_reread(values):
        print(line)
    if "--numbers" in sys.argv:
        return
    for name in OUTPUTS:
        compile_pdf(name, HERE / f"{name}.pdf", creation_date(values))
    write_stamp()
    print(f"docs/report/report.pdf in {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
