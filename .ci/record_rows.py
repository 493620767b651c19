"""Read results/ into rows with the scores that claims are about, for .ci/verdicts.py: with pandas,
and without the library. Scores of stored arrays are left out."""

import functools
import json
import math
import re
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
OMITTED = {"load_balance": "kl", "experts": "hypernetwork"}  # no part of a run's name at these
METRICS = tomllib.loads((ROOT / "hmoe_repro" / "metrics.toml").read_text("utf-8"))


def cues(dataset, found):
    """Which of two crossed cues is stronger, and how far the hue leads; {} on other data."""
    crossed = re.fullmatch(r"CrossedHue([\d.]+)(Turn|Width)([\d.]+)", dataset)
    if not crossed:
        return {}
    a, b = float(crossed[1]), float(crossed[3])
    lead = found["nmi_hue"] - found[f"nmi_{crossed[2].lower()}"]
    return {"hue_lead": lead, "stronger_cue": "neither" if a == b else "hue" if a > b else "second"}


def gate(r, found):
    splits = [(d, v) for p in r["checkpoints"] for d, v in p["accuracies"].items()]
    domains = len({d for d, v in splits if "out" in v} - set(r["config"]["test_domains"]))
    k = r["config"]["hparams"].get("num_experts") or domains
    share, load = found["gate_entropy"] / math.log(k), math.exp(-found["load_balance"])
    row = {"gate_share": share, "experts_in_use": load, "experts_per_domain": k * load / domains}
    row["idle_expert"] = share < 0.9 and found["experts_used"] < k
    row["domain_loss"] = r["checkpoints"][-1]["losses"].get("L_d", math.nan) / math.log(k)
    row |= cues(r["config"]["dataset"], found)
    return row | {"colour_less_domain": found.get("nmi_colour", math.nan) - found["nmi_domain"]}


def masks(r, found):
    iou = [place["mean_iou"] for place in found["places"].values()]
    by = {d: v["by_mask"] for d, v in found["accuracy"].items() if v["split"] == "test"}
    own = {d: v.pop(found["domains"].index(d)) for d, v in by.items()}
    gain = 100 * np.mean([own[d] - np.mean(by[d]) for d in by]) if by else math.nan
    return {"mask_iou": found["overall"]["mean_iou"], "own_mask_gain": gain} | {
        "mask_iou_fall": iou[0] - iou[-1]
    }


def spectra(r, found):
    ends = [curve[-1] for curve in found["curves"].values() if len(curve) > 1]
    out = found["noise"]["out"]
    noisy = [n for (low, _), n in zip(out["bands"], out["noisy"]) if low >= 0.5]
    cost = 100 * (out["clean"] - np.mean(noisy))
    return {"amplitude_rise": ends[-1] - ends[0], "noise_cost": cost}


def choices(r, found):
    last = found["out"]["layers"][-1]
    known = [last[name]["explained"]["value"] for name in ("class", "domain") if last.get(name)]
    return {"class_less_domain": known[0] - known[1] if len(known) == 2 else math.nan}


SCORES = {"discovery": gate, "masks": masks, "spectra": spectra, "expert_choices": choices}


def rows_of(r, study):
    """A row for each mode of a run, or for each seed of the toy."""
    row = pd.json_normalize(r["config"] | {k: r.get(k) for k in ("discovery", "clusters")})
    row = {f"hparams.{k}": v for k, v in OMITTED.items()} | row.iloc[0].dropna().to_dict()
    row |= {"study": study, "run_id": r["run_id"], "test_domain": ",".join(row["test_domains"])}
    for name, of in SCORES.items():
        row |= of(r, r[name]) if r.get(name) else {}
    gaps = {m: 100 * v["test_accuracy"] for m, v in r["selected"].items()}
    row |= {f"gap_{m}": v - gaps["mix"] for m, v in gaps.items() if "mix" in gaps}
    for toy in (r.get("toy") or {}).get("per_seed", []):
        run = {"run_id": f"{r['run_id']} {toy['seed']}", "trial_seed": toy["seed"]}
        yield row | run | {"mode": "default", "intervals_found": toy["intervals_found"]}
    for mode, v in (r.get("in_domain", {}) | r["selected"]).items():
        inside = r.get("in_domain", {}).get(mode, {}).get("accuracy")
        found = {"accuracy": v.get("test_accuracy"), "validation": v["validation_accuracy"]}
        yield row | found | {"mode": mode, "accuracy_in_domain": inside}


@functools.cache
def plan_of(study):
    path = ROOT / "hmoe_repro" / "study_files" / f"{study}.toml"
    return tomllib.loads(path.read_text("utf-8")).get("plan") if path.exists() else None


@functools.cache
def load(study):
    benchmark = ROOT / "results" / f"{study}.json"
    if benchmark.exists():
        found = json.loads(benchmark.read_text("utf-8"))["seconds"]
        seconds = pd.DataFrame(next(iter(found.values())))
        rows = seconds.div(seconds["ERM"], axis=0).rename_axis("trial_seed").reset_index()
        rows = rows.melt("trial_seed", var_name="algorithm", value_name="times_erm")
        return rows.assign(run_id=rows.index, mode="default", dataset="", test_domain="")
    lines = (ROOT / "results" / f"{study}.jsonl").read_text("utf-8").splitlines()
    seeds = (plan_of(study) or {}).get("seeds")
    done = [r for r in map(json.loads, lines) if r["status"] == "complete"]
    done = [r for r in done if not seeds or r["config"]["trial_seed"] in seeds]
    return pd.DataFrame([row for r in done for row in rows_of(r, study)])
