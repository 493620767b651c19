"""Evidence for .ci/verdicts.py: intervals and measures of rows (record_rows.py), with pandas and
scipy, and without the library."""

import math

import numpy as np
import pandas as pd
from record_rows import METRICS
from scipy import stats

RANKS = {"default": 0, "mix": 1, "max": 2, "ood": 3}  # the first mode stands for a run
CLASSES = {"PACS": (1 / 7, 1.0), "ColoredMNIST": (0.5, 0.75), "ColoredDigits": (0.5, 0.75)}


class NoRuns(Exception):
    """No run is as a claim wants it."""


def metric_of(name):
    """The table of a metric; of a column that is not listed, a score."""
    return METRICS["metrics"].get(name, {"unit": "score"})


def meets(frame, name, wanted):
    if isinstance(wanted, str) and wanted[0] in "<>!":
        return frame[[name]].eval(f"`{name}` {wanted}") & frame[name].notna()
    return frame[name].isin(wanted if isinstance(wanted, list) else [wanted])


def chosen(frame, where):
    for name, wanted in where.items():
        frame = frame[meets(frame, name, wanted)]
    ranked = frame.sort_values("mode", key=lambda m: m.map(RANKS).fillna(4), kind="stable")
    if frame.empty:
        raise NoRuns
    return frame if "mode" in where else ranked.drop_duplicates("run_id")


def places(rows, over):
    """What is a column of a grid: a test domain of a data set, or of all data sets together."""
    return rows.test_domain if "dataset" in over else rows.dataset + " " + rows.test_domain


def grid(rows, metric, over=()):
    """Trial seeds by test domains: the mean over all values of the columns `over`."""
    rows = rows.assign(place=places(rows, over))
    parts = [part for _, part in rows.groupby(list(over))] if over else [rows]
    cells = [p.pivot(index="trial_seed", columns="place", values=metric) for p in parts]
    return sum(cells).astype(float) / len(cells) * metric_of(metric).get("scale", 1)


def interval(values, level=0.95):
    """(mean, low, high, degrees of freedom, seeds) of seeds by test domains."""
    values = values.dropna(how="all").dropna(how="all", axis=1)
    n, means, domains = values.count(), values.mean(), values.shape[1]
    if n.empty or n.min() < 2:
        return means.mean(), math.nan, math.nan, math.nan, len(values)
    if n.min() >= 7:  # seeds are the unit
        moved = ((values - means) / n / domains).sum(axis=1)
        variance = (moved**2).sum() * len(values) / (len(values) - 1)
        freedom = n.min() - 1
    else:  # test domains are independent
        v = values.var() / n
        variance = v.sum() / domains**2
        freedom = v.sum() ** 2 / (v**2 / (n - 1)).sum() if v.sum() else math.inf
    if variance < 1e-24:
        return means.mean(), math.nan, math.nan, math.inf, len(values)
    ends = stats.t.interval(level, freedom, means.mean(), math.sqrt(variance))
    return means.mean(), *ends, freedom, len(values)


def undertrained(rows):
    """Is an algorithm, in its best mode, far behind the others or close to guessing?"""
    rows = rows[rows.accuracy.notna() | rows.accuracy_in_domain.isna()]
    best = rows.groupby(["dataset", "algorithm", "mode"]).validation.mean()
    best = best.groupby(["dataset", "algorithm"]).max()
    for (dataset, _), value in best.items():
        guess, top = CLASSES.get(dataset, (0.1, 1.0))
        if value < max(best[dataset].max() / 2, guess + (top - guess) / 6):
            return True
    return False


def contrast(frame, a, b, metric="accuracy", metric_b="", over=()):
    mine, theirs = chosen(frame, a), chosen(frame, b)
    gap = grid(mine, metric, over) - grid(theirs, metric_b or metric, over)
    rows, pairs = pd.concat([mine, theirs]), set(gap.stack().dropna().index)
    bad = not set(mine.algorithm) & set(theirs.algorithm) and undertrained(rows)
    cells = zip(rows.trial_seed, places(rows, over))
    used = rows[[cell in pairs for cell in cells]]
    return *interval(gap), used.run_id.nunique(), bad


def mean(frame, where, metric):
    rows = chosen(frame, where)
    cells = rows[metric].astype(float).groupby([rows.trial_seed, rows.dataset + rows.test_domain])
    wide = cells.mean().unstack() * metric_of(metric).get("scale", 1)
    return *interval(wide.loc[:, wide.count() > 1]), rows.run_id.nunique(), False


def rate(frame, where, condition, by=""):
    rows = chosen(frame, where)
    met = np.logical_and.reduce([meets(rows, name, want) for name, want in condition.items()])
    one = rows.assign(met=met).groupby(["dataset", "test_domain", "trial_seed"]).met.all()
    hits, n = int(one.sum()), len(one)  # runs of one split count once
    ends = stats.binomtest(hits, n).proportion_ci(method="exact")
    return 100 * hits / n, 100 * ends.low, 100 * ends.high, math.nan, 0, n, False


def alike(frame, baseline, where):
    rows, base = chosen(frame, where), grid(chosen(frame, {"algorithm": baseline}), "accuracy")
    parts = {name: part for name, part in rows.groupby("algorithm") if name != baseline}
    level = 1 - 0.05 / len(parts)
    found = [interval(grid(part, "accuracy") - base, level) for part in parts.values()]
    apart = [f for f in found if f[1] > 1 or f[2] < -1]
    worst = (
        max(apart, key=lambda f: abs(f[0])) if apart else max(found, key=lambda f: max(-f[1], f[2]))
    )
    return *worst[:3], math.nan, worst[4], rows.run_id.nunique(), False


def correlation(frame, where, x, y="accuracy"):
    rows = chosen(frame, where).dropna(subset=[x, y])
    places = rows.dataset + rows.test_domain
    pair = rows[[x, y]].astype(float)
    value = (pair - pair.groupby(places).transform("mean")).corr().iloc[0, 1]
    freedom = len(rows) - places.nunique() - 1
    half = stats.t.isf(0.025, freedom) / math.sqrt(freedom - 1)
    ends = np.tanh([np.arctanh(value) - half, np.arctanh(value) + half])
    return value, *ends, freedom, rows.trial_seed.nunique(), len(rows), False


MEASURES = {"contrast": contrast, "mean": mean, "rate": rate}
MEASURES |= {"alike": alike, "correlation": correlation}
