"""Numbers in the prose of notebooks and `docs/` are computed: by cells, from records, or here."""

import json
import math
import re

import numpy as np
import pytest
from notebooks import LIBRARY, ROOT, cells, for_each, name_of, read
from scipy import integrate, stats

from hmoe_repro.analysis.results import load_study
from hmoe_repro.method.toy_hmoe import toy_hparams
from hmoe_repro.report.readme import SAME_CONTRAST, class_minus_domain, comparison_table
from hmoe_repro.studies.request import requested_artefacts, requested_studies, runs_of
from hmoe_repro.studies.study_file import read_study

UNITS = "points|runs|seeds|images|algorithms|seconds|minutes|kB|MB|GB"
NUMBER = re.compile(rf"(?<![\w.,])(\d[\d,]*\.\d+|\d+(?= ?%)|\d[\d,]*(?= (?:{UNITS})\b))(?!\d)")
LEVELS = {"95", "2.5", "5", "90", "80", "19"}  # of confidence, of power


def largest_of(n):
    "Expected value of the largest of `n` standard normal numbers."
    density = lambda x: x * n * stats.norm.pdf(x) * stats.norm.cdf(x) ** (n - 1)  # noqa: E731
    return integrate.quad(density, -8, 8)[0]


COMPUTED = {  # notebook, number in its prose: what it is
    ("01_method/05_toy_hmoe", "0.001"): toy_hparams()["lr"],
    ("02_data/08_benchmarks", "458"): 24_788 - 24_330,  # as published, and today
    ("04_algorithms/03_base", "48"): 3 * 16,
    ("04_algorithms/18_causal", "18"): 36 / 2,
    ("05_training/14_fair_comparison", "358"): (6_990 - 18 * 269) / 6,
    ("09_apps/04_discover", "112"): 2 * 4 * 14,
    ("02_data/06_cache", "1.5"): 9_991 * 3 * 224**2 / 1e9,
    ("03_networks/07_timm_models", "28"): 100 * (16 / 30) ** 2,
    ("04_algorithms/13_dmg", "0.02"): 701 * 1e-4 / 4,
    ("04_algorithms/17_contrast", "0.109"): 1 / (1 + math.exp(2.1)),
    ("04_algorithms/17_contrast", "0.105"): 0.1 * 2.1 / 2,
    ("04_algorithms/17_contrast", "0.0998"): 1 / (1 + math.exp(2.2)),
    ("04_algorithms/17_contrast", "0.110"): 0.1 * 2.2 / 2,
    ("04_algorithms/17_contrast", "4.2"): 2 * 2.1,
    ("05_training/04_selection", "1.77"): largest_of(16),
    ("07_analysis/06_clusters", "2.83"): math.exp(1.5 * math.log(2)),
    ("07_analysis/12_experts", "22.1"): (21_665_664 + 385 * 1000) / 1e6,
    ("07_analysis/18_precision_parity", "7.1"): np.std([-5, 5], ddof=1),
    ("09_apps/01_own_images", "20"): 100 - 80 * 0.8 - 80 * 0.2,
}
QUOTED = {  # notebook: numbers of its prose that are others', or settings of an example
    "00_core/00_start_here": {"90"},  # the class
    "02_data/08_benchmarks": {"97", "87"},  # Spawrious
    # measured on PACS, and held by tests/test_image_quality.py
    "02_data/14_image_quality": {"9,991", "0.8", "44", "1.18", "1.74", "0.19", "0.89"},
    "03_networks/06_backbones": {"0.02"},  # timm's initialisation
    "03_networks/12_model_size": {"4.8", "4.6"},  # GMoE's text
    "05_training/10_measurements": {"500"},  # networks.routing.CHOICES
    "05_training/14_fair_comparison": {"20"},  # DomainBed's protocol
    "07_analysis/04_tables": {  # where tables of the papers disagree
        "2.2", "12.7", "13.07", "30.13", "38.25", "38.6", "47.3", "50.06", "78.8", "79.10",
        "80.05", "80.1", "86.9",
    },
    "07_analysis/05_statistics": {"5.1", "5.7", "52"},  # invented intervals
    "07_analysis/12_experts": {"1.5"},  # the capacity of the released code
    "07_analysis/15_claims": {"5.1", "5.7"},  # the same
    "07_analysis/19_answers": {"0.21", "4.7"},  # examples of sentences
    "02_data/11_download": {"50"},  # an example
    "10_bench/09_frozen_stages": {"0.1", "0.3", "16"},  # the scale, and the invented record
}  # fmt: skip


def prose(source):
    "The running text of a Markdown cell: no code, no formulas, no targets of links."
    text = re.sub(r"```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$", " ", source, flags=re.S)
    text = re.sub(r"\]\([^)]*\)|\[\d\d_\w+", " ", text)
    text = re.sub(r"^\*\*Covers:\*\*.*$|arXiv:? [\d.]+", " ", text, flags=re.M)
    return re.sub(r"(sections?|appendix|appendices)( \d[\d.]*(,| and)?)+", " ", text)


def evidence(path):
    "What the code of a notebook says and shows, with the blocks of code in its text."
    parts = []
    for cell in read(path)["cells"]:
        if cell["cell_type"] == "markdown":
            parts += re.findall(r"```.*?```|\$\$?[^$]+\$\$?|`[^`]*`", cell["source"], flags=re.S)
            continue
        parts.append(cell["source"])
        for output in cell["outputs"]:
            texts = [output.get("text", "")]
            texts += [v for k, v in output.get("data", {}).items() if k.startswith("text/")]
            parts += ["".join(text) for text in texts]
    return "\n".join(parts)


def is_shown(number, shown):
    "Whether a number is among the numbers `shown`, rounded to its decimals, or as a percentage."
    value = float(number.replace(",", ""))
    half = 0.5 * 10.0 ** -len(number.partition(".")[2]) + 1e-9
    return bool(np.any((np.abs(shown - value) <= half) | (np.abs(100 * shown - value) <= half)))


def numbers_of(text):
    "All numbers of a text."
    found = re.findall(r"(?<![\w.])-?\d[\d,_]*(?:\.\d+)?(?:e-?\d+)?", text)
    return np.abs(np.array([float(re.sub("[,_]", "", number)) for number in found] or [math.nan]))


def unfounded(path):
    "The numbers of the prose of a notebook that nothing in it computes."
    shown, missing = numbers_of(evidence(path)), []
    for cell in cells(path, "markdown"):
        if "deviations" in cell["id"]:  # of the papers and of other people's code
            continue
        for number in NUMBER.findall(prose(cell["source"])):
            known = number in LEVELS or number in QUOTED.get(name_of(path), ())
            known = known or (name_of(path), number) in COMPUTED
            if not known and not is_shown(number, shown):
                missing.append(f"{cell['id']}: {number}")
    return missing


def test_a_number_is_found_rounded_or_as_a_percentage():
    shown = numbers_of("a 0.934 and 1,160")
    assert is_shown("0.93", shown)
    assert is_shown("93", shown)
    assert is_shown("1,160", shown)
    assert not is_shown("0.94", shown)
    assert not is_shown("94", shown)


@for_each(LIBRARY)
def test_numbers_of_the_prose_are_computed(path):
    assert not unfounded(path)


@pytest.mark.parametrize("place", COMPUTED, ids=" ".join)
def test_a_number_that_no_cell_shows_is_computed_here(place):
    notebook, number = place
    texts = [prose(cell["source"]) for cell in cells(ROOT / f"nbs/{notebook}.ipynb", "markdown")]
    assert number in NUMBER.findall("\n".join(texts))
    decimals = len(number.partition(".")[2])
    assert round(COMPUTED[place] + 1e-9, decimals) == float(number)


STATED = [  # notebook, its cell of text, what this says, the cell of code, what that shows
    ("01_method/05_toy_hmoe", "md-seeds-reading", "the 29 dots", "figure-seeds", "29"),
    ("01_method/05_toy_hmoe", "md-exercises", "sixty seeds 29", "figure-seeds", "29"),
    ("01_method/05_toy_hmoe", "md-answer-3", "from 2 to 9", "answer-3", "2 to 9"),
    ("01_method/09_conditional_target", "md-nets", "adds 18 %", "network", "adds 18%"),
    ("02_data/02_digits", "md-summary", "93 % of", "check-domain-shift", "0.93"),
    ("02_data/02_digits", "md-summary", "41 % of", "check-domain-shift", "0.41"),
    ("03_networks/04_encoders", "md-norm-comment", "is 6 %", "figure-norm", "6%"),
    ("03_networks/04_encoders", "md-norm-comment", "norm 31 %", "figure-norm", "31%"),
    ("04_algorithms/12_gmoe", "md-train", "0.016", "example-train", "0.016"),
    ("04_algorithms/12_gmoe", "md-train", "0.893", "example-train", "0.893"),
    ("09_apps/07_full_run", "md-verdict", "17 and 14 %", "show-table", "17.4 ± 1.1"),
    ("09_apps/07_full_run", "md-verdict", "17 and 14 %", "show-table", "13.6 ± 1.8"),
]


@pytest.mark.parametrize("notebook, text, says, code, shows", STATED)
def test_what_a_text_says_the_next_cell_shows(notebook, text, says, code, shows):
    by_id = {cell["id"]: cell for cell in read(ROOT / f"nbs/{notebook}.ipynb")["cells"]}
    assert says in by_id[text]["source"]
    assert shows in json.dumps(by_id[code]["outputs"], ensure_ascii=False)


def test_the_ratio_to_independence_is_said_by_its_cell():
    path = ROOT / "nbs/07_analysis/05_statistics.ipynb"
    by_id = {cell["id"]: cell for cell in read(path)["cells"]}
    assert not NUMBER.findall(prose(by_id["md-independence"]["source"]))
    said = "".join(by_id["check-independence"]["outputs"][0]["text"])
    low, high = map(float, re.search(r"Here it is ([\d.]+) to ([\d.]+)\.", said).groups())
    table = "".join(by_id["check-independence"]["outputs"][1]["data"]["text/plain"])
    ratios = [float(line.split()[-1]) for line in table.splitlines()[1:]]
    assert (min(ratios), max(ratios)) == (low, high)
    narrower = float(re.search(r"(\d+)% narrower", said)[1])
    assert abs(narrower - 100 * (1 - high**-0.5)) <= 0.6


# docs


def test_the_runs_of_a_fresh_reproduction_are_counted():
    configs = runs_of(requested_studies(requested_artefacts(None, "quick", False), "quick"))
    text = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    assert f"`hmoe reproduce --profile quick --fresh` ({len(configs)} runs)" in text


def test_the_runs_of_hmoe_tables_1_4_and_5_are_counted():
    runs = 0
    for name in ("colored", "rotated", "colored-baselines", "rotated-baselines"):
        for block in read_study(f"paper-{name}").runs:
            runs += len(block.algorithms) * len(block.test_domains) * len(block.seeds)
            assert block.steps == 5001
    text = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    assert f"has {runs} runs of 5,001 updates" in text


def selected(record, mode="default"):
    "(test domain, trial seed) and test accuracy of a record, in percent."
    config = record["config"]
    place = (config["test_domains"][0], config["trial_seed"])
    return place, 100 * record["selected"][mode]["test_accuracy"]


def test_a_difference_of_the_table_is_that_of_the_records_by_hand():
    accuracies = {"ERM": {}, "HMOE-DN": {}}
    for record in load_study("quick-digits"):
        algorithm = record["config"]["algorithm"]
        if algorithm in accuracies:
            place, value = selected(record, "mix" if algorithm == "HMOE-DN" else "default")
            accuracies[algorithm][place] = value
    places = accuracies["ERM"].keys()
    assert len(places) == 12
    mean = np.mean([accuracies["HMOE-DN"][place] - accuracies["ERM"][place] for place in places])
    title, *_ = SAME_CONTRAST
    [comparison] = [each for each in SAME_CONTRAST[title] if each.studies == ("quick-digits",)]
    table = comparison_table([comparison])
    assert table["points (95 % CI)"][0].startswith(f"{mean:+.1f} (95 % CI ")
    assert table[["seeds", "updates", "learning rate"]].values.tolist() == [[3, "701", "0.003"]]
    assert table["test domains"][0] == "negative, photo, plain, sketch"


def test_the_tables_of_differences_have_the_settings_that_differ():
    tables = {title: comparison_table(listed) for title, listed in SAME_CONTRAST.items()}
    digits, transformers = tables.values()
    stated = digits.set_index("points (95 % CI)").index.str.partition(" ").get_level_values(0)
    assert {"-0.3", "+1.4", "-5.9", "-6.1", "+1.9", "+3.5"} <= set(stated)
    long = digits[digits.study == "quick-discovery-long"]
    assert set(long.updates) == {"5,001 (ERM: 701)"}
    assert set(long["learning rate"]) == {"0.001 (ERM: 0.003)"}
    assert set(digits.normalisation) == {
        "none", "instance norm in the encoder", "batch norm of codes",
    }  # fmt: skip
    assert "normalisation" not in transformers
    assert transformers["points (95 % CI)"][0].startswith("+0.7 ")
    assert transformers["points (95 % CI)"][1].startswith("-2.8 ")
    for table in tables.values():
        for page in table.page:
            assert (ROOT / f"figures/{page}.ipynb").exists()


def test_class_minus_domain_is_that_of_the_claim_and_that_of_the_page():
    last, mean = class_minus_domain().itertuples(index=False)
    assert (last.page, mean.page) == ("quick/claims", "quick/gmoe_selection")
    explained = []
    for record in load_study("quick-gmoe"):
        if record["config"]["algorithm"] == "GMoE":
            layers = record["expert_choices"]["out"]["layers"]
            values = [
                layer["class"]["explained"]["value"] - layer["domain"]["explained"]["value"]
                for layer in layers
            ]
            explained.append((values[-1], np.mean(values)))
    by_hand = 100 * np.mean(explained, axis=0)
    assert last[0].startswith(f"{by_hand[0]:+.1f} ")
    assert mean[0].startswith(f"{by_hand[1]:+.1f} ")
