"""What experts follow: tables and measures against loops over patches, levels of chance against
shuffles written out, and a run whose stored choices are those that its network makes."""

import copy
import itertools
import json
import math

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
import tutel_standin
from matplotlib.colors import to_rgb
from notebooks import page_functions

from hmoe_repro.algorithms import get_algorithm
from hmoe_repro.algorithms.hmoe import DISCOVERY
from hmoe_repro.analysis.experts import (
    StoredChoices,
    choice_rows,
    choice_verdict,
    expert_colours,
    runs_with_choices,
    tinted,
)
from hmoe_repro.analysis.results import arrays as arrays_of
from hmoe_repro.analysis.results import frame_of
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.method.routing_analysis import (
    against_chance,
    choice_agreement,
    choice_entropy,
    explained_fraction,
    follows_label,
    follows_position,
    guessed,
    label_agreement,
    label_table,
    position_table,
    score_choices,
    shifted,
    shuffled_within,
)
from hmoe_repro.method.tutel_layer import with_backend
from hmoe_repro.networks.routing import (
    CHOICE_PANEL,
    collect_choices,
    measure_choices,
    patch_experts,
    sparse_bodies,
)
from hmoe_repro.report.render import render
from hmoe_repro.training.checkpoint_io import sealed
from hmoe_repro.training.measurements import measure_run, trained_run
from hmoe_repro.training.model import build_dataset
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore, publish_study
from hmoe_repro.training.trainer import Trainer

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

SELECTION = page_functions("gmoe_selection")

pytestmark = pytest.mark.usefixtures("warm_kernels")


def world(n=30, patches=6, experts=4, seed=0):
    "Experts (n, patches), classes and domains of invented images."
    random = np.random.default_rng(seed)
    label, domain = random.integers(0, 3, n), np.sort(random.integers(0, 2, n))
    return random.integers(0, experts, (n, patches)), label, domain


@pytest.fixture(autouse=True)
def no_figures_left():
    yield
    plt.close("all")


# Measures


def test_tables_count_every_patch_once():
    experts, label, _ = world()
    by_label, by_place = label_table(experts, label, 4), position_table(experts, 4)
    for c, e in itertools.product(range(3), range(4)):
        assert by_label[c, e] == sum((experts[i] == e).sum() for i in range(30) if label[i] == c)
    for p, e in itertools.product(range(6), range(4)):
        assert by_place[p, e] == sum(experts[i, p] == e for i in range(30))


def test_explained_is_mutual_information_over_entropy():
    from sklearn.metrics import mutual_info_score

    experts, label, _ = world()
    flat, repeated = experts.ravel(), np.repeat(label, 6)
    shared = mutual_info_score(repeated, flat)
    share = np.bincount(flat) / flat.size
    table = label_table(experts, label, 4)
    assert math.isclose(choice_entropy(table.sum(0)), -(share * np.log(share)).sum())
    assert math.isclose(
        explained_fraction(table), shared / -(share * np.log(share)).sum(), rel_tol=1e-9
    )


def test_guessed_is_what_the_best_guesser_gets():
    table = np.array([[5, 1, 0], [2, 2, 3], [0, 0, 0]])
    best = max(
        sum(table[row, guess] for row, guess in enumerate(guesses))
        for guesses in itertools.product(range(3), repeat=3)
    )
    assert guessed(table) == best / table.sum() == 8 / 13


@pytest.mark.parametrize(
    "table, value",
    [
        ([[4, 0], [0, 4]], 1.0),
        ([[2, 2], [2, 2]], 0.0),
        ([[8, 0], [3, 0]], 0.0),  # one expert has all: nothing is left to explain
        ([[0, 0], [1, 3]], 0.0),  # one label has all
    ],
)
def test_the_ends_of_explained(table, value):
    assert math.isclose(explained_fraction(table), value, abs_tol=1e-12)


def test_agreement_is_that_of_all_pairs():
    experts, label, _ = world()
    same = [
        experts[i] == experts[j]
        for i, j in itertools.combinations(range(30), 2)
        if label[i] == label[j]
    ]
    assert math.isclose(choice_agreement(experts, label, 4), np.mean(same))
    assert math.isnan(choice_agreement(experts[:2], np.array([0, 1]), 4))


def test_three_domains_settle_a_part_of_six_experts():
    domain = np.repeat([0, 1, 2], 100)
    experts = (2 * domain + np.arange(300) % 2)[:, None]  # two experts for each domain
    found = explained_fraction(label_table(experts, domain, 6))
    assert math.isclose(found, math.log(3) / math.log(6))


# Chance


def test_labels_are_dealt_anew_within_groups_to_every_order_alike():
    labels, groups = np.array([0, 1, 2, 7, 8]), np.array([1, 0, 1, 0, 1])
    seen = {}
    random = np.random.default_rng(0)
    for _ in range(3000):
        got = tuple(shuffled_within(labels, groups, random).tolist())
        seen[got] = seen.get(got, 0) + 1
    assert len(seen) == 2 * 6
    assert max(seen.values()) < 1.35 * min(seen.values())
    assert all({got[1], got[3]} == {1, 7} for got in seen)


def test_maps_are_shifted_as_a_whole():
    random, maps = np.random.default_rng(0), np.arange(12).reshape(1, 12).repeat(400, 0)
    moved = shifted(maps, (3, 4), random).reshape(-1, 3, 4)
    rolled = {
        np.roll(np.arange(12).reshape(3, 4), (a, b), (0, 1)).tobytes(): (a, b)
        for a in range(3)
        for b in range(4)
    }
    found = {rolled[m.tobytes()] for m in moved}
    assert len(found) == 12


def test_an_interval_holds_the_middle_of_the_draws():
    score = against_chance(0.5, np.arange(1001) / 1000)
    assert score == {"value": 0.5, "chance": 0.5, "low": 0.025, "high": 0.975}


def test_chance_keeps_the_patches_of_an_image_together():
    """Every image has an expert of its own: by patches this looks like a finding, by images not."""
    random = np.random.default_rng(3)
    label = random.integers(0, 5, 100)
    experts = random.integers(0, 4, (100, 1)).repeat(20, 1)
    score = follows_label(experts, label, np.zeros(100, int), 4)["explained"]
    by_patches = [
        explained_fraction(
            label_table(random.permutation(experts.ravel()).reshape(100, 20), label, 4)
        )
        for _ in range(20)
    ]
    assert score["low"] < score["value"] < score["high"]
    assert score["value"] > 3 * max(by_patches)


def test_chance_grants_a_class_what_its_domains_explain():
    random = np.random.default_rng(0)
    domain = np.repeat([0, 1], 100)
    label = np.where(random.random(200) < 0.8, domain, 1 - domain)
    experts = np.where(random.random((200, 9)) < 0.8, domain[:, None], 2)
    blind = follows_label(experts, label, np.zeros(200, int), 3)["explained"]
    fair = follows_label(experts, label, domain, 3)["explained"]
    assert blind["value"] > 3 * blind["high"]
    assert fair["value"] <= fair["high"]
    assert fair["chance"] > 0.9 * fair["value"]


def test_a_place_counts_only_if_it_is_the_same_in_all_images():
    random = np.random.default_rng(0)
    halves = (np.arange(16) % 4 >= 2).astype(int)  # left and right
    aligned = np.tile(halves, (60, 1))
    anywhere = shifted(aligned, (4, 4), random)
    found = follows_position(aligned, (4, 4), 2)["explained"]
    assert found["value"] == 1
    assert found["high"] < 0.3
    found = follows_position(anywhere, (4, 4), 2)["explained"]
    assert found["low"] <= found["value"] <= found["high"]


def test_agreement_beyond_chance_needs_the_class():
    random = np.random.default_rng(0)
    label, domain = random.integers(0, 3, 90), np.repeat([0, 1, 2], 30)
    place = np.arange(16) % 4
    by_class = (label[:, None] + place) % 4
    score = label_agreement(by_class, label, domain, 4)
    assert score["value"] == 1
    assert score["high"] < 0.5
    score = label_agreement(np.tile(place, (90, 1)), label, domain, 4)
    assert score["value"] == score["chance"] == 1


def test_scores_are_json_the_same_again_and_say_what_was_dealt():
    random = np.random.default_rng(1)
    label, domain = random.integers(0, 4, 80), np.repeat([0, 1], 40)
    first = np.tile(label[:, None], (1, 9))
    experts = np.stack([first, (first + np.arange(9)) % 4])
    scores = score_choices(experts, (3, 3), 5, label, domain, shuffles=30)
    assert scores == score_choices(experts.copy(), (3, 3), 5, label, domain, shuffles=30)
    assert json.loads(json.dumps(scores, allow_nan=False)) == scores
    one, two = scores["layers"]
    assert one["class"]["explained"]["value"] == 1
    assert one["class"]["guessed"]["value"] == 1
    assert two["class"]["explained"]["value"] < 0.1
    assert two["agreement"]["value"] == 1
    assert one["load"] == [round(float((label == e).mean()), 6) for e in range(5)]
    share = np.bincount(label) / 80
    assert math.isclose(one["evenness"], -(share * np.log(share)).sum() / math.log(5), abs_tol=1e-6)
    (between,) = scores["between"]
    pairs = np.zeros((5, 5), int)
    np.add.at(pairs, tuple(experts.reshape(2, -1)), 1)
    assert between["explained"]["value"] == round(explained_fraction(pairs), 6)
    alone = score_choices(experts[:1], (3, 3), 5, label, np.zeros(80, int), shuffles=5)
    assert alone["layers"][0]["domain"] is None
    assert alone["between"] == []


# Measuring


SPARSE = {"network": "gmoe_small", "hparams": {"batch_size": 4}, "steps": 2}


@pytest.fixture(scope="module")
def trainer():
    config = make_config("GMoE", "DigitDomainsTiny", ["photo"], **SPARSE)
    made = Trainer(config, build_dataset(config), torch.device("cpu"))
    made.update()
    made.update()
    return made


def slowly_chosen(layer, tokens: torch.Tensor) -> list[int]:
    "The expert of each token, one by one."
    return [int(layer.router(token[None])[0].argmax()) for token in tokens]


def test_the_experts_of_patches_are_those_that_the_router_prefers(trainer):
    x = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    algorithm, inputs = trainer.algorithm.eval(), {}
    (body,) = sparse_bodies(algorithm)
    hooks = [
        body.blocks[b].mlp.register_forward_hook(
            lambda layer, given, out, b=b: inputs.update({b: given[0].detach()})
        )
        for b in (2, 4)
    ]
    with torch.no_grad():
        algorithm.predict(x)
        for hook in hooks:
            hook.remove()
        found = patch_experts(algorithm, x)
    assert found.shape == (2, 2, 16)
    assert found.dtype == torch.uint8
    for k, b in enumerate((2, 4)):
        for i in range(2):
            wanted = slowly_chosen(body.blocks[b].mlp, inputs[b][i, 1:])
            assert found[k, i].tolist() == wanted
    assert not any(body.blocks[b].mlp._forward_hooks for b in (2, 4))


def test_choices_of_a_split_are_even_and_in_order(trainer):
    found = collect_choices(trained_run(trainer), trainer.domains, "out", limit=9)
    assert found["experts"].shape == (2, 9, 16)
    assert found["domain"].tolist() == [0] * 3 + [2] * 3 + [3] * 3
    position = trainer.data.domain_index("plain")
    chosen = trainer.splits["plain"]["out"][:3]
    assert found["class"][3:6].tolist() == trainer.data.labels[position][chosen].tolist()
    with torch.no_grad():
        alone = patch_experts(trainer.algorithm.eval(), trainer.data.inputs(position, chosen))
    assert torch.equal(found["experts"][:, 3:6], alone)


def test_what_a_run_keeps_of_its_experts_is_small_and_true(trainer):
    scores, arrays = measure_choices(trained_run(trainer))
    assert (scores["blocks"], scores["experts"], scores["grid"]) == ([2, 4], 6, [4, 4])
    assert all(array.dtype == torch.uint8 for array in arrays.values())
    record = {"run_id": "0", "config": trainer.config.to_dict(), "expert_choices": scores}
    kept = StoredChoices(frame_of([record]).iloc[0], arrays)
    assert kept.class_names == list("0123456789")
    assert kept.test_domains == ["photo"]
    test = trainer.data.domain_index("photo")
    for part, of in (("out", kept.domain != test), ("test", kept.domain == test)):
        again = score_choices(kept.experts[:, of], (4, 4), 6, kept.label[of], kept.domain[of])
        assert again == scores[part]
    assert scores["test"]["layers"][0]["domain"] is None
    assert len(kept.shown) == len(kept.images) <= CHOICE_PANEL
    for domain in range(4):  # classes in turn: none has two more than one that has more images
        mine = kept.domain == domain
        had = np.bincount(kept.label[mine], minlength=10)
        got = np.bincount(kept.label[kept.shown[kept.domain[kept.shown] == domain]], minlength=10)
        assert got.sum() == 12
        assert got.max() <= got[got < had].min(initial=99) + 1
    assert len(sealed(arrays)) < 100_000


def test_the_record_of_a_run_without_experts_is_what_it_was(tmp_path):
    plain = make_config("ERM", "DigitDomainsTiny", ["photo"], **SPARSE | {"network": "small_cnn"})
    record = run(plain, RunStore(tmp_path))
    assert record["discovery"] is None
    assert not {"expert_choices", "spectra"} & set(record)
    assert not (RunStore(tmp_path).path(plain.run_id) / "arrays.safetensors").exists()


def test_experts_are_measured_under_any_algorithm_and_leave_arrays(tmp_path):
    store = RunStore(tmp_path)
    config = make_config("IRM", "DigitDomainsTiny", ["photo"], **SPARSE)
    record = run(config, store)
    assert record["status"] == "complete"
    assert record["discovery"] is None
    assert record["expert_choices"]["blocks"] == [2, 4]
    assert (store.path(config.run_id) / "arrays.safetensors").exists()
    assert not (store.path(config.run_id) / "selected-last.safetensors").exists()
    assert json.loads(json.dumps(record["expert_choices"])) == record["expert_choices"]


def test_experts_and_codes_are_measured_together():
    config = make_config("HMOE-DN", "DigitDomainsTiny", ["photo"], **SPARSE)
    both = Trainer(config, build_dataset(config), torch.device("cpu"))
    scores, arrays = measure_run(both)
    assert set(scores) == {"discovery", "expert_choices"}
    assert scores["discovery"]
    assert {"code_out", "panel_images", "choice_experts"} <= set(arrays)
    alone, _ = DISCOVERY.measure(trained_run(both))
    assert alone == scores["discovery"]


def test_averaged_weights_are_asked_and_not_those_in_training():
    config = make_config("SWAD", "DigitDomainsTiny", ["photo"], **SPARSE)
    made = Trainer(config, build_dataset(config), torch.device("cpu"))
    training, averaged = sparse_bodies(made.algorithm)
    with torch.no_grad():  # all to expert 5 in one network, to expert 1 in the other
        for body, expert in ((training, 5), (averaged, 1)):
            for block in (2, 4):
                router = body.blocks[block].mlp.router
                router.projector.weight.zero_()
                router.directions.copy_(torch.ones_like(router.directions) * -1)
                router.directions[:, expert] = 1
                router.projector.bias.fill_(1)
    assert averaged is made.algorithm.result.featurizer.body
    found = collect_choices(trained_run(made), made.domains, "out", 3)
    assert set(found["experts"].flatten().tolist()) == {1}


def test_layers_of_the_other_backend_are_heard_alike(trainer, monkeypatch):
    tutel_standin.install(monkeypatch)
    theirs = copy.deepcopy(trainer.algorithm).eval()
    (body,) = sparse_bodies(theirs)
    for block in (2, 4):
        body.blocks[block].mlp = with_backend(body.blocks[block].mlp, "tutel")
    x = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = patch_experts(trainer.algorithm.eval(), x)
        assert torch.equal(patch_experts(theirs, x), ours)
    made = Trainer(trainer.config, trainer.data, torch.device("cpu"))
    made.algorithm = theirs
    scores, _ = measure_choices(trained_run(made))
    assert scores["experts"] == 6
    assert scores["blocks"] == [2, 4]


def test_an_algorithm_without_experts_has_no_sparse_body():
    plain = get_algorithm("ERM")((3, 16, 16), 10, 3, {"network": "small_vit"})
    assert sparse_bodies(plain) == []


# Drawing


def invented(seed=0, network="gmoe_small", chance=0.01):
    "A complete record with experts that follow the class in block 2 and nothing in block 4."

    def score(value):
        return {"value": value, "chance": chance, "low": 0.0, "high": 2 * chance}

    def layer(value):
        both = {"explained": score(value), "guessed": score(0.5)}
        return {
            "load": [0.7, 0.295, 0.005],
            "evenness": 0.5,
            "class": both,
            "domain": both if value else None,
            "position": {"explained": score(0.0), "guessed": score(0.3)},
            "agreement": score(0.6),
        }

    found = {"blocks": [2, 4], "experts": 3, "grid": [2, 2], "step": 9}
    found |= {"domain_names": ["ink", "sand"], "class_names": list("abcdef")}
    between = [{"explained": score(0.2), "guessed": score(0.5)}]
    for part in ("out", "test"):
        found[part] = {"layers": [layer(0.4), layer(0.0)], "between": between}
    config = {"algorithm": "GMoE", "network": network, "test_domains": ["sand"], "trial_seed": seed}
    config["dataset"] = "Invented"
    return {"status": "complete", "run_id": str(seed), "config": config, "expert_choices": found}


def arrays_by_hand():
    return {
        "choice_experts": np.array([[[0, 1, 2, 2]] * 4, [[2, 2, 1, 0]] * 4], np.uint8),
        "choice_domain": np.array([0, 0, 1, 1], np.uint8),
        "choice_class": np.array([5, 1, 5, 5], np.uint8),
        "choice_images": np.full((2, 3, 6, 6), 90, np.uint8),
        "choice_shown": np.array([1, 3], np.uint8),
    }


def test_every_patch_gets_the_colour_of_its_expert():
    images = np.zeros((1, 3, 5, 7), np.uint8)
    images[0, 0] = 60  # grey 20, which becomes 0.6 of white and 0.4 of 20
    picture = tinted(images, [[0, 1, 2, 0, 1, 1]], (2, 3), 3, strength=0.5)
    for y, x, e in ((0, 0, 0), (0, 6, 2), (2, 3, 1), (4, 0, 0), (4, 6, 1), (1, 3, 1)):
        wanted = 0.5 * (153 + 0.4 * 20) + 0.5 * 255 * np.array(to_rgb(expert_colours(3)[e]))
        assert np.allclose(picture[0, y, x], wanted, atol=0.51), (y, x)


def test_six_experts_are_told_apart_on_dark_and_on_light_pictures():
    images = np.zeros((2, 1, 1, 6), np.uint8)
    images[1] = 255
    both = tinted(images, [[*range(6)]] * 2, (1, 6), 6)[:, 0].astype(float)
    apart = [
        np.linalg.norm(both[i, e] - both[j, f])
        for e, f in itertools.combinations(range(6), 2)
        for i in range(2)
        for j in range(2)
    ]
    assert min(apart) > 40
    assert len(set(expert_colours(12))) == 12


def test_stored_choices_know_their_blocks():
    kept = StoredChoices(frame_of([invented()]).iloc[0], arrays_by_hand())
    assert kept.layer().tolist() == [[2, 2, 1, 0]] * 4
    assert kept.layer(2).tolist() == [[0, 1, 2, 2]] * 4


def test_shares_are_counted_by_hand():
    kept = StoredChoices(frame_of([invented()]).iloc[0], arrays_by_hand())
    shares = SELECTION.expert_shares(kept, "class", 2)
    assert shares.index.tolist() == ["b", "f"]
    assert (shares.to_numpy() == [0.25, 0.25, 0.5]).all()
    maps = SELECTION.position_shares(kept)
    assert maps.shape == (3, 2, 2)
    assert maps[2].tolist() == [[1, 1], [0, 0]]


def test_the_picture_has_a_row_for_each_domain_and_a_name_for_each_expert():
    kept, figure = StoredChoices(frame_of([invented()]).iloc[0], arrays_by_hand()), plt.figure()
    SELECTION.plot_selection(figure, kept, columns=3)
    assert [axis.get_ylabel() for axis in figure.axes] == ["ink", "sand\n(test)"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["expert 0", "expert 1", "expert 2"]
    sheet = figure.axes[0].images[0].get_array()
    assert sheet.shape == (13, 20, 3)
    assert (sheet[:6, :6] == 90).all()
    over = tinted(kept.images[:1], kept.layer()[[1]], (2, 2), 3)
    assert (sheet[7:, :6] == over[0]).all()
    assert (sheet[:, 7:] == 255).all()


def test_rows_and_their_means():
    failed = invented(2) | {"status": "failed", "expert_choices": None}
    records = [invented(0), invented(1, chance=0.3), failed]
    rows = choice_rows(frame_of(records))
    assert set(rows.known) == {"class", "domain", "position", "layer before"}
    assert rows[(rows.block == 4) & (rows.known == "domain")].empty
    one = rows[(rows.part == "validation") & (rows.block == 2) & (rows.known == "class")]
    one = one[one.measure == "explained"]
    assert one.value.tolist() == [0.4, 0.4]
    assert one.above.tolist() == [True, False]
    with pytest.raises(HmoeError, match="no complete run has scores of experts"):
        choice_rows(frame_of(records[2:]))


def test_the_sentence_of_a_network_contrasts_the_class_with_the_domain():
    records = [invented(seed) for seed in range(3)]
    for seed, record in enumerate(records):
        for layer in record["expert_choices"]["out"]["layers"]:
            layer["domain"] = {"explained": {"value": 0.1 + seed / 100, **CHANCE}}
    (line,) = choice_verdict(frame_of(records))
    # the class explains 40 and 0 % in the two layers; the domain 10, 11 and 12 %
    assert line.startswith(
        "gmoe_small: experts follow the class of a picture more: class − domain +9.0 (95 % CI +6.5 "
        "to +11.5) points of the choice of expert explained, significant (3 runs). Explained: "
    )
    assert "class 20.0 % (chance 1.0 %)" in line
    assert "domain 11.0 % (chance 1.0 %)" in line
    assert line.endswith("The busiest of 3 experts has 70 % of the patches.")
    (alone,) = choice_verdict(frame_of(records[:1]))
    assert "+10.0 (one seed) points of the choice of expert explained (1 runs)" in alone
    open_one = "gmoe_small: undecided whether experts follow the class or the domain of a picture"
    assert alone.startswith(open_one)
    for seed, record in enumerate(records):
        for layer in record["expert_choices"]["out"]["layers"]:
            layer["domain"] = {"explained": {"value": 0.1 + seed / 10, **CHANCE}}
    (wide,) = choice_verdict(frame_of(records))  # 20 % minus 10, 20 and 30 %
    assert wide.startswith(f"{open_one} more: class − domain ")
    assert "significant" not in wide


CHANCE = {"chance": 0.01, "low": 0.0, "high": 0.02}


def test_only_runs_with_scores_and_arrays_are_drawn(tmp_path):
    from invented import write_arrays

    write_arrays(tmp_path / "some-study", "0", arrays_by_hand())
    records = [invented(0), invented(1), invented(2) | {"expert_choices": None}]
    (kept,) = runs_with_choices(frame_of(records, "some-study"), tmp_path)
    assert kept.run.run_id == records[0]["run_id"]
    assert kept.shown.tolist() == [1, 3]


# The page


@pytest.mark.slow
def test_the_page_of_trained_runs(tmp_path):
    """From training to the page: pictures and tables are of the runs, and what is missing is
    said."""
    store = RunStore(tmp_path / "runs")
    configs = [make_config("GMoE", "DigitDomainsTiny", [d], **SPARSE) for d in ("photo", "sketch")]
    configs.append(
        make_config("ERM", "DigitDomainsTiny", ["photo"], **SPARSE | {"network": "small_cnn"})
    )
    records = [run(config, store) for config in configs]
    ids = [config.run_id for config in configs]
    results, figures = tmp_path / "results", tmp_path / "figures"
    publish_study("quick-gmoe", ids, store, results, with_arrays=ids[:2])
    page = render("gmoe_selection", "quick", store=results, output=figures, test_domain="sketch")
    made = {file.name for file in page.parent.iterdir()}
    assert {"gmoe_selection.png", "gmoe_selection_block2.png", "gmoe_selection.csv"} <= made
    table = pd.read_csv(page.parent / "gmoe_selection.csv")
    values = [
        r["expert_choices"]["out"]["layers"][1]["class"]["explained"]["value"] for r in records[:2]
    ]
    one = table[(table.part == "validation") & (table.block == 4) & (table.known == "class")]
    assert math.isclose(one.value.item(), np.mean(values))
    assert one.runs.item() == 2
    last = frame_of(records[1:2], "quick-gmoe").iloc[0]
    kept = StoredChoices(last, arrays_of(last, results))
    assert kept.test_domains == ["sketch"]
    shares = pd.read_csv(page.parent / "gmoe_selection_domains.csv", index_col=0)
    assert np.allclose(shares, SELECTION.expert_shares(kept, "domain"))
    assert "of a picture more: class − domain" in page.read_text()


@pytest.mark.slow
def test_the_page_says_where_nothing_is_to_be_drawn(tmp_path):
    store = RunStore(tmp_path / "runs")
    sparse = make_config("GMoE", "DigitDomainsTiny", ["photo"], **SPARSE)
    plain = make_config("ERM", "DigitDomainsTiny", ["photo"], **SPARSE | {"network": "small_cnn"})
    for config in (sparse, plain):
        run(config, store)
    for name, config, said in (
        ("one", sparse, "The arrays of these runs are not published"),
        ("two", plain, "No run of this study has a network with experts."),
    ):
        publish_study("quick-gmoe", [config.run_id], store, tmp_path / name)
        page = render("gmoe_selection", "quick", store=tmp_path / name, output=tmp_path / "out")
        assert said in page.read_text(), name
