"""Images behind partitions: what is drawn is what was stored, and the pages of domain discovery
work from records alone."""

import json
import math
import re
import shutil

import matplotlib
import numpy as np
import pandas as pd
import pytest
from safetensors.torch import load_file

from hmoe_repro.analysis.clusters import scored_runs
from hmoe_repro.analysis.embeddings import (
    EMBEDDINGS,
    display_rgb,
    factor_maps,
    factor_style,
    heat_map,
    panels_finding,
    panels_note,
    plot_factor_grid,
    plot_panels,
    plot_settings,
    plot_strip,
    runs_with_codes,
    tiled,
)
from hmoe_repro.analysis.results import frame_of, load_study, results
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seals import sealed
from hmoe_repro.report.render import KINDS, render
from hmoe_repro.training.run_config import RunConfig
from hmoe_repro.training.store import write_study

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

pytestmark = pytest.mark.usefixtures("warm_kernels")

NAMES = ["+90%", "+80%", "-90%"]


def stored(experts=3, n=60, seed=0, channels=2):
    """Arrays of a run whose experts are the colours; the last expert owns nothing, and expert 1 no
    panel image of the first domain."""
    random = np.random.default_rng(seed)
    arrays = {"embeddings": random.normal(size=(experts, 8)).astype(np.float16)}
    for split, domain in (("out", np.repeat([0, 1], n // 2)), ("test", np.full(24, 2))):
        colour = np.arange(len(domain)) % 2
        arrays |= {
            f"code_{split}": (
                arrays["embeddings"][colour] + 0.1 * random.normal(size=(len(domain), 8))
            ).astype(np.float16),
            f"gate_{split}": np.eye(experts)[colour].astype(np.float16),
            f"domain_{split}": domain.astype(np.int16),
            f"class_{split}": random.integers(0, 2, len(domain)).astype(np.int16),
            f"colour_{split}": colour.astype(np.int16),
            f"digit_{split}": random.integers(0, 10, len(domain)).astype(np.int16),
        }
    index = np.r_[0:20, n // 2 : n // 2 + 20]
    return arrays | {
        "panel_index": index.astype(np.int16),
        "panel_images": random.integers(0, 256, (40, channels, 6, 5), dtype=np.uint8),
        "panel_test": random.integers(0, 256, (12, channels, 6, 5), dtype=np.uint8),
    }


@pytest.fixture(autouse=True)
def no_figures_left():
    yield
    plt.close("all")


def test_channels_become_colours():
    two = np.zeros((1, 2, 3, 4), np.uint8)
    two[0, 0, 0, 0], two[0, 1, 2, 3] = 200, 90
    rgb = display_rgb(two)
    assert rgb.shape == (1, 3, 4, 3)
    assert rgb[0, 0, 0].tolist() == [200, 0, 0]
    assert rgb[0, 2, 3].tolist() == [0, 90, 0]
    assert display_rgb(two[:, :1])[0, 0, 0].tolist() == [200] * 3
    three = np.arange(3, dtype=np.uint8).reshape(1, 3, 1, 1)
    assert display_rgb(three)[0, 0, 0].tolist() == [0, 1, 2]


def test_a_sheet_puts_every_image_in_its_field():
    images = np.stack([np.full((2, 3, 3), value, np.uint8) for value in (1, 2, 3, 4, 5)])
    sheet = tiled(images, columns=2, lines=2)
    assert sheet.shape == (5, 7, 3)
    assert [int(sheet[y, x, 0]) for y, x in ((0, 0), (0, 4), (3, 0), (3, 4))] == [1, 2, 3, 4]
    assert (sheet[2] == 255).all()
    assert (sheet[:, 3] == 255).all()
    assert (tiled(images[:0], 2) == 255).all()


def test_a_strip_shows_the_chosen_images_and_says_what_is_empty():
    images = stored()["panel_images"]
    _, axes = plt.subplots(1, 3)
    plot_strip(axes[0], images[[7, 3]], columns=2, lines=1)
    assert np.array_equal(axes[0].images[0].get_array(), tiled(display_rgb(images[[7, 3]]), 2))
    assert not axes[0].texts
    plot_strip(axes[1], images[:0])
    plot_strip(axes[2], images[:0], empty="none among the stored images")
    assert axes[1].texts[0].get_text() == "empty"
    assert axes[2].texts[0].get_text() == "none among the stored images"


def test_a_full_strip_takes_images_from_the_whole_group():
    images = np.arange(100, dtype=np.uint8).reshape(100, 1, 1, 1)
    axis = plt.figure().subplots()
    plot_strip(axis, images, columns=4, lines=1)
    assert axis.images[0].get_array()[0, ::2, 0].tolist() == [0, 33, 66, 99]


def test_panels_have_a_row_for_every_domain_and_expert():
    figure = plt.figure()
    plot_panels(figure, stored(), NAMES, columns=4, lines=1)
    shown = [axis for axis in figure.axes if axis.get_visible()]
    labels = [axis.get_ylabel() for axis in shown]
    assert len(shown) == 2 + 3 + 3
    assert "+90%\n50 %" in labels
    assert labels.count("expert 2\n0 %") == 2
    assert {axis.get_title() for axis in shown} >= {
        "by domain label",
        "by expert",
        "test domain -90%, by expert",
    }
    assert sum(text.get_text() == "empty" for axis in shown for text in axis.texts) == 2


def test_experts_stand_beside_the_domain_that_owns_most_of_their_images():
    arrays = stored()
    owner = np.where(arrays["domain_out"] == 0, 2, 0)  # of domain 0 expert 2, of domain 1 expert 0
    arrays["gate_out"] = np.eye(3)[owner]
    figure = plt.figure()
    plot_panels(figure, arrays, NAMES, columns=4, lines=1)
    middle = [axis for axis in figure.axes[1::3] if axis.get_visible()]
    labels = [axis.get_ylabel().partition("\n")[0] for axis in middle]
    assert labels == ["expert 2", "expert 0", "expert 1"]  # the one without images is last
    right = [axis.get_ylabel().partition("\n")[0] for axis in figure.axes[2::3]]
    assert right == labels


@pytest.mark.parametrize(
    "nmi, words", [(0.95, "DN follow the domains"), (0.6, "partly follow"), (0.1, "do not follow")]
)
def test_the_finding_of_panels_says_whether_experts_are_the_domains(nmi, words):
    run = a_run(nmi_domain=nmi, gate_entropy=0.1)
    assert words in panels_finding(run)
    assert f"(NMI {nmi:.2f})" in panels_finding(run)
    assert panels_note(run).startswith("Test domain -90%, trial seed 0. Gate entropy ")
    assert "hardly differ" not in panels_note(run)


def test_every_value_of_a_factor_has_its_own_colour():
    for factor, count in (("digit", 10), ("class", 2), ("domain", 3), ("colour", 2)):
        names, palette = factor_style(factor, np.arange(count), NAMES)
        assert len(names) == count == len({palette[name] for name in names})
    assert factor_style("colour", [0], NAMES)[0] == ["red", "green"]


def a_run(**scores):
    "A row of `results` with these scores of discovery."
    config = {"algorithm": "HMOE-DN", "dataset": "Invented", "test_domains": ["-90%"]}
    config |= {"trial_seed": 0, "hparams": {}}
    scores = {"load_balance": 0.0, "gate_entropy": 0.0} | scores
    record = {"run_id": "0", "status": "complete", "config": config, "discovery": scores}
    record["checkpoints"] = []
    return scored_runs(frame_of([record])).iloc[0]


def test_the_grid_shows_the_scores_of_the_record_and_every_factor():
    run = a_run(nmi_domain=0.12, nmi_class=0.34, nmi_colour=0.56, nmi_digit=0.78)
    figure = plot_factor_grid([(run, stored())] * 2, NAMES, {"digit": "numeral"})
    titles = [axis.get_title() for axis in figure.axes[::2]]
    assert titles[0].split("\n")[0] == "test: -90%"
    assert titles[0].endswith("NMI 0.12")
    assert titles[1:] == ["class: NMI 0.34", "colour: NMI 0.56", "numeral: NMI 0.78"]
    legends = [[t.get_text() for t in axis.get_legend().get_texts()] for axis in figure.axes[1::2]]
    assert legends[0] == [*NAMES, "test samples", EMBEDDINGS]
    assert legends[2][:2] == ["red", "green"]
    assert len(legends[3]) == 12
    with pytest.raises(HmoeError, match="stored codes"):
        plot_factor_grid([], NAMES)


def test_the_maps_show_the_other_factor_that_the_experts_are_closest_to():
    run = a_run(nmi_domain=0.9)
    shares = {"domain": 0.9, "class": 0.1, "colour": 1.0, "digit": 0.1}
    scores = pd.DataFrame({"run_id": "0", "factor": list(shares), "share": shares.values()})
    figure = factor_maps([(run, stored())], scores, NAMES)
    assert "colour and expert" in figure.axes[2].get_title()
    assert [t.get_text() for t in figure.axes[2].get_yticklabels()] == ["red", "green"]
    assert [t.get_text() for t in figure.axes[1].get_yticklabels()][-1] == "-90% (test)"


def test_every_run_is_a_dot_at_its_setting():
    rows = pd.DataFrame({"setting": ["a, b"] * 3 + ["c"] * 3, "K": 4, "experts_used": 3})
    rows["nmi_domain"] = [0.0, 0.5, 1.0] * 2
    panels = {"experts_used": "experts", "nmi_domain": "NMI"}
    axes = plot_settings(rows, panels).figure.axes
    dots = [len(part.get_offsets()) for part in axes[1].collections]
    assert sum(dots) == 6
    assert [t.get_text() for t in axes[0].get_xticklabels()] == ["a\nb", "c"]
    assert axes[1].get_ylim() == (-0.03, 1.07)


def test_a_heat_map_writes_every_number():
    _, axes = plt.subplots(1, 2)
    table = pd.DataFrame(
        [[30, 10], [0, 5]],
        index=pd.Index(["a", "b"], name="domain"),
        columns=["expert 0", "expert 1"],
    )
    heat_map(axes[0], table)
    assert [t.get_text() for t in axes[0].texts] == ["30", "10", "0", "5"]
    assert np.allclose(axes[0].collections[0].get_array(), [[0.75, 0.25], [0, 1]])
    assert axes[0].get_ylabel() == "domain"
    heat_map(axes[1], table / 100)
    assert [t.get_text() for t in axes[1].texts][:2] == ["0.30", "0.10"]


# The pages

PAGES = {
    "colored_discovery": "colored",
    "rotated_discovery": "rotated",
    "hmoe_fig7": "collapse",
    "hmoe_fig8": "classloss",
    "hmoe_sensitivity": "sensitivity",
}


@pytest.fixture(scope="module")
def study_copy(tmp_path_factory, root):
    """Two seeds and at most two test domains of published studies, in a folder of their own."""
    folder = tmp_path_factory.mktemp("store")
    for study in ("colored", "rotated", "collapse", "classloss", "sensitivity"):
        records = load_study(f"quick-{study}")
        kept = [r for r in records if r["config"]["trial_seed"] < 2]
        few = {"+80%", "negative", "plain"} if study != "sensitivity" else set()
        kept = [r for r in kept if not few & {*r["config"]["test_domains"]}]
        write_study(folder / f"quick-{study}.jsonl", kept)
        if (root / "results" / f"quick-{study}").is_dir():
            shutil.copytree(root / "results" / f"quick-{study}", folder / f"quick-{study}")
    return folder


def edit(folder, study, change):
    "Rewrite the discovery scores of every record of a study by `change(record)`."
    path = folder / f"quick-{study}.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if record["discovery"]:
            change(record)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def markdown_of(page):
    "Everything an executed page says in Markdown outputs."
    cells = json.loads(page.read_text())["cells"]
    return "\n".join(
        "".join(o["data"]["text/markdown"])
        for c in cells
        for o in c.get("outputs", [])
        if "text/markdown" in o.get("data", {})
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_made_from_records_alone_and_says_what_they_say(page, study_copy, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(study_copy, store)
    study = PAGES[page]
    if study == "colored":
        edit(
            store,
            study,
            lambda r: r["discovery"].update(nmi_colour=0.97, nmi_domain=0.01, gate_entropy=0.01),
        )
    if study == "rotated":
        edit(
            store,
            study,
            lambda r: r["discovery"].update(nmi_domain=0.85, gate_entropy=0.01, experts_used=5),
        )
    if study == "collapse":
        edit(
            store,
            study,
            lambda r: r["discovery"].update(
                experts_used=2, gate_entropy=0.01, load_balance=float(np.log(4))
            ),
        )
    if study == "classloss":
        edit(
            store,
            study,
            lambda r: r["discovery"].update(gate_entropy=0.5 * float(np.log(3)), nmi_domain=0.0),
        )
    if study == "sensitivity":
        edit(
            store,
            study,
            lambda r: r["discovery"].update(
                nmi_domain=0.9 if r["config"]["hparams"]["eps"] < 1e-3 else 0.2
            ),
        )
    text = markdown_of(
        render(page, "quick", store=store, output=tmp_path / "figures", formats=KINDS)
    )
    folder = tmp_path / "figures" / "quick"
    made = {path.name for path in folder.iterdir()}
    assert {
        f"{page}.{kind}" for kind in ("png", "pdf", "csv", "md", "tex", "ipynb", "provenance.json")
    } <= made
    assert "stand-in study" in text
    assert json.loads((folder / f"{page}.provenance.json").read_text())["study"] == f"quick-{study}"
    expected = {
        "colored": "HMOE-DN, 4 runs: the experts agree most with the colour in 4 (NMI 0.97)",
        "rotated": "HMOE-DN, 4 runs: the experts agree most with the angle in 4 (NMI 0.85)",
        "collapse": "K = 8, weight 3: the load-balance loss is log 2 or more in 4 of 4 (95 % CI 40 "
        "to 100 %) runs (mean effective number 2.0 of 8)",
        "classloss": "With L_y only, experts and domains have a mean NMI of 0.00 (equal in all "
        "seeds). Gate entropy is 50 to 50 % of log K",
        "sensitivity": "Domains found (NMI of 0.9 or more): eps = 1e-08: 2 of 2",
    }
    assert expected[study] in text, text
    if study in ("colored", "rotated"):
        assert {
            f"{page}_panels_dn.png",
            f"{page}_maps.png",
            f"{page}_gate.csv",
            f"{page}_runs.csv",
        } <= made
        assert (f"{page}_nd.png" in made) == (study == "colored")
        assert re.search(r"HMOE-DN, test domain \S+: ", text)


def test_a_page_without_stored_codes_keeps_its_scores(study_copy, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    shutil.copyfile(study_copy / "quick-rotated.jsonl", store / "quick-rotated.jsonl")
    text = markdown_of(
        render(
            "rotated_discovery", "quick", store=store, output=tmp_path / "figures", formats=KINDS
        )
    )
    assert "stored its codes" in text
    assert "HMOE-DN, 4 runs" in text


@pytest.mark.slow
def test_an_unknown_test_domain_is_refused_with_the_valid_ones(study_copy, tmp_path):
    with pytest.raises(HmoeError, match="Valid: 0, 75"):
        render(
            "rotated_discovery",
            "quick",
            store=study_copy,
            output=tmp_path / "figures",
            test_domain="37",
        )


def test_runs_with_codes_passes_over_runs_without(study_copy):
    frame = results("quick-colored", study_copy)
    found = runs_with_codes(frame[frame.algorithm == "HMOE-DN"], study_copy)
    assert {run.trial_seed for run, _ in found} == {0}
    assert len(found) == 2
    assert all({"panel_images", "colour_out"} <= set(arrays) for _, arrays in found)


def arm(record, weight, folder):
    "A copy of a run with another weight on the load balance, arrays included."
    copy = json.loads(json.dumps(record))
    copy["config"]["hparams"]["lambda_kl"] = weight
    copy["run_id"] = RunConfig.from_dict(copy["config"]).run_id
    arrays = folder / f"{record['run_id']}.safetensors"
    if arrays.exists() and copy["run_id"] != record["run_id"]:
        content = sealed(load_file(arrays), run=copy["run_id"])
        (folder / f"{copy['run_id']}.safetensors").write_bytes(content)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("weights", [(3.0,), (1.0, 3.0)], ids=str)
def test_the_page_of_fig7_shows_the_arms_that_were_trained(weights, study_copy, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(study_copy, store)
    path, records = (
        store / "quick-collapse.jsonl",
        [
            json.loads(line)
            for line in (study_copy / "quick-collapse.jsonl").read_text().splitlines()
        ],
    )
    thrice = [r for r in records if r["config"]["hparams"]["lambda_kl"] == 3]
    path.write_text(
        "".join(
            json.dumps(arm(r, weight, store / "quick-collapse")) + "\n"
            for weight in weights
            for r in thrice
        )
    )
    text = markdown_of(
        render("hmoe_fig7", "quick", store=store, output=tmp_path / "figures", formats=KINDS)
    )
    verdict = (tmp_path / "figures/quick/hmoe_fig7_verdict.md").read_text()
    named = set(re.findall(r"K = 8, weight (\d): ", verdict))
    assert ("1" in named) == (1.0 in weights) != ("not the paper's" in verdict)
    assert "3" in named
    assert ("No run here" in text) == (1.0 not in weights)
    assert "at initialisation" in verdict
    assert bool(re.search("lambda_kl 3 [^;]*some runs", text)) == (1.0 in weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page, study", [("colored_discovery", "colored"), ("rotated_discovery", "rotated")]
)
def test_a_page_whose_scores_are_all_zero_counts_by_another_factor_and_calls_the_gate_uniform(
    page, study, study_copy, tmp_path
):
    store = tmp_path / "store"
    shutil.copytree(study_copy, store)
    edit(
        store,
        study,
        lambda r: r["discovery"].update(
            {name: 0.0 for name in r["discovery"] if name.startswith(("nmi_", "ari_"))}
            | {
                "gate_entropy": math.log(
                    r["config"]["hparams"].get("num_experts") or (2 if study == "colored" else 5)
                )
            }
        ),
    )
    render(page, "quick", store=store, output=tmp_path / "figures", formats=KINDS)
    verdict = (tmp_path / "figures/quick" / f"{page}_verdict.md").read_text()
    assert "HMOE-DN, 4 runs:" in verdict
    assert "uniform in every" in verdict
    assert "100 % of" in verdict
    assert "undertrained" in verdict
    table = (tmp_path / "figures/quick" / f"{page}.md").read_text()
    assert f"{'Colored' if study == 'colored' else 'Rotated'}Digits, stand-in:" in table
    assert "701 updates," in table
    assert "2 seeds" in table
    assert "gate entropy /" in table
