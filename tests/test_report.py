"""Reading studies, tables by hand, writers, comparison: numbers against values computed here."""
import copy
import hashlib
import json
import math

import invented
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from hmoe_repro.core import HmoeError, repo_root
from hmoe_repro.curves import average_curve, curves, curves_verdict, selected_so_far
from hmoe_repro.report import SELECTION_RULE, TOY_RULE, has_arrays, header, load_arrays, load_study, output_folder, provenance, select, study_file
from hmoe_repro.style import as_text, colours, escape_markdown, escape_tex, markdown_table, save_figure, save_table, use_style
from hmoe_repro.tables import accuracy_table, accuracy_verdict, cell_statistics, discovery_summary, discovery_verdict, highest_nmi, paired_difference, paper_numbers, plot_results, published_table, resolvable_difference, run_results, table_notes


def run(algorithm, domain, seed, **accuracy):
    "A complete run with the given test accuracy of each mode."
    made = invented.record(algorithm, domain, seed, np.random.default_rng(0))
    made["selected"] = {mode: {"step": 20, "validation_accuracy": 0.9, "test_accuracy": value} for mode, value in accuracy.items()}
    return made


@pytest.fixture
def miniature():
    "ERM complete on two domains, HMOE-DN with one failed and one absent run on the second."
    runs = [run("ERM", "photo", s, default=a) for s, a in enumerate((0.50, 0.60, 0.70))] + [run("ERM", "sketch", s, default=a) for s, a in enumerate((0.80, 0.82, 0.90))]
    runs += [run("HMOE-DN", "photo", s, mix=a, max=a - 0.10) for s, a in enumerate((0.60, 0.75, 0.75))]
    return runs + [run("HMOE-DN", "sketch", 0, mix=0.85, max=0.80), invented.failed("HMOE-DN", "sketch", 1)]


def test_cells_are_the_means_and_errors_of_the_protocol(miniature):
    cells = cell_statistics(run_results(miniature)).set_index(["algorithm", "mode", "test_domain"])
    photo = cells.loc[("HMOE-DN", "mix", "photo")]
    assert photo["mean"] == pytest.approx(70) and photo.n == 3
    assert photo.stderr == pytest.approx(100 * math.sqrt(((0.1) ** 2 + 0.05**2 + 0.05**2) / 3) / math.sqrt(3))
    average = cells.loc[("ERM", "default", "Average")]
    assert average["mean"] == pytest.approx((60 + 84) / 2)
    assert average.stderr == pytest.approx(100 * np.std([0.65, 0.71, 0.80]) / math.sqrt(3))


def test_the_table_says_what_is_missing(miniature):
    table = accuracy_table(miniature).set_index(["algorithm", "mode"])
    assert list(table.columns) == ["photo", "sketch", "Average"] and list(table.index) == [("ERM", "default"), ("HMOE-DN", "mix"), ("HMOE-DN", "max")]
    assert table.loc[("ERM", "default"), "photo"] == "60.0 ± 4.7" and table.loc[("HMOE-DN", "mix"), "sketch"] == "85.0 (1/3)"
    notes = "\n".join(table_notes(miniature))
    assert "failed: HMOE-DN on sketch, seed 1" in notes and "NaN loss at step 40" in notes and "missing: HMOE-DN on sketch, seeds 1, 2" in notes and "one trial seed" not in notes


def test_a_cell_without_any_seed_takes_the_average_with_it(miniature):
    table = accuracy_table([r for r in miniature if r["run_id"] != run("HMOE-DN", "sketch", 0, mix=1)["run_id"]]).set_index(["algorithm", "mode"])
    assert table.loc[("HMOE-DN", "mix"), "sketch"] == "– (0/3)" and table.loc[("HMOE-DN", "mix"), "Average"] == "– (0/3)"


def test_no_seed_in_common_gives_a_mean_but_no_error():
    table = accuracy_table([run("ERM", "photo", 0, default=0.5), run("ERM", "sketch", 1, default=0.7)])
    assert table.loc[0, "photo"] == "50.0 (1/2)" and table.loc[0, "Average"] == "60.0 (0/2 whole)"


def test_one_seed_has_no_standard_error():
    runs = [run("ERM", "photo", 0, default=0.5), run("ERM", "sketch", 0, default=0.7)]
    assert accuracy_table(runs).loc[0].tolist() == ["ERM", "default", "50.0", "70.0", "60.0"]
    assert "one trial seed: no standard errors" in table_notes(runs)
    limits = resolvable_difference(runs)
    assert limits.by_seeds.isna().all() and np.allclose(limits.resolvable, limits.by_images)


def test_two_runs_for_one_cell_are_refused(miniature):
    with pytest.raises(HmoeError, match="both ERM on photo with seed 0.*Fix"):
        run_results(miniature + [run("ERM", "photo", 0, default=0.9) | {"run_id": "f" * 12}])


def test_pairs_of_test_domains_stay_out_of_the_table(miniature):
    pair = run("ERM", "photo", 0, default=0.1)
    pair["spec"]["test_domains"] = ["photo", "sketch"]
    assert accuracy_table(miniature + [pair]).equals(accuracy_table(miniature))


def test_resolvable_difference_by_hand(miniature):
    limits = resolvable_difference([r for r in miniature if r["spec"]["algorithm"] == "ERM"]).set_index("test_domain")
    assert limits.loc["photo", "by_seeds"] == pytest.approx(200 * math.sqrt(2 * 0.01 / 3))
    assert limits.loc["photo", "by_images"] == pytest.approx(200 * math.sqrt(2 * 0.6 * 0.4 / 360))
    assert limits.loc["photo", "resolvable"] == pytest.approx(200 * math.sqrt(2 * (0.01 / 3 + 0.24 / 360)))
    p = (0.80 + 0.82 + 0.90) / 3
    floor = (0.24 / 360 + p * (1 - p) / 360) / 4
    assert limits.loc["Average", "resolvable"] == pytest.approx(200 * math.sqrt(2 * (np.var([0.65, 0.71, 0.80], ddof=1) / 3 + floor)))


def test_paired_difference_by_hand(miniature):
    paired = paired_difference(miniature).set_index(["algorithm", "mode"])
    d = np.array([0.10, 0.15, 0.05, 0.05])
    row = paired.loc[("HMOE-DN", "mix")]
    assert row.difference == pytest.approx(100 * d.mean()) and row.stderr == pytest.approx(100 * d.std() / 2) and (row.pairs, row.ahead) == (4, 4)
    assert paired.loc[("HMOE-DN", "max"), "ahead"] == 1
    with pytest.raises(HmoeError, match="CORAL.*Valid: ERM, HMOE-DN"):
        paired_difference(miniature, baseline="CORAL")


def test_results_can_be_drawn_with_holes(miniature):
    figure, axes = plt.subplots(1, 3)
    plot_results(miniature, axes)
    assert [a.get_title() for a in axes] == ["photo", "sketch", "Average"] and [t.get_text() for t in axes[0].get_yticklabels()][1] == "HMOE-DN MIX"
    plt.close(figure)


def test_the_papers_numbers():
    assert paper_numbers(table="Table 1", dataset="PACS", algorithm="HMOE-ND", mode="ood").accuracy.tolist() == [87.0]
    assert paper_numbers(dataset="RotatedMNIST", test_domain="75", algorithm="HMOE-DL", mode="max").accuracy.tolist() == [94.7]
    assert len(paper_numbers(table="Table 1")) == 14 * 6 + 9 * 6 and len(paper_numbers(table="Table 2")) == 16
    assert published_table().shape == (10, 8) and published_table().loc[0, "TerraIncognita"] == 46.1
    with pytest.raises(HmoeError, match="Valid: source, table"):
        paper_numbers(domain="photo")


# Verdicts

def discovered(algorithm, domain, nmi):
    "Runs, seed by seed, with the given NMI of experts with domains."
    runs = [invented.record(algorithm, domain, s, np.random.default_rng(s)) for s in range(len(nmi))]
    for made, value in zip(runs, nmi): made["discovery"]["nmi_domain"] = value
    return runs


def test_the_ceiling_of_nmi_is_reached_by_the_best_balanced_experts():
    from sklearn.metrics import normalized_mutual_info_score
    domains, experts = np.repeat([0, 1, 2], 20), np.arange(60) % 20 % 2 + 2 * np.repeat([0, 1, 2], 20)
    assert highest_nmi(3, 6) == pytest.approx(normalized_mutual_info_score(domains, experts))
    assert highest_nmi(3, 5) == pytest.approx(2 * math.log(3) / math.log(15)) and highest_nmi(3, 3) == 1 == highest_nmi(1, 1)
    with pytest.raises(HmoeError, match="at least one"):
        highest_nmi(0, 3)


def test_the_discovery_verdict_counts_runs_and_names_domains():
    runs = discovered("HMOE-DN", "photo", (1, 0.95, 0)) + discovered("HMOE-DN", "plain", (0.9, 0.5, 0.2)) + discovered("HMOE-DN", "sketch", (0.89, 0, 0))
    assert discovery_verdict(runs) == "HMOE-DN: NMI of 0.9 or more in 3 of 9 runs; in most seeds for photo; in some for plain; never for sketch"
    assert discovery_verdict(runs[:-1] + [invented.failed("HMOE-DN", "sketch", 2)]).endswith("in 3 of 8 runs; in most seeds for photo; in some for plain; never for sketch; 1 more without scores")
    assert discovery_verdict(runs, threshold=0.5).startswith("HMOE-DN: NMI of 0.5 or more in 5 of 9 runs; in most seeds for photo, plain; in some for sketch")
    five = discovered("HMOE-ND", "photo", (0.8, 0.7))
    assert discovery_verdict(runs + five, "HMOE-ND") == "HMOE-ND: NMI of 0.9 or more in 0 of 2 runs; built in, for equally loaded experts reach at most 0.81"
    table = discovery_summary(runs + five).set_index(["algorithm", "test_domain"])
    assert table.loc[("HMOE-ND", "photo"), "highest_possible_nmi"] == pytest.approx(0.8113, abs=1e-4) and table.loc[("HMOE-DN", "photo"), "nmi_of_0.9_or_more"] == 2
    with pytest.raises(HmoeError, match="no complete run of 'HMOE-DL' has discovery scores. Valid: HMOE-DN"):
        discovery_verdict(runs, "HMOE-DL")


def test_the_accuracy_verdict(miniature):
    near = accuracy_verdict(miniature + [run("HMOE-DN", "sketch", s, mix=0.85, max=0.80) for s in (1, 2)])
    assert near.startswith("In the average, no row is told apart from ERM by this study: the largest difference, HMOE-DN MIX (+5.5), is within the ")
    assert near.endswith("0 of 4 differences exceed what can be resolved there.")
    far = accuracy_verdict([r for r in miniature if r["spec"]["algorithm"] == "ERM"] + [run("HMOE-DN", d, s, mix=0.05) for d in ("photo", "sketch") for s in range(3)])
    assert far.startswith("In the average, told apart from ERM (more than ") and "HMOE-DN MIX (-67.0)" in far and "2 of 2 differences exceed what can be resolved there: HMOE-DN MIX on sketch (-79.0), HMOE-DN MIX on photo (-55.0)." in far
    assert "No row but ERM has a complete average." in accuracy_verdict(miniature[:6] + [run("HMOE-DN", "photo", 0, mix=0.6)])
    with pytest.raises(HmoeError, match="CORAL.*Valid: ERM, HMOE-DN"):
        accuracy_verdict(miniature, baseline="CORAL")


def test_the_verdict_of_the_curves_counts_soft_gates_and_idle_experts():
    runs = discovered("HMOE-DN", "photo", (1, 1, 0)) + discovered("HMOE-DL", "photo", (1,)) + [run("ERM", "photo", 0, default=0.5)]
    for made, entropy, used in zip(runs, (0.01, 0.2, 1.0986), (3, 2, 3)):
        made["checkpoints"][-1]["losses"]["L_en"] = entropy
        made["discovery"]["experts_used"] = used
    for made in runs[:3]: made["selected"] = {m: {"step": 20, "validation_accuracy": 0.9, "test_accuracy": a} for m, a in (("mix", 0.62), ("max", 0.61), ("ood", 0.56))}
    lines = curves_verdict(runs)
    assert [line.split(":")[0] for line in lines] == ["HMOE-DL", "HMOE-DN"] and "domain loss at the end 0." in lines[0] and "gate entropy" not in lines[0]
    assert lines[1] == "HMOE-DN: gate entropy at the end 0.01 to 1.10 nats, below a tenth of its maximum in 1 of 3 runs; all experts in use in 2 of 3; average test accuracies of the modes up to 6.0 points apart."


# Studies

def test_a_study_comes_back_as_it_was_written(tmp_path):
    runs = invented.digits(seeds=(0,), domains=("photo",))
    invented.write_study(tmp_path, "smoke-digits", runs, with_arrays=(0,))
    assert load_study("smoke-digits", tmp_path) == sorted(runs, key=lambda r: r["run_id"])
    erm, hmoe = select(runs, algorithm="ERM")[0], select(runs, algorithm="HMOE-ND")[0]
    assert load_arrays(hmoe, "smoke-digits", tmp_path)["gate_out"].shape == (120, 5) and has_arrays(hmoe, "smoke-digits", tmp_path)
    with pytest.raises(HmoeError, match=f"{erm['run_id']}.*hmoe publish smoke-digits"):
        load_arrays(erm, "smoke-digits", tmp_path)


def test_a_relative_store_starts_at_the_root(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert study_file("quick-toy", "results") == repo_root() / "results" / "quick-toy.jsonl"
    monkeypatch.setenv("HMOE_RESULTS", str(tmp_path / "elsewhere"))
    assert study_file("quick-toy") == tmp_path / "elsewhere" / "quick-toy.jsonl"


@pytest.mark.parametrize("line, complaint", [
    ('{"run_id": "a", "rec', "line 2: cut off or not JSON"), ('{"env0_in_acc": 0.5}', "line 2 is not a whole run record .missing or wrong: run_id"), ("[1, 2]", "line 2 is not a run record"),
    ('"text"', "line 2 is not a run record"), ('{"run_id": "a", "record_version": 1, "status": "complete", "spec": 3, "checkpoints": [], "selected": {}}', "line 2 is not a whole run record .missing or wrong: spec"),
    ('{"run_id": "a", "record_version": 9, "status": "complete", "spec": {}, "checkpoints": [], "selected": {}}', "line 2 has record version 9, this library reads 1"),
    ('{"run_id": "a", "record_version": 1, "status": "complete", "spec": {}, "checkpoints": [], "selected": {}}', "line 2: not a run specification"),
    ('{"run_id": "a", "record_version": 1, "status": "complete", "spec": {"algorithm": "ERM", "dataset": "D", "dataset_fingerprint": "f", "test_domains": 3}, "checkpoints": [], "selected": {}}', "line 2: its specification cannot be read"), ("SAME", "line 2: run [0-9a-f]{12} again, it stands in line 1")])
def test_a_bad_line_is_named_with_the_way_out(tmp_path, line, complaint):
    good = json.dumps(invented.record("ERM", "negative", 0, np.random.default_rng(0)))
    (tmp_path / "quick-digits.jsonl").write_text(good + "\n" + (good if line == "SAME" else line) + "\n")
    with pytest.raises(HmoeError, match=f"quick-digits.jsonl, {complaint}.*Fix: .hmoe publish quick-digits") as caught:
        load_study("quick-digits", tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [{"trial_seed": 7}, {"test_domains": ["photo"]}, {"hparams": {"lr": 1e-2}}])
def test_an_edited_record_is_refused(tmp_path, change):
    whole, edited = invented.record("ERM", "negative", 0, np.random.default_rng(0)), invented.record("ERM", "negative", 1, np.random.default_rng(0))
    edited["spec"] |= change
    (tmp_path / "quick-digits.jsonl").write_text(json.dumps(whole) + "\n" + json.dumps(edited) + "\n")
    with pytest.raises(HmoeError, match=f"quick-digits.jsonl, line 2 calls itself {edited['run_id']}.*edited.* Fix: .hmoe publish quick-digits") as caught:
        load_study("quick-digits", tmp_path)
    assert "\n" not in str(caught.value) and str(caught.value).count("Fix:") == 1


def test_a_missing_empty_or_binary_study(tmp_path):
    with pytest.raises(HmoeError, match="quick-digits.jsonl does not exist. Fix: `hmoe reproduce --profile quick`"):
        load_study("quick-digits", tmp_path)
    (tmp_path / "quick-digits.jsonl").write_text("\n\n")
    with pytest.raises(HmoeError, match="holds no record"):
        load_study("quick-digits", tmp_path)
    (tmp_path / "quick-digits.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HmoeError, match="cannot read"):
        load_study("quick-digits", tmp_path)


def test_damaged_arrays_are_named(tmp_path):
    runs = invented.digits(seeds=(0,), domains=("photo",), algorithms=("HMOE-DN",))
    invented.write_study(tmp_path, "smoke-digits", runs)
    (tmp_path / "smoke-digits").mkdir()
    (tmp_path / "smoke-digits" / f"{runs[0]['run_id']}.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(HmoeError, match="is damaged.*Fix"):
        load_arrays(runs[0], "smoke-digits", tmp_path)


def test_select():
    runs = invented.digits(seeds=(0, 1), domains=("photo", "plain"))
    assert len(select(runs, algorithm="ERM")) == 4 and len(select(runs, trial_seed={1}, test_domain="photo")) == 4
    assert len(select(runs, test_domains=["plain"])) == 8 and len(select(runs, steps=lambda n: n > 1000)) == 0
    assert select([], anything=1) == []
    with pytest.raises(HmoeError, match="no record has a field 'seed'. Valid: .*trial_seed"):
        select(runs, seed=0)


# Writers

def test_cells_survive_markdown_and_tex(tmp_path):
    frame = pd.DataFrame({"name": ["a|b_c*d<e>", "50% & $x^2$ {~} #1 \\"], "value": [1.23456, np.nan]})
    save_table(frame, tmp_path, "t", "A_title | 100%")
    rows = [line for line in (tmp_path / "t.md").read_text().splitlines() if line.startswith("|")]
    assert all(len([c for i, c in enumerate(row) if c == "|" and row[i - 1] != "\\"]) == 3 for row in rows)
    assert r"| a\|b\_c\*d\<e\> | 1.23 |" in rows[2] and "–" in rows[3]
    tex = (tmp_path / "t.tex").read_text()
    assert r"50\% \& \$x\textasciicircum{}2\$ \{\textasciitilde{}\} \#1 \textbackslash{} & -- \\" in tex and r"\caption{A\_title \textbar{} 100\%}" in tex
    assert pd.read_csv(tmp_path / "t.csv").name.tolist() == frame.name.tolist() and "1.23456" in (tmp_path / "t.csv").read_text()
    assert escape_tex("a\nb") == "a b" and "\n" not in escape_markdown("a\nb")


def test_numbers_go_to_the_csv_and_text_to_the_table(tmp_path):
    assert save_table(pd.DataFrame({"x": ["51.2 ± 0.4"]}), tmp_path, "t", "T", numbers=pd.DataFrame({"mean": [51.2345]})) == ["t.csv", "t.md", "t.tex"]
    assert (tmp_path / "t.csv").read_text() == "mean\n51.2345\n" and "51.2 ± 0.4" in (tmp_path / "t.md").read_text() and r"51.2 $\pm$ 0.4" in (tmp_path / "t.tex").read_text()


def test_text_of_cells():
    frame = pd.DataFrame({"a_b": [1.0, np.inf], "n": pd.array([3, None], dtype="Int64"), "t": ["x", None]})
    assert as_text(frame, 1).to_numpy().tolist() == [["1.0", "3", "x"], ["inf", "–", "–"]] and as_text(pd.DataFrame({"x": [-0.001, -0.02]}), 2).x.tolist() == ["0.00", "-0.02"] and list(as_text(frame)) == ["a b", "n", "t"]
    assert markdown_table(frame).splitlines()[1] == "|---|---:|---|"


def test_figures_are_the_same_bytes_each_time(tmp_path):
    def draw():
        use_style()
        figure, axes = plt.subplots(1, 2, figsize=(3, 2))
        axes[0].plot([1, 2, 4], label="a long label")
        axes[0].set_ylabel("y")
        figure.legend(loc="outside lower center")
        return figure
    digests = []
    figure = draw()
    for page in (figure, figure, draw()):
        names = save_figure(page, tmp_path, "f")
        digests.append([hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in names])
    plt.close("all")
    assert digests[0] == digests[1] == digests[2] and b"CreationDate" not in (tmp_path / "f.pdf").read_bytes() and b"Software" not in (tmp_path / "f.png").read_bytes()


def test_colours_do_not_depend_on_company():
    alone, together = colours(["HMOE-DN"]), colours(["art", "HMOE-ND", "HMOE-DN", "art"])
    assert alone["HMOE-DN"] == together["HMOE-DN"] and len(set(together.values())) == 3
    assert len(colours(range(30))) == 30


def test_provenance_is_complete_and_holds_no_time(tmp_path, miniature):
    invented.write_study(tmp_path, "quick-digits", miniature)
    evidence = provenance("digits_table", "quick", miniature, tmp_path, "quick-digits", tmp_path)
    text = (tmp_path / "digits_table.provenance.json").read_text()
    assert json.loads(text) == evidence
    assert evidence["run_ids"] == sorted(r["run_id"] for r in miniature) and evidence["records"] == len(miniature) and len(evidence["failed"]) == 1
    assert evidence["study_sha256"] == hashlib.sha256((tmp_path / "quick-digits.jsonl").read_bytes()).hexdigest()
    assert evidence["trial_seed"] == [0, 1, 2] and evidence["steps"] == [301] and evidence["dataset_fingerprint"] == ["invented"] and evidence["algorithm"] == ["ERM", "HMOE-DN"]
    assert evidence["precision"] == ["float32"] and evidence["evaluate"] == ["selection"] and evidence["dataset"] == ["DigitDomains"]
    assert evidence["runs_environment"]["commit"] == ["0123456789ab"] and evidence["runs_environment"]["versions"] == {"torch": ["2.13.0"]}
    assert "training-domain validation" in evidence["selection_rule"] and "matplotlib" in evidence["rendered_with"]
    said = provenance("other", "quick", miniature, tmp_path, selection_rule="after the last update")
    toy = run("ERM", "photo", 0, default=0.5)
    toy["spec"]["dataset"] = "SineIntervals"
    assert said["selection_rule"] == "after the last update" and provenance("other", "quick", [toy], tmp_path)["selection_rule"] == TOY_RULE != SELECTION_RULE == evidence["selection_rule"]
    assert str(tmp_path) not in text and not {"time", "date", "finished", "rendered_at"} & set(evidence)
    provenance("digits_table", "quick", miniature[::-1], tmp_path, "quick-digits", tmp_path)
    assert (tmp_path / "digits_table.provenance.json").read_text() == text


def test_the_header_owns_up(miniature):
    assert "not the paper's protocol" in header("quick", miniature) and "1 failed" in header("quick", miniature)
    assert "not the paper's" not in header("paper", miniature)
    toy = run("ERM", "photo", 0, default=0.5)
    toy["spec"] |= {"dataset": "SineIntervals", "steps": 20_000}
    assert "full scale" in header("quick", [toy])


def test_the_header_tells_precision_and_caps(miniature):
    assert "; precision: float32\n" in header("quick", miniature) and "validation on" not in header("quick", miniature)
    capped = copy.deepcopy(miniature[:2])
    for made, precision in zip(capped, ("bf16", "float32")): made["spec"] |= {"precision": precision, "evaluate": "selection:2000"}
    assert "precision: bf16, float32; validation on at most 2,000 images of each training domain\n" in header("mnist", capped) and "reduced study" in header("mnist", capped)
    capped[0]["spec"]["evaluate"], capped[1]["spec"]["evaluate"] = "all", "selection:500"
    assert "validation on at most 500 images of each training domain (all in some runs)" in header("mnist", capped)


def test_the_header_names_each_fingerprint_with_its_data(miniature):
    runs = copy.deepcopy(miniature[:4])
    for made, (name, mark) in zip(runs, (("Sine", "11"), ("Sine", "00"), ("Another", "zz"), ("Another", "zz"))): made["spec"] |= {"dataset": name, "dataset_fingerprint": mark}
    assert "data: Another (zz), Sine (00, 11);" in header("quick", runs) and "data: none;" in header("quick", [])


def test_output_folder(tmp_path):
    assert output_folder(tmp_path, "quick") == tmp_path / "quick"
    first, second = output_folder("", "quick"), output_folder("", "quick")
    assert first != second and first.is_dir() and repo_root() not in first.parents
    (tmp_path / "file").write_text("")
    with pytest.raises(HmoeError, match="cannot write"):
        output_folder(tmp_path / "file", "quick")


# Curves

def test_the_selected_curve_ends_at_the_tables_number():
    for made in invented.digits(seeds=(0,), domains=("photo",)):
        for mode, chosen in made["selected"].items():
            assert selected_so_far(made["checkpoints"], "photo", mode)[-1] == chosen["test_accuracy"]


def test_curves_average_domains_before_seeds():
    runs = [run(a, d, s, default=0.5) for a in ("ERM",) for d in ("photo", "sketch") for s in (0, 1)]
    for made, loss in zip(runs, (1.0, 2.0, 3.0, 6.0)):
        for point in made["checkpoints"]: point["losses"] = {"loss": loss}
    curve = average_curve(curves(runs), "ERM", "loss")
    assert np.allclose(curve["mean"], 3) and np.allclose(curve["spread"], 1)      # seeds: (1+3)/2 = 2 and (2+6)/2 = 4
    assert average_curve(curves(runs), "ERM", "L_d").empty
