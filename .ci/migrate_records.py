"""Write new hyper-parameters and options of images into the published records, at their defaults.

    python .ci/migrate_records.py

A record's configuration holds every hyper-parameter of its algorithm and network, and its hash is
the run's id. So when an algorithm gets another one, its published runs get new ids: here, once, in
the commit that adds it. Old and new ids are a bijection, and nothing that was measured changes.
(An option of a run that is at its default is not hashed, nor is a hyper-parameter that is declared
with `omit_default`: a new one needs no migration.)
"""

import json
from pathlib import Path

from hmoe_repro.algorithms import algorithm_names, get_algorithm
from hmoe_repro.algorithms.hparams import merge_hparams, named_hparams, with_network
from hmoe_repro.data.loader import IMAGE_OPTIONS
from hmoe_repro.training.run_config import TOY, RunConfig
from hmoe_repro.training.store import check_record, verify_studies, write_study

ROOT = Path(__file__).resolve().parent.parent


def migrated(record):
    "The record with all hyper-parameters of today's library, under the id that they give it."
    config = RunConfig.from_dict(record["config"])
    if config.dataset == TOY or config.algorithm not in algorithm_names():
        return record
    given = config.hparams | {"network": config.network}
    where = config.resolution, config.dataset, config.domainbed_compat
    declared = get_algorithm(config.algorithm).HPARAMS
    hparams = merge_hparams(declared, given, *where)
    hparams = named_hparams(with_network(declared, config.network), hparams)
    hparams = json.loads(json.dumps(hparams))
    assert all(hparams[name] == value for name, value in given.items()), record["run_id"]
    new = {name: hparams[name] for name in hparams if name not in ("network", "weights")}
    images = config.images and IMAGE_OPTIONS | config.images
    config = config.replace(hparams=new, images=images)
    made = record | {"run_id": config.run_id, "config": config.to_dict()}
    return check_record(made, f"{record['run_id']}, migrated,")


def main():
    results, ids = ROOT / "results", {}
    verify_studies(results)
    for path in sorted(results.glob("*.jsonl")):
        records = []
        for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            records.append(migrated(record))
            ids[record["run_id"]] = records[-1]["run_id"]
        if all(old == new for old, new in ids.items()):
            continue
        for file in path.with_suffix("").glob("*.safetensors"):
            file.rename(file.with_stem(ids[file.stem]))
        write_study(path, records, digest=True)
    assert len(set(ids.values())) == len(ids)
    sample = ROOT / "hmoe_repro" / "sample.toml"
    text = sample.read_text(encoding="utf-8")
    for old, new in ids.items():
        text = text.replace(old, new)
    sample.write_text(text, encoding="utf-8")
    print(f"{sum(old != new for old, new in ids.items())} of {len(ids)} runs have new ids")


if __name__ == "__main__":
    main()
