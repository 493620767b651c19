"""Write the numbers and the table of columns into the data card, results/README.md.

    python .ci/data_card.py

The table lists every column that `hmoe_repro.results` returns for a published study, with its
meaning and unit. Hyper-parameters are described by hmoe_repro/hyperparameters.toml, and everything
else by MEANINGS. A column without a description is an error.
"""

import json
import re
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CARD = ROOT / "results" / "README.md"
# Column -> (meaning, unit). A key may be a regular expression.
MEANINGS = {
    "study": ("name of the study, which is the name of its file", ""),
    "run_id": ("hash of everything that decides the numbers of the run", ""),
    "status": ("complete or failed", ""),
    "reason": ("why the run failed", ""),
    "algorithm": ("training algorithm", ""),
    "algorithm_version": ("version of the mathematics of the algorithm", ""),
    "algorithm_source": ("hash of the code of a user's algorithm", ""),
    "mode": (
        "inference mode: mix, max or ood of HMOE, default of all others; none for the toy",
        "",
    ),
    "dataset": ("data set", ""),
    "dataset_fingerprint": ("fingerprint of the images and labels", ""),
    "network": ("featurizer", ""),
    "weights": ("initial weights, if the network has a choice", ""),
    "images": ("options for reading images", ""),
    "resolution": ("size of the images", "pixels a side"),
    "test_domain": ("held-out domain, or several, separated by commas", ""),
    "trial_seed": ("seed of the split, the weights and the batches", ""),
    "restart": ("number of other weights and batches on the same split", ""),
    "hparams_seed": ("0: default hyper-parameters; else the random trial of this seed", ""),
    "steps": ("number of updates", "updates"),
    "checkpoint_frequency": ("updates between two evaluations", "updates"),
    "sampler": ("domain (a batch of each training domain) or pooled", ""),
    "evaluate": ("which evaluations were made: selection, or all", ""),
    "precision": ("arithmetic of the network", ""),
    "protocol": ("domainbed or dmg", ""),
    "seed_as": ("name of the algorithm whose seeds the run has", ""),
    "splits": ("hash of lists of images that define the split; none: by trial seed", ""),
    "classes": ("if domains have different classes: all, intersection or union", ""),
    "domainbed_compat": ("whether DomainBed's implementation is repeated in detail", ""),
    "determinism": ("portable: equal bits on every x86-64 processor with AVX2; or native", ""),
    "measure": ("additional measurements, by name", ""),
    "accuracy": ("accuracy on the test domain, at the selected checkpoint", "0 to 1"),
    "validation_accuracy": ("mean accuracy on validation images of the training domains", "0 to 1"),
    "accuracy_in_domain": ("accuracy on test images of the training domains (DMG)", "0 to 1"),
    "step": ("selected checkpoint", "updates"),
    "test_size": ("number of images of the test domain", "images"),
    "in_domain_size": ("number of test images of the training domains (DMG)", "images"),
    "wall_time_s": ("time of training and evaluation, on the machine of the run", "s"),
    "resumed": ("whether the run was interrupted and resumed", ""),
    "finished": ("date and time of the end, ISO 8601", ""),
    "record": ("the complete record, with losses and accuracies of each checkpoint", ""),
    r"environment\.versions\.(.+)": (r"version of \1", ""),
    "environment.commit": ("commit of the library", ""),
    "environment.library": ("hash of the source of the library", ""),
    "environment.system": ("operating system and processor family", ""),
    "environment.device": ("device of the training", ""),
    "environment.device_name": ("model of the device", ""),
    "environment.cores": ("processor cores of the machine", "cores"),
    "environment.threads": ("threads of the training", "threads"),
    "environment.peak_memory_mb": ("largest memory of the process", "MiB"),
    "environment.determinism": ("arithmetic in use, portable or native", ""),
    r"environment\.(parts|resumed_from).*": ("machines of an interrupted run", ""),
    r"(discovery|clusters)\.split": ("images of the measurement (out: validation images)", ""),
    r"(discovery|clusters)\.step": ("checkpoint of the measurement", "updates"),
    "clusters.clusters": ("number of clusters of k-means", "clusters"),
    r"discovery\.nmi_(\w+)": (r"normalised mutual information of experts and \1", "0 to 1"),
    r"discovery\.ari_(\w+)": (r"adjusted Rand index of experts and \1", "-0.5 to 1"),
    "discovery.purity": (
        "fraction of images in the most frequent domain of their expert",
        "0 to 1",
    ),
    "discovery.experts_used": ("experts with at least 1 % of the images", "experts"),
    "discovery.gate_entropy": ("mean entropy of the gate values (HMOE, eq. 3)", "nats"),
    "discovery.load_balance": ("divergence of mean gate values from uniform (eq. 4)", "nats"),
    "discovery.diverged": ("whether codes grew beyond bounds at a checkpoint", ""),
    "discovery.groups": ("expert of each validation image, in the order of the split", ""),
    r"clusters\.(\w+)\.nmi_(\w+)": (r"NMI of \2 and the clusters of k-means on \1", "0 to 1"),
    r"clusters\.(\w+)\.ari_(\w+)": (r"ARI of \2 and the clusters of k-means on \1", "-0.5 to 1"),
    r"clusters\.(\w+)\.purity": (r"purity of the clusters of k-means on \1", "0 to 1"),
    "hparams.seeds": ("seeds of the toy", ""),
    "hparams.points": ("spacing of the points of the toy, even or random", ""),
}


def hparam_docs() -> dict[str, str]:
    "Return the description of each hyper-parameter; different ones of one name are joined by 'or'."
    found = defaultdict(list)

    def collect(table: dict) -> None:
        for name, value in table.items():
            if isinstance(value, dict) and "doc" in value:
                found[name].append(value["doc"])
            elif isinstance(value, dict):
                collect(value)

    file = ROOT / "hmoe_repro" / "hyperparameters.toml"
    collect(tomllib.loads(file.read_text(encoding="utf-8")))
    joined = {}
    for name, docs in found.items():
        different = list(dict.fromkeys(docs))
        if len(different) > 2:
            joined[name] = "differs by algorithm: see `hmoe_repro/hyperparameters.toml`"
        else:
            joined[name] = ", or ".join(different)
    return joined


def described(column: str, docs: dict[str, str]) -> tuple[str, str]:
    "Return the meaning and the unit of a column. KeyError if nothing describes it."
    if column in MEANINGS:
        return MEANINGS[column]
    name = column.removeprefix("hparams.")
    if name != column and name in docs:
        return docs[name], ""
    for pattern, (meaning, unit) in MEANINGS.items():
        match = re.fullmatch(pattern, column)
        if match:
            return match.expand(meaning), unit
    raise KeyError(f"{column} has no meaning in .ci/data_card.py")


def published() -> dict[str, list[str]]:
    "Return study -> columns of its frame, of every published study."
    import hmoe_repro as hm

    studies = sorted(path.stem for path in (ROOT / "results").glob("*.jsonl"))
    return {study: list(hm.results(study).columns) for study in studies}


def column_table(columns: list[str]) -> str:
    "Return the table of columns: the fields of a run first, hyper-parameters last."
    docs = hparam_docs()
    lines = ["| column | meaning | unit |", "|---|---|---|"]
    for column in sorted(columns, key=lambda name: (name.partition(".")[0] == "hparams",)):
        meaning, unit = described(column, docs)
        lines.append(f"| `{column}` | {meaning.replace('|', chr(92) + '|')} | {unit} |")
    return "\n".join(lines)


def numbers() -> str:
    "Return the sentence that counts what is published."
    folder = ROOT / "results"
    studies = list(folder.glob("*.jsonl"))
    lines = [line for path in studies for line in path.read_bytes().splitlines()]
    devices = [json.loads(line)["environment"]["device"] for line in lines]
    on_gpu = sum(device != "cpu" for device in devices)
    arrays = len(list(folder.glob("*/*.safetensors")))
    benches = len(list(folder.glob("bench*.json")))
    return (
        f"It holds {len(studies)} studies with {len(lines):,} records, the arrays of {arrays} "
        f"runs, and {benches} benchmarks of time and memory. {on_gpu} runs were trained on a GPU, "
        "and all others on processors."
    )


def with_block(text: str, name: str, content: str) -> str:
    "Return a page with the generated content between the comments of this name."
    start, end = f"<!-- {name}:start -->\n", f"<!-- {name}:end -->"
    head, _, rest = text.partition(start)
    _, found, tail = rest.partition(end)
    if not found:
        raise ValueError(f"{CARD.name} has no block {name}")
    return f"{head}{start}{content}\n{end}{tail}"


def all_columns() -> list[str]:
    "Return the columns of all studies, in the order in which they first appear."
    columns = {}
    for names in published().values():
        columns |= dict.fromkeys(names)
    return list(columns)


def main() -> None:
    "Write both blocks."
    text = CARD.read_text(encoding="utf-8")
    text = with_block(text, "numbers", numbers())
    text = with_block(text, "columns", column_table(all_columns()))
    CARD.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
