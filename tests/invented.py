"""Invented studies for the tests of reports:
the shape of real records, numbers from a seeded generator, never written into results/."""

import json
from pathlib import Path

import numpy as np
import torch

from hmoe_repro.core.seals import sealed
from hmoe_repro.training.run_config import RunConfig
from hmoe_repro.training.selection import (
    differing_selection,
    in_domain_accuracy,
    training_domain_validation,
)

DOMAINS = ("negative", "photo", "plain", "sketch")
ALGORITHMS = ("ERM", "HMOE-DL", "HMOE-DN", "HMOE-ND")
LOSSES = {
    "ERM": ("loss",),
    "HMOE-DL": ("loss", "L_y", "L_d"),
    "HMOE-DN": ("loss", "L_y", "L_en", "L_kl", "L_ad"),
    "HMOE-ND": ("loss", "L_y", "L_en", "L_kl", "L_ad"),
}


def record(algorithm, test_domain, seed, random, steps=301, every=20, **hparams):
    "A complete run with checkpoints, selected checkpoints and, for HMOE, discovery."
    modes = ("default",) if algorithm == "ERM" else ("mix", "max", "ood")
    top = {d: 0.9 - 0.06 * i + 0.02 * random.random() for i, d in enumerate(DOMAINS)}
    points, best, selected = [], dict.fromkeys(modes, -1.0), {}
    for step in (
        [*range(0, steps, every), steps - 1] if (steps - 1) % every else range(0, steps, every)
    ):
        rise = 1 - np.exp(-(step + 5) / 60)
        at = {
            d: {"out": {m: round(top[d] * rise + 0.02 * random.random(), 6) for m in modes}}
            for d in DOMAINS
            if d != test_domain
        }
        for m in modes:
            validation = float(np.mean([at[d]["out"][m] for d in at if d != test_domain]))
            if validation > best[m] or step == steps - 1:
                test = (
                    at.setdefault(test_domain, {})
                    .setdefault("in", {})
                    .setdefault(m, round(0.7 * top[test_domain] * rise + 0.03 * random.random(), 6))
                )
                if validation > best[m]:
                    best[m] = validation
                    selected[m] = {
                        "step": step,
                        "validation_accuracy": validation,
                        "test_accuracy": test,
                    }
        points.append(
            {
                "step": step,
                "losses": {
                    name: float(2 * np.exp(-step / 80) + 0.05 * random.random())
                    for name in LOSSES[algorithm]
                },
                "accuracies": at,
            }
        )
    scores = {
        "split": "out",
        "nmi_domain": random.random(),
        "ari_domain": random.random(),
        "nmi_class": 0.1,
        "ari_class": 0.05,
        "experts_used": 3,
        "gate_entropy": 0.02,
        "load_balance": 0.01,
    }
    config = {
        "algorithm": algorithm,
        "dataset": "DigitDomains",
        "dataset_fingerprint": "invented",
        "test_domains": [test_domain],
        "trial_seed": seed,
        "hparams": {"lr": 1e-3}
        | ({} if algorithm == "ERM" else {"num_experts": 5 if algorithm == "HMOE-ND" else 0})
        | hparams,
        "network": "small_cnn",
        "weights": None,
        "resolution": 16,
        "steps": steps,
        "checkpoint_frequency": every,
        "sampler": "domain",
        "evaluate": "selection",
        "precision": "float32",
        "domainbed_compat": False,
        "algorithm_source": None,
    }
    config = RunConfig.from_dict(config).to_dict()
    environment = {
        "versions": {"torch": "2.13.0"},
        "commit": "0123456789ab",
        "library": "ba9876543210",
        "device": "cpu",
        "device_name": "an invented processor",
        "threads": 1,
    }
    return {
        "run_id": RunConfig.from_dict(config).run_id,
        "record_version": 2,
        "status": "complete",
        "reason": None,
        "config": config,
        "checkpoints": points,
        "selected": selected,
        "discovery": None if algorithm == "ERM" else scores,
        "test_size": 360,
        "environment": environment,
        "wall_time_s": 8.0,
        "finished": "2026-01-01T00:00:00+00:00",
    }


def failed(algorithm, test_domain, seed, reason="NaN loss at step 40", **hparams):
    "A run that did not end well."
    whole = record(algorithm, test_domain, seed, np.random.default_rng(0), **hparams)
    return whole | {
        "status": "failed",
        "reason": reason,
        "checkpoints": [],
        "selected": {},
        "discovery": None,
    }


def arrays(run, random, per_domain=40):
    "Codes, gate values and labels as a classification run stores them; experts follow the domains."
    test = run["config"]["test_domains"][0]
    training = [i for i, d in enumerate(DOMAINS) if d != test]
    experts = 5 if run["config"]["algorithm"] == "HMOE-ND" else 3
    embeddings = 3 * random.normal(size=(experts, 32))
    stored = {"embeddings": embeddings.astype(np.float16)}
    for split, domains in (("in", training), ("out", training), ("test", [DOMAINS.index(test)])):
        domain = np.repeat(domains, per_domain).astype(np.int16)
        expert = np.array(
            [training.index(d) if d in training else random.integers(experts) for d in domain]
        )
        gate = np.full((len(domain), experts), 0.01)
        gate[np.arange(len(domain)), expert] = 1 - 0.01 * (experts - 1)
        stored |= {
            f"code_{split}": (
                embeddings[expert] + 0.4 * random.normal(size=(len(domain), 32))
            ).astype(np.float16),
            f"domain_{split}": domain,
            f"class_{split}": random.integers(0, 10, len(domain)).astype(np.int16),
            f"gate_{split}": gate.astype(np.float16),
        }
    return stored


def followed(record):
    "A record with checkpoints of which those are selected that it says are."
    if differing_selection(record) is None:
        return record
    test = record["config"]["test_domains"]
    training = [domain for domain in DOMAINS if domain not in test]
    points = {p["step"]: {"losses": {}} | p | {"accuracies": {}} for p in record["checkpoints"]}

    def measured(step, domain, part, mode, value):
        at = points[step]["accuracies"].setdefault(domain, {})
        at.setdefault(part, {})[mode] = value

    said = {"selected": record["selected"], "in_domain": record.get("in_domain", {})}
    for mode, chosen in (said["selected"] | said["in_domain"]).items():
        best = chosen.setdefault("step", 20)
        points.setdefault(best, {"step": best, "losses": {}, "accuracies": {}})
        for step in points:
            for domain in training:
                share = 1 if step == best else 0.5
                value = share * chosen.get("validation_accuracy", 0.9)
                measured(step, domain, "out", mode, value)
        for domain in test if mode in said["selected"] else ():
            measured(best, domain, "in", mode, said["selected"][mode]["test_accuracy"])
        for domain in training if mode in said["in_domain"] else ():
            measured(best, domain, "test", mode, said["in_domain"][mode]["accuracy"])
    points = [points[step] for step in sorted(points)]
    selected = training_domain_validation(points, test, said["selected"])
    inside = in_domain_accuracy(points, test, said["in_domain"])
    made = record | {"checkpoints": points, "selected": selected}
    return made | ({"in_domain": inside} if inside else {})


def write_arrays(folder, run_id, values):
    "Write the NumPy arrays of a run, sealed with its id, to `<folder>/<run_id>.safetensors`."
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in values.items()
    }
    (folder / f"{run_id}.safetensors").write_bytes(sealed(tensors, run=run_id))


def write_study(folder, study, records, with_arrays=()):
    "Write `<folder>/<study>.jsonl`, and arrays for the HMOE runs whose trial seed is listed."
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(followed(r)) + "\n" for r in sorted(records, key=lambda r: r["run_id"])]
    (folder / f"{study}.jsonl").write_text("".join(lines))
    for run in records:
        if (
            run["status"] == "complete"
            and run["discovery"]
            and run["config"]["trial_seed"] in with_arrays
        ):
            made = arrays(run, np.random.default_rng(int(run["run_id"], 16)))
            write_arrays(folder / study, run["run_id"], made)
    return folder


def digits(seeds=(0, 1, 2), domains=DOMAINS, algorithms=ALGORITHMS):
    "Complete invented records for every algorithm, test domain and seed."
    random = np.random.default_rng(0)
    return [record(a, d, s, random) for a in algorithms for d in domains for s in seeds]


def balance(seeds=(0, 1)):
    "Complete invented records of HMOE-DN on photo with two weights on the load balance."
    random = np.random.default_rng(1)
    return [
        record("HMOE-DN", "photo", s, random, lambda_kl=weight)
        for weight in (1.0, 3.0)
        for s in seeds
    ]


def measured(algorithm, domain, seed, **accuracy):
    "A complete run with the given test accuracy of each mode."
    made = record(algorithm, domain, seed, np.random.default_rng(0))
    made["selected"] = {
        mode: {"step": 20, "validation_accuracy": 0.9, "test_accuracy": value}
        for mode, value in accuracy.items()
    }
    return made


def discovered(algorithm, domain, nmi):
    "Runs, seed by seed, with the given NMI of experts with domains."
    runs = [record(algorithm, domain, s, np.random.default_rng(s)) for s in range(len(nmi))]
    for made, value in zip(runs, nmi):
        made["discovery"]["nmi_domain"] = value
    return runs


def miniature():
    "ERM complete on two domains, HMOE-DN with one failed and one absent run on the second."
    runs = [measured("ERM", "photo", s, default=a) for s, a in enumerate((0.50, 0.60, 0.70))]
    runs += [measured("ERM", "sketch", s, default=a) for s, a in enumerate((0.80, 0.82, 0.90))]
    for seed, accuracy in enumerate((0.60, 0.75, 0.75)):
        runs.append(measured("HMOE-DN", "photo", seed, mix=accuracy, max=accuracy - 0.10))
    runs.append(measured("HMOE-DN", "sketch", 0, mix=0.85, max=0.80))
    return runs + [failed("HMOE-DN", "sketch", 1)]
