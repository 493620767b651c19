"""The page to play with: its gate computes what the library computes, and its data are those of
the records. That it works in a browser is a test of the book (tests/test_book.py)."""

import base64
import csv
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from notebooks import ROOT

from hmoe_repro.analysis.results import arrays, results
from hmoe_repro.method.gating import entropy_loss, gate_values, load_balance_loss

BOOK = ROOT / "docs" / "book"
sys.path.append(str(BOOK))
import play  # noqa: E402
from play import first_seed  # noqa: E402

# In JavaScript: gate values, L_en and L_kl of each case.
COMPUTED = """cases.map(({v, e, eps, kind}) => {
  const rows = v.map(code => gateValues(code, e, eps, kind));
  return [rows, entropyLoss(rows), loadBalanceLoss(rows)];
})"""


def cases() -> list[dict]:
    """Fifty positions of six codes and three embeddings, with another eps and stretch each; in the
    last one a code lies on an embedding."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for i in range(50):
        stretch, eps = 10.0 ** (i % 5 - 2), 10.0 ** (i % 9 - 6)
        e, v = (stretch * torch.randn(n, 2, generator=draw, dtype=torch.float64) for n in (3, 6))
        made.append({"v": v.tolist(), "e": e.tolist(), "eps": eps, "kind": "paper"})
    made[-1]["v"][0] = made[-1]["e"][0]
    return made


def assert_equals_the_library(found, given):
    "Gate values and losses computed in JavaScript are those of `hmoe_repro.method.gating`."
    assert len(found) == len(given) == 50
    for (rows, L_en, L_kl), case in zip(found, given):
        v, e = (torch.tensor(case[name], dtype=torch.float64) for name in "ve")
        p = gate_values(v, e, case["eps"])
        assert np.allclose(rows, p, rtol=1e-9, atol=1e-12)
        assert np.isclose(L_en, entropy_loss(p).item(), rtol=1e-9, atol=1e-9)
        assert np.isclose(L_kl, load_balance_loss(p).item(), rtol=1e-9, atol=1e-9)


def test_the_gate_on_the_page_is_that_of_the_library():
    if not (node := shutil.which("node")):
        pytest.skip("there is no `node` here; tests/test_book.py compares the gate in a browser")
    given = cases()
    code = f"const {{gateValues, entropyLoss, loadBalanceLoss}} = require({json.dumps(SCRIPT)});"
    code += f"const cases = {json.dumps(given)}; console.log(JSON.stringify({COMPUTED}));"
    done = subprocess.run([node, "-e", code], capture_output=True, text=True, check=True)
    assert_equals_the_library(json.loads(done.stdout), given)


SCRIPT = str(BOOK / "static" / "play.js")


def test_the_other_gates_are_a_softmax_of_negative_distances():
    if not (node := shutil.which("node")):
        pytest.skip("there is no `node` here")
    code = f"const {{gateValues}} = require({json.dumps(SCRIPT)});"
    code += "const e = [[0, 0], [3, 0], [0, 4]], eps = 1e-6;"
    code += "const kinds = ['distance', 'square'].map(kind => gateValues([1, 0], e, eps, kind));"
    code += "console.log(JSON.stringify(kinds));"
    done = subprocess.run([node, "-e", code], capture_output=True, text=True, check=True)
    d = torch.cdist(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]]))
    for found, power in zip(json.loads(done.stdout), (1, 2)):
        assert np.allclose(found, (-(d**power)).softmax(-1)[0], atol=1e-6)


def decoded(text: str, shape) -> np.ndarray:
    "The numbers from 0 to 1 of `play.coded`."
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(shape) / 255


def test_the_film_has_the_seeds_and_counts_of_fig_3():
    film = play.film()
    with open(ROOT / "figures/quick/hmoe_fig3_summary.csv", encoding="utf-8", newline="") as file:
        rows = {row["losses"]: row for row in csv.DictReader(file)}
    assert list(film["runs"]) == ["all losses", "without L_en", "L_y alone"]
    for losses, run in film["runs"].items():
        for key, column in (("found", "intervals found"), ("majority", "by majority")):
            assert f"{sum(run[key])} of {len(run['seeds'])}" == rows[losses][column]
        assert run["seeds"] == list(range(len(run["seeds"])))
    toys = results("quick-toy")
    both = toys[(toys["hparams.lambda_kl"] == 1) & (toys["hparams.lambda_en"] == 1)]
    stored = np.concatenate([arrays(r)["gates"] for r in sorted(both.itertuples(), key=first_seed)])
    run = film["runs"]["all losses"]
    assert np.abs(decoded(run["gates"], stored.shape) - stored).max() <= 0.5 / 255 + 1e-3
    assert len(film["epochs"]) == stored.shape[1]
    assert len(film["points"]) == 60


@pytest.mark.slow
def test_the_map_has_found_and_failed_runs_and_their_scores():
    maps = play.maps()
    assert len(maps["sheet"]) < 400_000
    digits, k_means = results("quick-digits"), results("quick-clusters")
    k_means = k_means[(k_means.dataset == "DigitDomains") & (k_means.trial_seed == 0)]
    found = set()
    for run in maps["runs"]:
        of = (digits.algorithm == "HMOE-DN") & (digits.test_domain == run["test"])
        record = digits[of & (digits.trial_seed == 0)].record.iloc[0]
        score = record["discovery"]["nmi_domain"]
        assert run["nmi"]["domain"] == round(score, 2)
        found.add(score >= 0.9)
        n = len(run["places"])
        assert n == run["known"] + 20 == len(run["tile"]) == len(run["gates"])
        assert len(run["kmeans"]) == run["known"]
        assert max(run["kmeans"]) == 2
        (other,) = k_means[k_means.test_domain == run["test"]]["clusters.statistics.nmi_domain"]
        assert run["nmi"]["kmeans"] == round(other, 2)
    assert found == {True, False}
