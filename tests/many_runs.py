"""A store of many runs, made from one published record: the same run with other trial seeds."""

import copy
import json
from pathlib import Path

from hmoe_repro.core.files import repo_root
from hmoe_repro.training.run_config import RunConfig
from hmoe_repro.training.store import sealed_record


def many_records(count: int, study: str = "quick-digits"):
    """Yield `count` records that differ by trial seed and test domain, as a sweep would leave them.

    Records of several algorithms take turns, so that groups of runs are as in a real study.
    """
    lines = (repo_root() / "results" / f"{study}.jsonl").read_text().splitlines()
    patterns = {}
    for line in lines:
        record = json.loads(line)
        record.pop("sha256", None)
        key = (record["config"]["algorithm"], str(record["config"]["test_domains"]))
        patterns.setdefault(key, record)
    patterns = list(patterns.values())
    for number in range(count):
        record = copy.deepcopy(patterns[number % len(patterns)])
        record["config"]["trial_seed"] = 1000 + number // len(patterns)
        record["run_id"] = RunConfig.from_dict(record["config"]).run_id
        yield record


def write_store(folder: Path, count: int, study: str = "quick-digits") -> list[str]:
    """Write `count` records into a folder of runs, and return their ids."""
    ids = []
    for record in many_records(count, study):
        place = folder / record["run_id"]
        place.mkdir(parents=True)
        (place / "record.json").write_text(sealed_record(record))
        ids.append(record["run_id"])
    return ids
