"""Recompute the verdicts of all claims from results/, with pandas and scipy alone.

    python .ci/verdicts.py OUTPUT.csv

Claims (hmoe_repro/claims.toml) and plans (study files) are data. Measures, intervals and rules are
written here once more, so that an error in the library cannot hide. Two claims rest on stored
arrays and are left out (`BY_ARRAYS`). Records are read by record_rows.py, and measures.py makes
estimates and intervals of them.
"""

import math
import sys
import tomllib

import numpy as np
import pandas as pd
from measures import MEASURES, NoRuns, metric_of
from record_rows import METRICS, ROOT, load, plan_of
from scipy import stats

BY_ARRAYS = ("toy: MIX in the gaps", "unseen is like nearest")
LOOKED = "decided by looking, to be confirmed"
COLUMNS = "claim benchmark studies seeds runs unit estimate low high verdict plan".split()


def margin_of(row):
    return METRICS["margins"][row["unit"]]


def judge(rule, margin, low, high, freedom):
    """The verdict by an interval of 95 %; equivalence is supported by that of 90 %."""
    name, number = (rule, 0) if isinstance(rule, str) else next(iter(rule.items()))
    if math.isnan(low):
        return "inconclusive"
    if name in ("smaller", "less_than"):
        low, high, number = -high, -low, number if name == "smaller" else -number
    ratio = 1 if math.isnan(freedom) else stats.t.isf(0.05, freedom) / stats.t.isf(0.025, freedom)
    centre, half = (low + high) / 2, (high - low) / 2 * ratio
    yes, no = {
        "larger": (low > 0, high < max(0, number - margin)),
        "within": (abs(centre) + half < margin, low > margin or high < -margin),
        "not_worse": (centre - half > -margin, high < -margin),
    }.get(name.replace("smaller", "larger"), (low > number, high < number))
    return "supported" if yes else "contradicted" if no else "inconclusive"


def pool(parts):
    """Random effects: DerSimonian and Laird, with the error of Hartung and Knapp."""
    errors = (parts.high - parts.low) / 2 / stats.t.isf(0.025, parts.freedom)
    weights, y, k = 1 / errors**2, parts.estimate, len(parts)
    excess = (weights * (y - np.average(y, weights=weights)) ** 2).sum() - (k - 1)
    between = max(0, excess / (weights.sum() - (weights**2).sum() / weights.sum()))
    weights = 1 / (errors**2 + between)
    centre = np.average(y, weights=weights)
    scatter = max(1, (weights * (y - centre) ** 2).sum() / (k - 1))
    return centre, *stats.t.interval(0.95, k - 1, centre, math.sqrt(scatter / weights.sum()))


def part_of(claim, other):
    """A row: a claim on one benchmark."""
    given = claim["arguments"] | other
    studies, on = given.pop("studies"), given.pop("on", claim["on"])
    own = {"rate": "% of runs", "correlation": "correlation"}.get(claim["measure"])
    unit = own or metric_of(given.get("metric", "accuracy"))["unit"]
    looked = given.pop("looked", claim.get("looked") and not other)
    frame = pd.concat(map(load, studies)).drop_duplicates(["run_id", "mode"])
    value, low, high, freedom, seeds, runs, bad = MEASURES[claim["measure"]](frame, **given)
    margin = margin_of({"unit": unit})
    judged = "rule" in claim and not bad
    verdict = judge(claim["rule"], margin, low, high, freedom) if judged else "inconclusive"
    plans = [plan_of(study) for study in studies]
    plan = LOOKED if looked and verdict != "inconclusive" else "retrospective"
    if all(plans):
        plan = f"plan of {max(made['date'] for made in plans):%Y-%m-%d}"
    what = (claim["key"], on, " ".join(studies), seeds, runs, unit)
    known = (*what, value, low, high, verdict, plan)
    small = "rule" in claim and -margin < low and high < margin
    facts = {"freedom": freedom, "bad": bad, "small": small, "planned": all(plans), "replaced": 0}
    return dict(zip(COLUMNS, known)) | facts


def with_trial(claim, parts):
    """A planned trial replaces a part decided by looking that it does not confirm."""
    trial = part_of(claim, claim["confirm"])
    for place, part in enumerate(parts):
        tried = part["plan"] == LOOKED and part["benchmark"] == trial["benchmark"]
        if tried and part["verdict"] != trial["verdict"]:
            part["replaced"] = 1
            parts.insert(place + 1, trial)


def together(claim, every):
    """The row over all benchmarks."""
    parts = every[every.replaced == 0]
    size = parts.seeds.where(parts.seeds > 0, parts.runs)
    order = parts.assign(size=-size, late=~parts.planned)
    strongest = order.sort_values(["late", "size"], kind="stable").drop_duplicates("benchmark")
    counted = parts[parts.low.notna() & ~parts.bad]
    pooled = counted[np.isfinite(counted.freedom.astype(float))]
    plan = parts.plan.max() if parts.planned.all() else "retrospective"
    if len(counted) == 1:
        return counted.iloc[0].to_dict() | {"benchmark": "together", "plan": plan}
    row = strongest.set_index("benchmark", drop=False).loc[parts.benchmark.iloc[0]].to_dict()
    row |= {"benchmark": "together", "plan": plan}
    named = " ".join((parts if counted.empty else counted).studies)
    row["studies"] = " ".join(dict.fromkeys(named.split()))
    verdicts, row["verdict"] = set(strongest.verdict), "inconclusive"
    if len(pooled) > 1:
        estimate = dict(zip(("estimate", "low", "high"), pool(pooled)))
        row |= estimate | {"seeds": 0, "runs": pooled.runs.sum()}
        if "rule" in claim:
            ends = row["low"], row["high"]
            row["verdict"] = judge(claim["rule"], margin_of(row), *ends, len(pooled) - 1)
    elif claim["measure"] == "rate":
        row |= {"seeds": 0, "runs": 0, "estimate": math.nan, "low": math.nan, "high": math.nan}
    small = (strongest.small & (strongest.verdict == "inconclusive")).any()
    if len(verdicts) == 1 and "inconclusive" not in verdicts:
        row["verdict"] = verdicts.pop()
    elif "supported" in verdicts and ("contradicted" in verdicts or small):
        row["verdict"] = "mixed"
    return row


def rows_of(claim):
    """The rows of a claim: each benchmark, and all together if there are several."""
    parts = []
    for other in ({}, *claim.get("benchmarks", ())):
        try:
            parts.append(part_of(claim, other))
        except (NoRuns, FileNotFoundError):
            continue
    if "confirm" in claim:
        with_trial(claim, parts)
    last = parts[0] if len(parts) == 1 else together(claim, pd.DataFrame(parts))
    if LOOKED in [part["plan"] for part in parts]:
        last["plan"] = f"{LOOKED} (not tried)"
    last["verdict"] = "not testable as put" if "untestable" in claim else last["verdict"]
    last["verdict"] = "needs paper scale" if "scale" in claim else last["verdict"]
    return parts if len(parts) == 1 else [*parts, last]


def verdicts():
    claims = tomllib.loads((ROOT / "hmoe_repro" / "claims.toml").read_text("utf-8"))["claims"]
    rows = [row for c in claims if c["key"] not in BY_ARRAYS for row in rows_of(c)]
    return pd.DataFrame(rows)[COLUMNS]


if __name__ == "__main__":
    verdicts().to_csv(sys.argv[1], index=False)
