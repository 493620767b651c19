"""A store of many runs, made from published records: the same runs with other trial seeds."""

from pathlib import Path

from hmoe_repro.bench.store_commands import generated_records, write_generated


def many_records(count: int, study: str = "quick-digits"):
    "Yield `count` records that differ by trial seed, algorithm and test domain."
    yield from generated_records(count, study)


def write_store(folder: Path, count: int) -> list[str]:
    "Write `count` records into a folder of runs, and return their ids."
    write_generated(folder, count)
    return sorted(path.parent.name for path in folder.glob("*/record.json"))
