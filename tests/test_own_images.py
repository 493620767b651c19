"""Folders of one's own: what counts as a class, what training may know, and what the page and the
table say, in a real browser too."""

import base64
import csv
import io
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from hmoe_repro.analysis.writers import PAGE_POLICY
from hmoe_repro.apps.discover import (
    category_colours,
    code_maps,
    discover,
    findings_verdict,
    found_domains,
    page_groups,
    summarise_findings,
    verdict_sentences,
)
from hmoe_repro.apps.own_images import (
    HELD_OUT,
    POOLED,
    all_inputs,
    discover_config,
    image_files,
    read_pool,
    split_pool,
)
from hmoe_repro.apps.predict import forward_files, load
from hmoe_repro.cli.app import app
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.registry import load_dataset
from hmoe_repro.data.transforms import decode
from hmoe_repro.report.gallery import template
from hmoe_repro.training.model import build_dataset
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore

pytestmark = pytest.mark.usefixtures("own_names")
HACK = "document.title='hacked'"
ROOT_NAME = f"my <img src=x onerror={HACK}>"
DOMAINS = ("\"'><svg onload=" + HACK + ">", "Füße 日本 &amp; [b]")
CLASSES = (f"<iframe srcdoc=x onload={HACK}>", "$plain$")
FILE = f'"><img src=x onerror={HACK}> {{:02d}}.png'
SMALL = tuple(
    (
        "--network image_cnn --steps 3 --experts 3 --resolution 24 --set batch_size=8 --device cpu"
    ).split()
)


def fill(root, domains=DOMAINS, classes=CLASSES, count=10, name=FILE):
    """Pictures of noise around a grey that depends on the domain; without domains, all of them by
    class."""
    rng = np.random.default_rng(0)
    for d, domain in enumerate(domains or ("",)):
        for c in classes:
            folder = root / domain / c if domain else root / c
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                Image.fromarray(
                    rng.integers(100 * d, 100 * d + 100, (20, 30, 3), dtype=np.uint8)
                ).save(folder / name.format(i))
    return root


def hmoe(*arguments):
    "What a command prints; an error is raised."
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception:
        raise result.exception
    return result.output


SHORT = {"network": "small_cnn", "steps": 3, "checkpoint_frequency": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory, own_names_of_file):
    "A folder with hostile names, discovered once: its report, what was printed, and its store."
    place = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("runs", "cache"):
            patch.setenv(f"HMOE_{name.upper()}", str(place / name))
        patch.chdir(place)
        folder = fill(place / ROOT_NAME)
        said = hmoe("discover", folder, "--output", place / "report", *SMALL)
        run_ids = {p.parent.name for p in (place / "runs").glob("*/record.json")}
        assert len(run_ids) == 3  # restarts, of which the page names the one that is kept
        (run_id,) = (name for name in run_ids if f"Groups, run {name}" in said)
        yield {
            "folder": folder,
            "said": said,
            "page": (place / "report" / "index.html").read_text(encoding="utf-8"),
            "report": place / "report" / "index.html",
            "run": run_id,
            "store": RunStore(),
            "at": place,
        }


# What a folder means


@pytest.mark.parametrize(
    "layout, said",
    [
        ((), "has 0 images (.jpg .jpeg .png .webp .bmp .gif .tif .tiff .ppm .pgm): too few"),
        (("a.png",), "has 1 image (.jpg"),
        (("x/a.png", "y/x/a.png"), "not clear which level is the class"),
        (("x/a.png", "y/a.png"), "has 2 images (.jpg"),
    ],
)
def test_other_layouts_are_refused_with_a_reason(tmp_path, layout, said):
    for file in layout:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    with pytest.raises(HmoeError, match=re.escape(said)):
        read_pool(tmp_path)


def test_depth_tells_domains_from_classes(tmp_path):
    for root, domains, known in ((tmp_path / "a", DOMAINS, 40), (tmp_path / "b", (), 0)):
        pool = read_pool(fill(root, domains, count=10 if domains else 20))
        assert pool.class_names == sorted(CLASSES)
        assert len(pool.images) == 40
        assert pool.images.domain.notna().sum() == known


def test_folders_without_a_level_of_domains_lose_only_the_domains(tmp_path):
    layered = read_pool(fill(tmp_path / "a", count=10))
    for file in layered.images.file:
        domain, class_name, name = file.split("/")
        (tmp_path / "b" / class_name).mkdir(parents=True, exist_ok=True)
        copy = tmp_path / "b" / class_name / f"{DOMAINS.index(domain)} {name}"
        shutil.copy(tmp_path / "a" / file, copy)
    flat = read_pool(tmp_path / "b")
    counts = [pool.images["class"].value_counts().to_dict() for pool in (layered, flat)]
    assert counts[0] == counts[1] == dict.fromkeys(CLASSES, 20)
    assert not flat.domain_names
    dealt = split_pool(flat)
    assert not set(dealt.files[0]) & set(dealt.files[1])
    assert sorted(dealt.flat) == sorted(flat.images.file)
    assert dealt.files == split_pool(flat, 0).files != split_pool(flat, 1).files


def test_a_configuration_follows_from_the_folder_and_the_seed(tmp_path):
    folder = fill(tmp_path / "p")
    small = {"experts": 3, "steps": 3, "resolution": 24, "hparams": {"batch_size": 8}}
    small["network"] = "image_cnn"
    config = discover_config(folder, **small)
    assert discover_config(folder, **small).run_id == config.run_id
    other = discover_config(folder, seed=1, **small)
    assert other.dataset_fingerprint != config.dataset_fingerprint
    inputs = torch.cat(list(all_inputs(build_dataset(config))))
    assert inputs.shape == (40, 3, 24, 24)


def test_hidden_files_and_circles_of_links_are_passed_over(tmp_path):
    fill(tmp_path, ())
    (tmp_path / CLASSES[0] / ".thumb.png").touch()
    (tmp_path / CLASSES[1] / "back").symlink_to(tmp_path, target_is_directory=True)
    assert len(image_files(tmp_path)) == 20


def test_labels_of_some_are_only_for_those(tmp_path):
    fill(tmp_path / "p", (), count=20)
    file = image_files(tmp_path / "p")[3]

    def table(*rows):
        with open(tmp_path / "known.csv", "w", newline="", encoding="utf-8-sig") as f:
            csv.writer(f).writerows(rows)
        return read_pool(tmp_path / "p", tmp_path / "known.csv")

    images = table(("domain", "file"), ("attic", file)).images
    assert images[images.domain.notna()][["file", "domain"]].values.tolist() == [[file, "attic"]]
    with pytest.raises(HmoeError, match="1 files in the table of labels are no images"):
        table(("file", "domain"), ("absent.png", "attic"))
    with pytest.raises(HmoeError, match="cannot read the labels known.csv"):
        table(("path", "domain"), (file, "attic"))


def test_training_never_sees_an_origin(place):
    pool = read_pool(place["folder"])
    dealt, unseen = split_pool(pool), split_pool(pool, test_domain=DOMAINS[0])
    assert dealt.domain_names == [POOLED, HELD_OUT]
    assert [len(f) for f in dealt.files] == [32, 8]
    assert all(f.startswith(DOMAINS[0]) for f in unseen.files[1])
    assert not any(f.startswith(DOMAINS[0]) for f in unseen.files[0])
    record = place["store"].find(place["run"])
    assert record["config"]["algorithm"] == "HMOE-ND"
    assert record["config"]["hparams"]["lambda_d"] == 0
    assert record["config"]["test_domains"] == [HELD_OUT]
    with pytest.raises(HmoeError, match="unknown domain of"):
        split_pool(pool, test_domain="moon")


def test_where_a_folder_lies_is_no_part_of_a_run(place, tmp_path):
    options = dict(experts=3, steps=3, resolution=24, hparams={"batch_size": 8})
    options |= {"network": "image_cnn"}
    shutil.copytree(place["folder"], tmp_path / ROOT_NAME)

    def run_ids():
        return {
            discover_config(tmp_path / ROOT_NAME, **options, restart=r).run_id for r in range(3)
        }

    assert place["run"] in run_ids()
    next((tmp_path / ROOT_NAME).rglob("*.png")).unlink()
    assert place["run"] not in run_ids()


# The page


class Page(HTMLParser):
    "The tags, attributes and texts that a browser would see."

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.texts = set(), [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags, self.attributes = self.tags | {tag}, self.attributes + attributes

    def handle_data(self, data):
        self.texts.append(data)


def test_names_are_text_and_nothing_comes_from_elsewhere(place):
    page = Page(place["page"])
    assert not page.tags & {"script", "iframe", "link", "object", "base"}
    assert not [n for n, _ in page.attributes if n.startswith("on")]
    assert f"Groups of {ROOT_NAME}" in page.texts
    assert set(DOMAINS + CLASSES) <= set(page.texts)
    assert any(FILE.format(3) in value for name, value in page.attributes if name == "title")
    assert any(FILE.format(3) in text for text in page.texts)
    sources = [value for name, value in page.attributes if name in ("src", "href", "data")]
    assert len(sources) >= 16
    assert all(s.startswith("data:image/jpeg;base64,") for s in sources)
    assert str(place["at"]) not in place["page"]
    assert decode(base64.b64decode(sources[0].partition(",")[2])).size == (72, 72)


def test_the_page_says_what_the_run_says(place, found):
    texts = Page(place["page"]).texts
    record = place["store"].find(place["run"])
    for word in (
        place["run"],
        record["config"]["dataset_fingerprint"],
        record["environment"]["commit"],
        "NMI with the known domains",
    ):
        assert word in texts
    sentences = verdict_sentences(summarise_findings(found))
    assert sentences[0] in texts
    assert " ".join(sentences[1:]) in [text.strip() for text in texts]
    assert " ".join(sentences) in place["said"]


@pytest.fixture(scope="module")
def found(place):
    settings = {"network": "image_cnn", "steps": 3, "experts": 3, "resolution": 24}
    settings |= {"hparams": {"batch_size": 8}, "device": "cpu", "store": place["store"]}
    return discover(place["folder"], **settings)


def test_discover_in_python_is_the_command(found, place):
    assert found.record["run_id"] == place["run"]
    assert found.method == "hmoe"
    rows = list(csv.DictReader((place["at"] / "report" / "groups.csv").open(encoding="utf-8")))
    assert [row["file"] for row in rows] == image_files(place["folder"])
    assert [row["group"] for row in rows] == list(found.images.sort_values("file").group)
    for row in rows:
        assert (float(row["confidence"]) < 0.5) == (row["borderline"] == "True")


def test_groups_of_hmoe_are_scored_on_images_that_were_not_trained_on(found):
    parts = found.images.part.value_counts().to_dict()
    assert parts == {"training": 26, "validation": 6, HELD_OUT: 8}
    assert len(found.fresh) == 14
    assert found.record["discovery"].keys() >= {"nmi_origin"}
    summary = summarise_findings(found)
    assert summary["held_out"] == len(found.held_out) == 8
    assert len(summary["groups"]) == summary["experts_used"]


def test_the_largest_group_is_shown_first_and_empty_ones_in_a_line(found, place):
    names, images = found.model.expert_names, found.images
    group = pd.Categorical([names[1]] + [names[2]] * (len(images) - 1), names)
    groups = page_groups(replace(found, images=images.assign(group=group)), place["folder"])
    assert [len(group["samples"]) for group in groups] == [16, 1]
    page = Page(template("discover_parts.html").module.panels(groups, names[:1]))
    texts = [text.strip() for text in page.texts if text.strip()]
    assert texts[0].startswith(f"{names[2].capitalize()}: 39 pictures, 98%")
    assert f"{names[1].capitalize()}: 1 picture, 2%" in texts
    assert "".join(texts).endswith(f"Without any picture: {names[0]}.")
    told = " ".join(value for name, value in page.attributes if name == "alt")
    assert f"subject {CLASSES[0]} (model: " in told


def test_a_table_holds_no_markup_and_its_shades_are_shares_of_a_row():
    table = template("discover_parts.html").module.table
    frame = pd.DataFrame({"<b>": [1, 0], "n": [1, 3]}, index=["caf\udce9", "'\"&"])
    read = Page(table(frame.rename_axis("class"), shaded=True))
    texts = [text for text in read.texts if text.strip()]
    assert texts == ["class", "<b>", "n", "caf?", "1", "1", "'\"&", "0", "3"]
    assert [value for name, value in read.attributes if name == "style"] == [
        f"background:rgba(0,114,178,{shade})" for shade in ("0.28", "0.28", "0.00", "0.55")
    ]


def test_maps_show_images_not_trained_on_and_no_two_names_share_a_colour(found):
    maps = code_maps(found)
    assert [m["title"] for m in maps] == ["by group", "by subject", "by known origin"]
    assert all(len(m["dots"]) == len(found.fresh) and len(m["squares"]) == 3 for m in maps)
    assert set(maps[2]["legend"]) == set(DOMAINS)
    many = pd.Series([f"{i:02d}" for i in range(40)], dtype="category")
    assert len(set(category_colours(many).values())) == 41


def test_what_can_be_seen_comes_before_the_numbers(place):
    order = [
        place["page"].index(part)
        for part in (
            'class="said',
            'class="panel"',
            "--groups",
            'class="maps"',
            ">The groups in numbers<",
            ">For researchers<",
            ">Scores<",
            "Provenance",
        )
    ]
    assert order == sorted(order)
    assert "predicting their most frequent class gives 50.0%" in place["page"]


JARGON = re.compile(r"\b(experts?|gates?|NMI|AMI|ARI|k-means|borderline|t-SNE|entropy|HMOE)\b")


def test_what_comes_before_the_researchers_has_no_unexplained_word(place):
    page = place["page"].split(">For researchers<")[0]
    texts = " ".join(Page(page[page.index("<body>") :]).texts).replace("lines with", "")
    first = texts[: texts.index("Are some pictures")]
    assert len(first) > 300
    assert not JARGON.search(first)
    said = place["said"].replace(place["run"], "")
    printed = said[said.rindex("colour and contrast ...") :]
    printed = re.sub("^  hmoe .*", "", printed, flags=re.M)  # commands, as the user wrote them
    assert place["run"] in place["said"]
    assert not JARGON.search(printed)


def test_the_same_command_again_trains_nothing_and_writes_the_same_page(place):
    before = {
        p: p.stat().st_mtime_ns for p in (place["at"] / "runs").rglob("selected-*.safetensors")
    }
    hmoe("discover", place["folder"], "--output", place["at"] / "again", *SMALL)
    again = (place["at"] / "again" / "index.html").read_text(encoding="utf-8")
    assert again.count("--output again ") == 3  # to correct, to serve, and to train
    assert (
        again.replace("output again ", "output report ").replace(
            "again/groups.csv", "report/groups.csv"
        )
        == place["page"]
    )
    assert before == {p: p.stat().st_mtime_ns for p in before}


def test_a_page_that_cannot_be_written_is_refused_before_training(place, tmp_path):
    before = set((place["at"] / "runs").glob("*/record.json"))
    (tmp_path / "taken").touch()
    with pytest.raises(HmoeError, match="--output is a folder"):
        hmoe("discover", place["folder"], "--output", tmp_path / "taken", *SMALL, "--seed", "7")
    assert set((place["at"] / "runs").glob("*/record.json")) == before


def summary(share=0.2, used=2, k=3, domain=0.6, of_class=0.1, plain=0.2, again=0.9, **more):
    return {
        "method": "hmoe",
        "agreement": again,
        "pairs": None if again is None else (0.91, 0.42),
        "groups": {"group 1": 0.6, "group 2": 0.4},
        "num_experts": k,
        "share_of_log_K": share,
        "gate_entropy": share * np.log(k),
        "most_entropy": np.log(k),
        "experts_used": used,
        "nmi_domain": domain,
        "ari_domain": domain,
        "same_domain": None if domain is None else (0.83, 0.26),
        "nmi_class": of_class,
        "same_class": None if of_class is None else (0.61, 0.52),
        "nmi_plain": plain,
        "nmi_plain_domain": None if domain is None else 0.3,
    } | more


FEATURES = {"method": "features", "without_groups": 0.5, "reliable": True, "between": 0.6}
BY_FEATURES = {"method": "features"}  # corrected groups have no reliability
LESS = {"reliable": False, "weakest_group": 0.4}
CORRECTED = {"corrected": 40, "moved": (3, 40), "own_group": 0.93, "recognised": 0.71}


@pytest.mark.parametrize(
    "changes, found, said, unsaid",
    [
        ({}, True, ("Two groups: group 1 (60%)", "9 of 10", "4 of 10", "8 of 10"), ("half",)),
        ({"again": 0.5}, True, ("9 of 10",), ()),
        ({"again": None}, True, ("once",), ("9 of 10",)),
        ({"again": 0.49}, False, ("No reliable groups", "9 of 10"), ()),
        ({"again": 0.1, "share": 0.95}, False, ("No groups",), ("9 of 10",)),
        ({"share": 0.95}, False, ("No groups", "decide"), ("9 of 10",)),
        ({"used": 1}, False, ("No groups", "one group"), ("9 of 10",)),
        ({"share": 0.95, "used": 1}, False, ("decide",), ("one group",)),
        ({"domain": None}, True, (), ("origin",)),
        ({"domain": 0.1, "of_class": 0.5}, True, ("mostly the subjects",), ()),
        ({"same_class": (0.22, 0.2)}, True, ("not follow the subjects",), ()),
        ({"plain": 0.69}, True, (), ("Colour",)),
        ({"plain": 0.7, "domain": None}, True, ("Colour",), ()),
        (FEATURES, True, ("half", "9 of 10", "part of these groups"), ()),
        (FEATURES | {"between": 0.9}, True, ("the same groups",), ()),
        (FEATURES | {"between": 0.1}, True, ("other groups",), ()),
        (FEATURES | {"used": 1}, True, ("no groups.",), ()),
        (FEATURES | LESS | {"again": 0.8}, False, ("No reliable", "differently"), ()),
        (FEATURES | LESS | {"without_groups": 0.8}, False, ("accident",), ("differently",)),
        (FEATURES | LESS, False, ("4 of 10 runs",), ("accident",)),
        ({"of_class": None}, True, ("may be a subject",), ()),
        (BY_FEATURES | CORRECTED, True, ("3 of 40", "93 %", "71 %"), ("half",)),
        (CORRECTED | {"moved": None}, True, ("by hand", "71 %"), ("moved", "93 %")),
        (CORRECTED | {"recognised": None}, True, ("by hand",), ("model",)),
        (BY_FEATURES | CORRECTED | {"own_group": 0.996}, True, ("over 99 %", "71 %"), ("100 %",)),
        (CORRECTED | {"recognised": 1.0}, True, ("100 %",), ("over",)),
    ],
)
def test_the_sentence(changes, found, said, unsaid):
    changed = summary(**changes)
    verdict = findings_verdict(changed)
    assert found_domains(changed) == found
    assert not [part for part in said if part not in verdict], verdict
    assert not [part for part in unsaid if part in verdict], verdict
    assert not JARGON.search(verdict)
    assert all(sentence.endswith(".") for sentence in verdict_sentences(changed))


# The table


def predictions(path):
    return list(csv.DictReader(io.StringIO(path.read_bytes().decode("utf-8", "surrogateescape"))))


def test_predict_needs_neither_classes_nor_the_old_pictures(place, tmp_path):
    fill(tmp_path / "new", (), ("",), 5, 'a, "b" {}.png')
    shutil.move(tmp_path / "new", tmp_path / "flat")
    if sys.platform == "linux":
        shutil.copy(
            tmp_path / "flat" / 'a, "b" 0.png', os.fsencode(tmp_path / "flat") + b"/caf\xe9.png"
        )
    away = place["folder"].rename(place["at"] / "away")
    try:
        hmoe(
            "predict",
            tmp_path / "flat",
            "--model",
            place["run"][:6],
            "--output",
            tmp_path / "p.csv",
            "--device",
            "cpu",
        )
    finally:
        away.rename(place["folder"])
    rows = predictions(tmp_path / "p.csv")
    assert [r["file"] for r in rows] == image_files(tmp_path / "flat")
    assert list(rows[0]) == ["file", "class", "probability", "nearest_domain", "gate_value"]
    for r in rows:
        assert r["class"] in CLASSES
        assert 0.5 <= float(r["probability"]) <= 1
        assert re.fullmatch(r"group [123]", r["nearest_domain"])
        assert 1 / 3 <= float(r["gate_value"]) + 1e-4 <= 1.0001


def test_unreadable_images_are_named_and_left_out(place, tmp_path):
    fill(tmp_path / "new", (), ("x",), 3, "{}.png")
    whole = (tmp_path / "new" / "x" / "0.png").read_bytes()
    (tmp_path / "new" / "cut.png").write_bytes(whole[: len(whole) // 2])
    command = (
        "predict",
        tmp_path / "new",
        "--model",
        place["run"],
        "--output",
        tmp_path / "p.csv",
        "--device",
        "cpu",
    )
    assert "left out: cut.png (truncated" in hmoe(*command, "--skip-unreadable")
    assert [r["file"] for r in predictions(tmp_path / "p.csv")] == ["x/0.png", "x/1.png", "x/2.png"]


def test_an_image_is_seen_alike_alone_and_among_others(place):
    model, files = load(place["run"]), image_files(place["folder"])[:9]
    together, alone = (forward_files(model, place["folder"], files, at_once=n)[1] for n in (256, 1))
    assert all(np.allclose(together[n], alone[n], atol=1e-5) for n in together)


def test_any_run_on_colour_images_predicts(place, tmp_path):
    erm = run(
        make_config("ERM", "DigitDomainsTiny", ["photo"], 0, {"batch_size": 8}, **SHORT),
        place["store"],
    )
    fill(tmp_path / "new", (), ("x",), 3, "{}.png")
    hmoe(
        "predict",
        tmp_path / "new",
        "--model",
        erm["run_id"],
        "--output",
        tmp_path / "p.csv",
        "--device",
        "cpu",
    )
    assert {(r["nearest_domain"], r["gate_value"]) for r in predictions(tmp_path / "p.csv")} == {
        ("", "")
    }
    assert all(r["class"].isdigit() for r in predictions(tmp_path / "p.csv"))
    with pytest.raises(HmoeError, match="Valid: default"):
        hmoe(
            "predict",
            tmp_path / "new",
            "--model",
            erm["run_id"],
            "--weights",
            "last",
            "--output",
            tmp_path / "q.csv",
        )


# In a browser

BROWSER = next(
    filter(
        None,
        map(
            shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
        ),
    ),
    None,
)
QUIET = tuple(
    (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
        "--disable-background-networking --disable-component-update --disable-sync "
        "--enable-logging=stderr"
    ).split()
)


def browse(page, folder, *more):
    "(the document after loading, what the page wrote to the console)."
    done = subprocess.run(
        [
            BROWSER,
            *QUIET,
            f"--user-data-dir={folder / 'profile'}",
            "--virtual-time-budget=2000",
            *more,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"HOME": str(folder)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
def test_a_browser_shows_the_page_and_runs_nothing_in_it(place, tmp_path):
    infected = tmp_path / "infected.html"
    infected.write_text(
        f"<title>fine</title><img src=x onerror={HACK}><script>console.error('said')</script>"
    )
    document, console = browse(infected, tmp_path, "--dump-dom")
    assert "<title>hacked</title>" in document, "this browser would not notice"
    assert console, "this browser would not notice"
    unlocked = tmp_path / "unlocked.html"
    unlocked.write_text(place["page"].replace(PAGE_POLICY, "img-src data:"), encoding="utf-8")
    for path in (place["report"], unlocked):
        document, console = browse(path, tmp_path, "--dump-dom")
        assert "<title>Groups of my &lt;img" in document
        assert "Provenance" in document
        assert "hacked</title>" not in document
        assert not console
    browse(
        place["report"],
        tmp_path,
        f"--screenshot={tmp_path / 'page.png'}",
        "--window-size=1100,1600",
    )
    with Image.open(tmp_path / "page.png") as picture:
        assert picture.size == (1100, 1600)
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 500


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
def test_on_a_telephone_tables_scroll_and_words_stay_whole(place, tmp_path):
    """Measured by a script of the test's own in a frame as wide as a telephone, so without the
    page's policy."""
    measured = """<script>
        const all = [...document.querySelectorAll('td,th')]
        const cells = all.filter(c => c.offsetParent)  // the heading of a list of cards is hidden
        const narrowest = Math.min(...cells.map(c => c.getBoundingClientRect().width))
        const width = document.documentElement.scrollWidth
        parent.document.title = [width, Math.round(narrowest), innerWidth].join(' ')
        </script></body>"""
    page = place["page"].replace(PAGE_POLICY, "").replace("</body>", measured)
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    (tmp_path / "frame.html").write_text(
        '<iframe src="page.html" style="width:360px;height:900px;border:0"></iframe>'
    )
    document, _ = browse(
        tmp_path / "frame.html", tmp_path, "--allow-file-access-from-files", "--dump-dom"
    )
    page, narrowest, window = map(
        int, re.search(r"<title>(\d+) (\d+) (\d+)</title>", document).groups()
    )
    assert window == 360
    assert page <= 360
    assert narrowest >= 60


def digits_in(root, kind):
    "A folder of digits: of four domains, of one of them, or with their pixels shuffled."
    data, draw = load_dataset("DigitDomains"), np.random.default_rng(0)
    names = ["plain"] if kind == "one domain" else data.domain_names
    kept = [data.domain_index(name) for name in names]
    x = torch.cat([data.images[i][:200] for i in kept]).permute(0, 2, 3, 1).numpy()
    y = torch.cat([data.labels[i][:200] for i in kept])
    if kind == "shuffled":
        x = draw.permutation(x.reshape(-1, 3)).reshape(x.shape)
    for i, (pixels, label) in enumerate(zip(x, y.tolist())):
        (root / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).resize((32, 32), 0).save(root / str(label) / f"{i:04d}.png")


@pytest.mark.slow
@pytest.mark.parametrize("network", ["image_cnn", "efficientnet_lite0"])
@pytest.mark.parametrize(
    "kind, found", [("four domains", True), ("shuffled", False), ("one domain", False)]
)
def test_groups_are_reliable_only_where_there_are_domains(
    tmp_path, monkeypatch, kind, found, network
):
    for name in ("runs", "cache"):
        monkeypatch.setenv(f"HMOE_{name.upper()}", str(tmp_path / name))
    digits_in(tmp_path / "digits", kind)
    pixels = {"steps": 500, "resolution": 32} if network == "image_cnn" else {"resolution": 160}
    seen = discover(tmp_path / "digits", device="cpu", network=network, **pixels)
    assert found_domains(summarise_findings(seen)) == found
    assert ("No reliable groups" in findings_verdict(summarise_findings(seen))) == (not found)
