"""DMG's tables: views of records, masks on every domain, published rows; numbers by hand."""

import pytest

from hmoe_repro.algorithms import get_algorithm
from hmoe_repro.algorithms.base import network_options
from hmoe_repro.algorithms.hparams import merge_hparams
from hmoe_repro.analysis.dmg_tables import (
    by_network,
    departure_list,
    dmg_diff,
    ensemble_lines,
    in_domain_view,
    known_domain_lines,
    mask_runs,
    mask_table,
    network_limits,
    network_lines,
    network_table,
    only_modes,
    own_mask_gain,
    own_mask_line,
    published_rows,
)
from hmoe_repro.analysis.protocol_diff import hparam_diff
from hmoe_repro.analysis.tables import accuracy_table, run_results
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.studies.artefacts import ARTEFACTS, artefact_studies, artefact_study
from hmoe_repro.studies.studies import count_runs
from hmoe_repro.studies.study_file import check_study, read_study
from hmoe_repro.training.run_config import RunSpec

DOMAINS = ("negative", "photo", "plain", "sketch")


def record(algorithm, target, seed, network="small_cnn", protocol=True, **accuracies):
    "A complete run; accuracies of its modes on the target, and 0.1 more in domain."
    asked = {"protocol": "dmg"} if protocol else {}
    who = (algorithm, "DigitDomains", "0", (target,), seed)
    spec = RunSpec(*who, network=network, resolution=16, steps=320, **asked)
    chosen = {"step": 9, "validation_accuracy": 0.9}
    made = {
        "run_id": spec.run_id,
        "status": "complete",
        "spec": spec.to_dict(),
        "checkpoints": [],
        "selected": {m: chosen | {"test_accuracy": a} for m, a in accuracies.items()},
        "test_size": 450,
        "in_domain_size": 268,
    }
    if protocol:
        made["protocol"] = {"name": "dmg", "epochs": 20, "splits": "72/8/20 by trial seed"}
        made["in_domain"] = {m: chosen | {"accuracy": a + 0.1} for m, a in accuracies.items()}
    return made


def masked(target, seed, by_mask, combined=0.5):
    "A run of DMG with the accuracies of its masks, domain by domain."
    sources = [d for d in DOMAINS if d != target]
    accuracy = {
        domain: {"split": "in" if domain == target else "test", "images": 9, "by_mask": list(row)}
        for domain, row in zip((*sources, target), by_mask)
    }
    at = {d: {m["split"]: {"pred-ens": combined}} for d, m in accuracy.items()}
    return record("DMG", target, seed, **{"pred-ens": combined, "mask-ens": combined}) | {
        "masks": {"domains": sources, "accuracy": accuracy},
        "checkpoints": [{"step": 9, "losses": {}, "accuracies": at}],
    }


def test_the_view_in_domain_shows_the_other_accuracy_and_changes_nothing():
    plain = record("Aggregate", "photo", 0, default=0.5)
    (seen,) = in_domain_view([plain])
    assert seen["selected"]["default"]["test_accuracy"] == pytest.approx(0.6)
    assert seen["test_size"] == 268 and plain["selected"]["default"]["test_accuracy"] == 0.5
    without = {k: v for k, v in plain.items() if not k.startswith("in_domain")}
    assert run_results(in_domain_view([without])).empty


def test_modes_that_are_not_asked_for_are_left_out_but_never_the_only_one():
    both = [
        record("Aggregate", "photo", 0, default=0.5),
        record("DMG", "photo", 0, **{"pred-ens": 0.6, "mask-ens": 0.7}),
    ]
    assert list(accuracy_table(only_modes(both, "mask-ens"))["mode"]) == ["default", "mask-ens"]
    assert list(both[1]["selected"]) == ["pred-ens", "mask-ens"]


def test_networks_stand_in_the_papers_order_and_an_unfinished_one_is_left_out():
    runs = [
        record("DMG", "photo", 0, network, **{"pred-ens": 0.5})
        for network in ("resnet50", "small_cnn", "alexnet")
    ]
    assert list(by_network(runs)) == ["alexnet", "resnet50", "small_cnn"]
    runs[1]["status"], runs[1]["reason"] = "failed", "invented"
    table, numbers = network_table(runs)
    assert list(table.network) == list(dict.fromkeys(numbers.network)) == ["alexnet", "resnet50"]
    assert "network" not in network_table(runs[:2])[0]
    assert network_table([runs[1]])[0].empty and network_limits([runs[1]]).empty


def test_verdicts_are_against_aggregate_network_by_network():
    runs = [record("Aggregate", "photo", s, default=0.3 + s / 100) for s in (0, 1)]
    lines = network_lines(runs, "on the target domain")
    assert lines == [
        "No verdict on the target domain: no complete run of Aggregate and another method."
    ]
    runs += [record("DMG", "photo", s, **{"pred-ens": 0.8 + s / 100}) for s in (0, 1)]
    first, line = network_lines(runs, "on the target domain")
    assert first.startswith("On the target domain: DMG − Aggregate: +50.0 points"), first
    assert line.startswith("On the target domain, against Aggregate: Significantly different")
    assert "DMG PRED-ENS (+50.0)" in line


def test_ensembles_are_compared_model_by_model():
    runs = [
        record("DMG", target, 0, **{"pred-ens": 0.50, "mask-ens": 0.50 + apart})
        for target, apart in (("photo", 0.02), ("plain", -0.04))
    ]
    outside, inside = ensemble_lines(runs)
    assert "-1.00 points on average over 2 models (standard error 2.12), at most 4.00" in outside
    assert outside.split(":")[1] == inside.split(":")[1] and "on training domains" in inside
    assert ensemble_lines([record("Aggregate", "photo", 0, default=0.5)]) == []
    assert "undertrained" not in outside
    for run in runs:
        for mode in run["selected"].values():
            mode["validation_accuracy"] = 0.79  # of ten classes, 80 % is trained
    for line in ensemble_lines(runs):
        assert line.endswith("in one; these networks are undertrained.")
    both = runs + [record("Aggregate", target, 0, default=0.5) for target in ("photo", "plain")]
    (line,) = network_lines(both, "on the target domain")
    assert "every row but Aggregate is undertrained" in line, "and no pair is set beside its limit"


def test_the_gain_of_the_right_mask_by_hand():
    rows = [(0.9, 0.7, 0.8), (0.5, 0.6, 0.5), (0.4, 0.5, 0.3), (0.1, 0.2, 0.3)]
    runs = [masked("sketch", 0, rows)]
    # 90 - 75, 60 - 50, 30 - 45: mean 10 / 3; the target is not one of them
    assert own_mask_gain(runs).gain.tolist() == pytest.approx([10 / 3])
    assert "1 runs of one trial seed: no interval" in own_mask_line(own_mask_gain(runs))
    flat = [masked("sketch", s, [(0.5 + s / 100, 0.5, 0.5)] + rows[1:2] * 3) for s in (0, 1, 2)]
    per_seed = [(0 + 10 - 5) / 3, (1 + 10 - 5) / 3, (2 + 10 - 5) / 3]
    assert own_mask_gain(flat).gain.tolist() == pytest.approx(per_seed)
    mean, error = sum(per_seed) / 3, 1 / 3 / 3**0.5
    line = own_mask_line(own_mask_gain(flat))
    assert f"{mean:+.2f} points" in line and f"± {4.303 * error:.2f} over" in line
    assert line.endswith("masks are specialised here.")
    wide = [masked("sketch", s, [(0.5 + s / 10, 0.5, 0.5)] + rows[1:2] * 3) for s in (0, 1, 2)]
    line = own_mask_line(own_mask_gain(wide))  # 5 points, 2.6 standard errors of three seeds
    assert "+5.00 points" in line and line.endswith("not significantly specialised here.")
    worse = [masked("sketch", s, [(0.5, 0.6 + s / 100, 0.5)] + rows[1:2] * 3) for s in (0, 1)]
    assert own_mask_line(own_mask_gain(worse)).endswith("not significantly specialised here.")
    assert own_mask_line(own_mask_gain([])).startswith("No verdict on masks")


def test_what_masks_of_untrained_networks_do_is_said_to_be_that():
    rows = [(0.9, 0.7, 0.8), (0.5, 0.6, 0.5), (0.4, 0.3, 0.5), (0.1, 0.2, 0.3)]
    runs = [masked("sketch", s, rows) for s in (0, 1, 2)]
    for mode in runs[0]["selected"].values():
        mode["validation_accuracy"] = 0.799  # of ten classes, 80 % is trained
    assert own_mask_gain(runs).trained.tolist() == [False, True, True]
    line = own_mask_line(own_mask_gain(runs))
    assert line.endswith("masks are specialised here, in undertrained networks (1 of 3).")
    runs[0]["selected"]["mask-ens"]["validation_accuracy"] = 0.8
    assert own_mask_line(own_mask_gain(runs)).endswith("masks are specialised here.")


def test_the_table_of_masks_has_a_row_for_each_and_their_ensemble_last():
    rows = [(0.9, 0.7, 0.8), (0.5, 0.6, 0.5), (0.4, 0.5, 0.3), (0.1, 0.2, 0.3)]
    runs = [
        masked("sketch", 0, rows, 0.5),
        masked("sketch", 1, rows, 0.7),
        masked("photo", 0, rows),
    ]
    assert len(mask_runs(runs)) == 3 and len(mask_runs(runs, "sketch")) == 2 and mask_runs([]) == []
    table = mask_table(runs, "sketch")
    assert table["chosen mask"].tolist() == ["negative", "photo", "plain", "combined"]
    assert table.photo.tolist() == ["50.0 ± 0.0", "60.0 ± 0.0", "50.0 ± 0.0", "60.0 ± 7.1"]
    assert table.sketch[2] == "30.0 ± 0.0"


def test_published_rows_say_what_became_of_them():
    rows = published_rows("DMG Table 6", "paper-dmg-pacs", [])
    said = {(r.network, r.algorithm, r.here) for r in rows.itertuples()}
    assert ("alexnet", "Aggregate", "not run") in said and ("resnet50", "DMG", "not run") in said
    assert ("alexnet", "Aggregate", "quoted in the paper [29], not run") in said
    assert {here for _, name, here in said if name not in ("Aggregate", "Multi-Headed", "DMG")} == {
        here
        for _, name, here in said
        if here.startswith("quoted in the paper")
        and name not in ("Aggregate", "Multi-Headed", "DMG")
    }
    run = [record("DMG", "photo", 0, "alexnet", **{"pred-ens": 0.5})]
    there = published_rows("DMG Table 2", "paper-dmg-pacs", run).query("here == 'run, see above'")
    assert there[["network", "algorithm"]].values.tolist() == [["alexnet", "DMG"]]
    of_domainnet = published_rows("DMG Table 1", "paper-dmg-domainnet", [])
    assert set(of_domainnet.here) == {"not run"}
    assert set(of_domainnet.query("algorithm == 'MetaReg'").network) == set(of_domainnet.network)
    assert published_rows("DMG Table 5", "paper-dmg-domainnet", []).quantity.nunique() == 2


def test_what_differs_from_the_papers_protocol_is_computed():
    lines = dmg_diff([record("DMG", "photo", 0, **{"pred-ens": 0.5})], "paper-dmg-pacs")
    assert "epochs: 20 instead of 50" in lines
    assert "splits: 72/8/20 by trial seed instead of the authors' lists" in lines
    assert "data: DigitDomains instead of PACS" in lines
    other = [record("DMG", "photo", 0, protocol=False, **{"pred-ens": 0.5})]
    assert "protocol: DomainBed's instead of DMG's" in dmg_diff(other, "paper-dmg-pacs")


def test_hyper_parameters_are_compared_with_the_papers_study():
    def settings(**changed):
        usual = {"lr": 1e-4, "batch_size": 64, "weight_decay": 1e-5, "mask_lr": 1e-4}
        usual |= {"schedule": "exponential", "network": "resnet18", "lambda_o": 0.1, "places": []}
        return usual | changed

    def run(algorithm, **changed):
        made = record(algorithm, "photo", 0, **{"pred-ens": 0.5})
        made["spec"]["hparams"] = settings(**changed)
        return made

    assert hparam_diff([run("DMG"), run("Aggregate")], "paper-dmg-pacs") == []
    some = [run("DMG", lr=0.003, mask_lr=0.01), run("Aggregate", lr=0.003, batch_size=16)]
    lines = dmg_diff(some, "paper-dmg-pacs")
    assert "lr: 0.003 instead of 0.0001" in lines
    assert "mask_lr: 0.01 instead of 0.0001 (DMG)" in lines
    assert "batch_size: 16 instead of 64 (Aggregate)" in lines
    plain = run("Aggregate")
    del plain["spec"]["hparams"]["schedule"]  # a small network has none
    (line,) = hparam_diff([plain], "paper-dmg-pacs")
    assert line == "schedule: none instead of exponential"
    swept = [run("DMG", schedule="inverse", weight_decay=0.0, near_zero=True, lambda_o=0.01)]
    assert hparam_diff(swept, "paper-dmg-overlap") == []  # one of the weights of the sweep


def test_augmentation_is_said_whatever_differs():
    runs = [record("DMG", "photo", 0, **{"pred-ens": 0.5})]
    listed = departure_list(["lr: 1 instead of 2"], runs).splitlines()
    assert listed[0] == "- lr: 1 instead of 2" and len(listed) == 2
    assert "as DomainBed does" in listed[1] and "not as the released code does" in listed[1]
    assert departure_list([], runs).startswith("- nothing else differs\n- in every profile")
    assert departure_list([], []) == "Not run."


def test_the_known_domains_mask_is_compared_in_pairs_over_seeds():
    def runs(*gains, algorithm="DMG", targets=("photo", "plain")):
        made = []
        for seed, gain in enumerate(gains):
            for target, easy in zip(targets, (0.0, 0.2)):
                one = record(algorithm, target, seed, **{"pred-ens": 0.5 + easy})
                kd = {"step": 9, "validation_accuracy": 0.9, "accuracy": 0.6 + easy + gain}
                one["in_domain"]["kd"] = kd
                made.append(one)
        return made

    (line,) = known_domain_lines(runs(0.01, 0.02, 0.03))
    # seeds 1, 2, 3: 4.303 / sqrt(3) = 2.48, so that 2 points are not enough
    assert "+2.00 points (95 % CI ± 2.48 over 3 trial seeds; 6 models)" in line
    assert line.endswith("DMG is not significantly better here.")
    assert known_domain_lines(runs(0.03, 0.04, 0.05))[0].endswith("DMG is better here.")
    assert known_domain_lines(runs(-0.03, -0.04, -0.05))[0].endswith("DMG is worse here.")
    assert "2 models of one trial seed: no interval" in known_domain_lines(runs(0.02))[0]
    assert known_domain_lines(runs(0.01, algorithm="Aggregate")) == []
    (none,) = known_domain_lines([record("DMG", "photo", 0, **{"pred-ens": 0.5})])
    assert none.startswith("No verdict on known domains (small_cnn)")


PAGES = [f"dmg_table{n}" for n in range(1, 7)]


@pytest.mark.parametrize("name", PAGES)
def test_every_table_has_its_studies(name):
    artefact = ARTEFACTS[name]
    data = "domainnet" if name[-1] in "1345" else "pacs"
    assert artefact_study(name, "paper") == f"paper-dmg-{data}"
    assert artefact_studies(name, "quick") == ["quick-dmg"]
    assert "paper" in artefact.optional
    assert "quick" in artefact.optional


def test_the_papers_studies_are_whole():
    counts = {"paper-dmg-domainnet": 3 * 5 * 6, "paper-dmg-pacs": 3 * 3 * 4}
    for name, count in counts.items():
        check_study(name)
        study = read_study(name)
        assert count_runs(name) == count and len(study.runs) == 3
        assert [runs.network for runs in study.runs] == ["alexnet", "resnet18", "resnet50"]
        assert {(r.protocol, r.epochs, r.resolution) for r in study.runs} == {("dmg", 50, 224)}
    settings = read_study("paper-dmg-domainnet").runs[0].settings
    assert settings("DMG", {})["schedule"] == "inverse" and settings("DMG", {})["near_zero"]
    assert "schedule" not in settings("Aggregate-SGD", {})


@pytest.mark.parametrize("name", ["paper-dmg-domainnet", "paper-dmg-pacs"])
def test_the_papers_baselines_train_alexnet_with_its_dropout_and_dmg_without(name):
    "'Treating dropout as usual' (section 4.1); the networks that are built say so."
    dropout = {}
    for runs in read_study(name).runs:
        for algorithm in runs.algorithms:
            given = runs.settings(algorithm, {}) | {"network": runs.network}
            declared = get_algorithm(algorithm).HPARAMS
            known = {n: v for n, v in merge_hparams(declared, given).items() if n in declared}
            dropout[runs.network, algorithm] = network_options(known)["dropout"]
    assert {algorithm for _, algorithm in dropout} >= {"Aggregate", "Multi-Headed", "DMG"}
    for (network, algorithm), p in dropout.items():
        assert p == (0.5 if network == "alexnet" and algorithm != "DMG" else 0), (
            network,
            algorithm,
        )


def test_one_table_never_has_two_protocols():
    runs = [record("DMG", "photo", 0, **{"pred-ens": 0.5})]
    runs.append(record("Aggregate", "photo", 0, protocol=False, default=0.5))
    with pytest.raises(HmoeError, match="followed two protocols"):
        network_table(runs)
