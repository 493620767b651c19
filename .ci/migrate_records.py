"""Rename fields and ids of all published records, once: `python .ci/migrate_records.py`.

Record version 1 -> 2: `spec` is `config`, `parity` is `domainbed_compat`, `arithmetic` is
`determinism`; a configuration holds every field and every hyper-parameter; parts of one study are
one file. Asserts that old and new ids are a bijection and that all measurements stay the same.
"""

import hashlib
import json
import shutil
from pathlib import Path

from hmoe_repro.algorithms import algorithm_names, get_algorithm
from hmoe_repro.algorithms.hparams import with_network
from hmoe_repro.training.run_config import TOY, RunConfig
from hmoe_repro.training.store import check_record, write_study

ROOT = Path(__file__).resolve().parent.parent
OMITTED = "code_norm embedding_scale entropy_ramp d2v_small_norm d2v_lr labelled_fraction"
OMITTED = (*OMITTED.split(), "labelled_domains")
PARTS = {
    "quick-table1-2": "quick-table1",
    "quick-table1-search-2": "quick-table1-search",
    "mnist-colored-baselines-2": "mnist-colored-baselines",
    **{f"mnist-rotated-baselines-{i}": "mnist-rotated-baselines" for i in (2, 3, 4, 5)},
}


def renamed(table):
    words = {"parity": "domainbed_compat", "arithmetic": "determinism"}
    return {words.get(name, name): value for name, value in table.items()}


def new_config(spec):
    spec = renamed(spec)
    assert spec.pop("protocol_version") == 1
    hparams = renamed(spec["hparams"])
    if spec["dataset"] != TOY and spec["algorithm"] in algorithm_names():
        declared = with_network(get_algorithm(spec["algorithm"]).HPARAMS, spec["network"])
        for name in OMITTED:
            known = hparams | {"network": spec["network"]}
            if name in declared and name not in hparams and declared[name].exists(known):
                hparams[name] = declared[name].default
        order = {name: i for i, name in enumerate(declared)}
        hparams = dict(sorted(hparams.items(), key=lambda kv: order.get(kv[0], len(order))))
    return RunConfig.from_dict(spec | {"hparams": hparams})


def new_record(record):
    config = new_config(record["spec"])
    rest = {k: v for k, v in record.items() if k not in ("run_id", "record_version", "spec")}
    rest["environment"] = renamed(rest["environment"])
    head = {"run_id": config.run_id, "record_version": 2}
    status = {k: rest.pop(k) for k in ("status", "reason")}
    made = head | status | {"config": config.to_dict()} | rest
    check_record(made, record["run_id"])
    for name in set(record) - {"run_id", "record_version", "spec", "environment"}:
        assert made[name] == record[name], name
    return made


def main():
    results, ids, studies = ROOT / "results", {}, {}
    for path in sorted(results.glob("*.jsonl")):
        study = PARTS.get(path.stem, path.stem)
        for line in path.read_text(encoding="utf-8").splitlines():
            old = json.loads(line)
            made = new_record(old)
            assert ids.setdefault(old["run_id"], made["run_id"]) == made["run_id"]
            studies.setdefault(study, {})[made["run_id"]] = made
        folder = path.with_suffix("")
        for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
            before = hashlib.sha256(file.read_bytes()).hexdigest()
            moved = results / study / f"{ids[file.stem]}.safetensors"
            moved.parent.mkdir(exist_ok=True)
            shutil.move(file, moved)
            assert hashlib.sha256(moved.read_bytes()).hexdigest() == before
        path.unlink()
    assert len(set(ids.values())) == len(ids)
    for study, records in studies.items():
        write_study(results / f"{study}.jsonl", list(records.values()), digest=True)
    for path in sorted(results.glob("bench*.json")):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace('"arithmetic"', '"determinism"'), encoding="utf-8")
    trial = ROOT / "docs" / "trials" / "pacs-pretraining.jsonl"
    write_study(trial, [new_record(json.loads(one)) for one in trial.read_text().splitlines()])
    for name in ("hmoe_repro/sample.toml",):
        text = (ROOT / name).read_text(encoding="utf-8")
        for old, made in ids.items():
            text = text.replace(old, made)
        (ROOT / name).write_text(text, encoding="utf-8")
    (ROOT / ".ci" / "migrated_ids.json").write_text(json.dumps(ids, indent=0, sort_keys=True))
    print(f"{len(ids)} runs in {len(studies)} studies")


if __name__ == "__main__":
    main()
