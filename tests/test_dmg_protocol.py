"""DMG's protocol: partitions and epochs counted by hand, lists that are followed and refused, runs
that go on in the middle of an epoch, and what is said where two protocols would meet."""

import json
from types import SimpleNamespace

import pytest
import torch

from hmoe_repro.algorithms import get_algorithm
from hmoe_repro.algorithms.base import ERM, register
from hmoe_repro.analysis.results import frame_of
from hmoe_repro.analysis.tables import accuracy_table, run_results, selected_table
from hmoe_repro.core.config import CONFIG
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seeds import seed_hash
from hmoe_repro.data.image_folder import sample_tree
from hmoe_repro.data.loader import ImageDataset
from hmoe_repro.data.registry import find_dataset, load_dataset
from hmoe_repro.report.provenance import DMG_RULE, header, rule_of
from hmoe_repro.studies.domainbed_export import export_domainbed
from hmoe_repro.studies.estimates import estimate, measured_kinds
from hmoe_repro.studies.studies import study_configs
from hmoe_repro.studies.study_file import check_study, read_study
from hmoe_repro.training.model import build_dataset, load_model
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.protocols import (
    DMGProtocol,
    EpochSampler,
    dmg_splits,
    epoch_length,
    mode_accuracies,
    split_indices,
    split_train_val,
    three_parts,
)
from hmoe_repro.training.run import run
from hmoe_repro.training.run_config import RunConfig
from hmoe_repro.training.selection import (
    in_domain_accuracy,
    select_model,
    training_domain_validation,
)
from hmoe_repro.training.splits import (
    cached_split_lists,
    find_splits,
    read_split_lists,
    register_splits,
)
from hmoe_repro.training.store import RunStore, outcome
from hmoe_repro.training.trainer import Batches, Trainer

DOMAINS = ["cartoon", "negative", "photo", "sketch"]  # of the sample tree, 12 images each
CPU = torch.device("cpu")


def spec_of(algorithm="ERM", hparams=(), **more):
    given = dict(network="small_cnn", protocol="dmg", epochs=2) | more
    hparams = {"batch_size": 16} | dict(hparams)
    return make_config(algorithm, "DigitDomainsTiny", ["sketch"], hparams=hparams, **given)


def trainer(*given, **more):
    config = spec_of(*given, **more)
    return Trainer(config, build_dataset(config), CPU)


def train(one, until):
    while one.step < until:
        one.update()
        if one.is_due():
            one.evaluate()


# Parts


@pytest.mark.parametrize("size", [12, 13, 100, 449, 2048])
def test_three_parts_have_these_sizes_and_share_nothing(size):
    parts = [list(p) for p in three_parts(size, trial_seed=1, domain=2)]
    test = int(0.2 * size)
    validation = (size - test) // 10
    assert [len(p) for p in parts] == [size - test - validation, validation, test]
    assert sorted(sum(parts, [])) == list(range(size))
    again = three_parts(size, trial_seed=1, domain=2)
    assert all(list(a) == b for a, b in zip(again, parts))
    assert list(three_parts(size, 2, 2)[2]) != parts[2]
    assert parts[2] == split_indices(size, 1, 2)[1].tolist()  # DomainBed's out


def test_a_list_is_divided_into_nine_tenths_and_one():
    positions = torch.arange(100, 137)
    train_part, validation = split_train_val(positions, trial_seed=0, domain=4)
    assert len(validation) == 3
    assert len(train_part) == 34
    assert sorted([*train_part.tolist(), *validation.tolist()]) == positions.tolist()
    assert validation.tolist() != split_train_val(positions, 1, 4)[1].tolist()


def test_a_target_is_tested_on_all_of_its_images_and_gives_none_to_training():
    data = load_dataset("DigitDomains")
    cut = dmg_splits(data, 0, ["photo"])
    assert list(cut["photo"]) == ["in"]
    assert len(cut["photo"]["in"]) == len(data.labels[1])
    assert all(list(cut[d]) == ["in", "out", "test"] for d in ("negative", "plain", "sketch"))


def test_a_domain_too_small_for_validation_is_refused():
    class Small:
        name, domain_names = "Small", ["a", "b"]
        labels = [torch.zeros(11), torch.zeros(30)]

    with pytest.raises(HmoeError, match="'a' has 11 images, too few .* Fix: more images"):
        dmg_splits(Small, 0, ["b"])
    assert len(dmg_splits(Small, 0, ["a"])["a"]["in"]) == 11


# Epochs


def test_an_epoch_shows_each_image_once_and_its_last_batch_holds_the_rest():
    splits = [torch.arange(7), torch.arange(100, 120), torch.tensor([500])]
    sampler = EpochSampler(splits, 8, seed=3)
    assert sampler.updates_per_epoch == epoch_length(28, 8) == 4
    orders = []
    for _ in range(3):
        batches = [sampler.draw() for _ in range(4)]
        assert [sum(map(len, batch)) for batch in batches] == [8, 8, 8, 4]
        for i, split in enumerate(splits):
            assert sorted(sum((batch[i].tolist() for batch in batches), [])) == split.tolist()
        assert any(len(part) == 0 for batch in batches for part in batch)  # the domain of one
        orders.append([torch.cat(batch).tolist() for batch in batches])
    assert orders[0] != orders[1] != orders[2]
    again = EpochSampler(splits, 8, seed=3)
    assert [torch.cat(again.draw()).tolist() for _ in range(4)] == orders[0]
    assert torch.cat(EpochSampler(splits, 8, seed=4).draw()).tolist() != orders[0][0]


def test_an_order_is_that_of_the_seed_and_the_number_of_the_epoch():
    sampler = EpochSampler([torch.arange(10)], 10, seed=5)
    for epoch in range(2):
        generator = torch.Generator().manual_seed(seed_hash(5, "epoch", epoch))
        assert sampler.draw()[0].tolist() == torch.randperm(10, generator=generator).tolist()


def test_a_sampler_goes_on_in_the_middle_of_an_epoch_seeds_of_images_included():
    def drawn(sampler, count):
        pairs = []
        for _ in range(count):
            indices = sampler.draw()
            pairs.append([torch.cat(indices).tolist(), torch.cat(sampler.seeds(indices)).tolist()])
        return pairs

    first, second = (EpochSampler([torch.arange(9), torch.arange(5)], 4, seed=0) for _ in "ab")
    drawn(first, 6)
    second.load(json.loads(json.dumps(first.state())))
    assert drawn(first, 5) == drawn(second, 5)


def test_a_batch_that_waits_is_drawn_again_after_a_resumption(monkeypatch):
    data = build_dataset(spec_of())
    monkeypatch.setattr(data, "workers", 1, raising=False)  # these data are other tests', too

    def batches():
        sampler = EpochSampler([torch.arange(10), torch.arange(12)], 4, seed=0)
        return Batches(data, ["plain", "sketch"], sampler, "cpu")

    first, second = batches(), batches()
    for _ in range(4):
        first.next()
    assert first.sampler.drawn == 5
    assert first.state() == {"drawn": 4}
    second.load(first.state())
    for _ in range(4):
        for (x, y), (other_x, other_y) in zip(first.next(), second.next()):
            assert torch.equal(x, other_x)
            assert torch.equal(y, other_y)


@pytest.mark.parametrize("batch_size, images, updates", [(64, 64, 1), (64, 65, 2), (16, 129, 9)])
def test_updates_of_an_epoch(batch_size, images, updates):
    assert epoch_length(images, batch_size) == updates


def test_epochs_become_updates():
    "DigitDomainsTiny has 3 training domains of 60 images: 60 - 12 = 48, of which 4 validate."
    data = load_dataset("DigitDomainsTiny")
    assert [len(labels) for labels in data.labels] == [60] * 4
    config = spec_of(epochs=3)
    assert config.checkpoint_frequency == 9  # 3 * 44 = 132 images in batches of 16
    assert config.steps == 27
    assert config.sampler == "domain"
    assert config.protocol == "dmg"
    assert spec_of(epochs=None, steps=27).run_id == config.run_id
    assert spec_of(epochs=None).steps == 50 * 9
    of_64 = make_config(
        "ERM", "DigitDomainsTiny", ["sketch"], network="small_cnn", protocol="dmg", epochs=1
    )
    assert of_64.hparams["batch_size"] == 64
    assert of_64.steps == 3
    for steps, frequency, points in ((27, 9, [8, 17, 26]), (10, 4, [3, 7, 9])):
        by = DMGProtocol(SimpleNamespace(steps=steps, checkpoint_frequency=frequency))
        assert [step for step in range(steps) if by.is_checkpoint(step)] == points


def test_ids_of_domainbed_runs_do_not_know_of_it():
    who = dict(algorithm="ERM", dataset="DigitDomains", dataset_fingerprint="f" * 12)
    config = RunConfig(**who, test_domains=("sketch",), hparams={"lr": 0.001})
    assert config.protocol == "domainbed"
    assert config.splits is None
    assert config.replace(protocol="domainbed").run_id == config.run_id
    assert RunConfig.from_dict(spec_of().to_dict()) == spec_of()


# Runs


class DomainsKnown(ERM):
    """ERM with greedy and known-domain modes; the latter knows the answer by its domain."""

    domain_modes = ("kd", "greedy")

    def predict_modes(self, x, domain=None):
        found = {"default": self.predict(x)}
        if domain is not None:
            shifted = found["default"].roll(domain, dims=1)
            found |= {"kd": shifted, "greedy": -found["default"]}
        return found


@pytest.fixture
def domains_known(own_names):
    register("Domains known", paper="invented", needs_domain_labels=True)(DomainsKnown)


def test_a_run_resumed_in_the_middle_of_an_epoch_is_the_same_to_the_bit():
    whole, halted, resumed = (trainer(epochs=3, evaluate="all") for _ in "abc")
    told = []
    whole.algorithm.on_epoch = told.append
    train(whole, whole.config.steps)
    train(halted, 9 + 4)
    state = halted.state()
    assert state["sampler"] == {"drawn": 13}
    resumed.load(state)
    again = []
    resumed.algorithm.on_epoch = again.append
    train(resumed, resumed.config.steps)
    assert resumed.checkpoints == whole.checkpoints
    assert len(whole.checkpoints) == 3
    ours, theirs = whole.algorithm.state_dict(), resumed.algorithm.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert told == [1, 2, 3]
    assert again == [2, 3]


def test_nothing_is_told_of_epochs_under_domainbeds_protocol():
    config = make_config("ERM", "DigitDomainsTiny", ["sketch"], network="small_cnn", steps=3)
    one = Trainer(config, build_dataset(config), CPU)
    one.algorithm.on_epoch = lambda epoch: pytest.fail("no epochs here")
    train(one, 3)


def test_a_record_says_what_was_followed_and_has_in_domain_accuracy(tmp_path):
    config = spec_of()
    record = run(config, RunStore(tmp_path))
    followed = record["protocol"]
    assert record["config"]["protocol"] == "dmg"
    assert record["status"] == "complete"
    assert (followed["splits"], followed["epochs"]) == ("72/8/20 by trial seed", 2)
    assert followed["images"]["plain"] == {"in": 44, "out": 4, "test": 12}
    assert followed["images"]["sketch"] == {"in": 60}
    assert (record["test_size"], record["in_domain_size"]) == (60, 36)
    algorithm, _ = load_model(config.run_id, store=RunStore(tmp_path))
    data, cut = build_dataset(config), dmg_splits(build_dataset(config), 0, ["sketch"])
    by_hand = {
        d: mode_accuracies(algorithm, data, d, cut[d]["test"])["default"]
        for d in data.domain_names[:3]
    }
    inside = record["in_domain"]["default"]
    assert inside["domains"] == by_hand
    assert inside["accuracy"] == pytest.approx(sum(by_hand.values()) / 3)
    tested = mode_accuracies(algorithm, data, "sketch", cut["sketch"]["in"])["default"]
    assert record["selected"]["default"]["test_accuracy"] == tested


def test_evaluate_counts_modes_of_domains_where_a_domain_is_known(domains_known):
    data = load_dataset("DigitDomainsTiny")
    known = DomainsKnown(data.input_shape, data.num_classes, 3, {"network": "small_cnn"}).eval()
    indices = torch.arange(20)
    assert list(mode_accuracies(known, data, "plain", indices)) == ["default"]
    found = mode_accuracies(known, data, "plain", indices, known_domain=2)
    logits = known.predict(data.inputs(2, indices))
    shifted = (logits.roll(2, dims=1).argmax(1) == data.labels[2][indices]).float().mean()
    assert list(found) == ["default", "kd", "greedy"]
    assert found["kd"] == pytest.approx(float(shifted))


def test_greedy_judges_for_all_modes_and_kd_is_in_domain_alone(domains_known, tmp_path):
    config = spec_of("Domains known", epochs=4, evaluate="all")
    record = run(config, RunStore(tmp_path))
    assert record["status"] == "complete", record["reason"]
    means = [
        sum(p["accuracies"][d]["out"]["greedy"] for d in ("negative", "photo", "plain")) / 3
        for p in record["checkpoints"]
    ]
    best = record["checkpoints"][means.index(max(means))]["step"]
    assert list(record["selected"]) == ["default"]
    assert list(record["in_domain"]) == ["default", "kd", "greedy"]
    chosen = [*record["selected"].values(), *record["in_domain"].values()]
    assert {c["step"] for c in chosen} == {best}
    assert {c["validation_accuracy"] for c in chosen} == {max(means)}
    assert select_model([record], "sketch", mode="default")["step"] == best
    assert "kd" not in record["checkpoints"][0]["accuracies"]["sketch"]["in"]
    load_model(config.run_id, "kd", RunStore(tmp_path))
    frame = frame_of([record])
    rows = selected_table(frame)
    assert rows["test accuracy"].tolist()[1:] == ["–", "–"]
    assert set(run_results(frame)["mode"]) == {"default"}
    inside = frame[frame.accuracy_in_domain.notna()]
    assert set(inside["mode"]) == {"default", "kd", "greedy"}


def test_under_domainbed_a_mode_still_selects_for_itself(domains_known, tmp_path):
    given = dict(network="small_cnn", steps=7, checkpoint_frequency=2)
    config = make_config("Domains known", "DigitDomainsTiny", ["sketch"], **given)
    record = run(config, RunStore(tmp_path))
    alone = training_domain_validation(record["checkpoints"], ["sketch"], ["default"])
    assert record["selected"] == alone
    assert "in_domain" not in record
    assert "protocol" not in record


def test_only_a_better_epoch_and_the_last_are_tested():
    cut = {"a": {"in": 0, "out": 0, "test": 0}, "b": {"in": 0, "out": 0}, "t": {"in": 0}}

    def parts(policy, improved):
        run = SimpleNamespace(test_domains=["t"], evaluate=policy)
        return DMGProtocol(run).parts(cut, improved, last=False)

    assert parts("selection", False) == []
    assert parts("selection:5", True) == [("a", "test"), ("t", "in")]
    everything = [("a", "in"), ("a", "test"), ("b", "in"), ("t", "in")]
    assert parts("all", False) == everything


def test_in_domain_accuracy_is_the_mean_over_domains_at_the_selected_epoch():
    def point(step, validation, test):
        of_a = {"out": {"m": validation}, "test": {"m": test}}
        of_b = {"out": {"m": validation}, "test": {"m": test / 2}}
        return {"step": step, "accuracies": {"a": of_a, "b": of_b, "t": {"in": {"m": 0.1}}}}

    found = in_domain_accuracy([point(3, 0.5, 0.8), point(7, 0.6, 0.4)], ["t"], ["m"])["m"]
    assert (found["step"], found["accuracy"]) == (7, pytest.approx(0.3))
    plain = [{"step": 0, "accuracies": {"a": {"out": {"m": 1.0}}, "t": {"in": {"m": 0.0}}}}]
    assert in_domain_accuracy(plain, ["t"], ["m"]) == {}


# Lists


@pytest.fixture
def lists(tmp_path):
    "Images of the sample tree, and a folder with lists of them: 8 to train, 3 to test."
    data = ImageDataset(sample_tree(tmp_path / "Listed", per_class=6, size=16), 16)
    folder = tmp_path / "lists"
    folder.mkdir()
    for domain, images in zip(data.domain_names, data.tree.files):
        write(folder, domain, "train", images[:8])
        write(folder, domain, "test", images[-3:])
    return data, folder


def write(folder, domain, part, images):
    lines = [f"{image} {int('/temple/' in image)}\n" for image in images]
    (folder / f"{domain}_{part}.txt").write_text("".join(lines))


def test_lists_are_followed(lists):
    data, folder = lists
    read = read_split_lists(folder, data)
    assert read.unlisted == 4
    assert list(read.parts) == DOMAINS
    assert read.parts["photo"]["train"].tolist() == list(range(8))
    assert read.parts["photo"]["test"].tolist() == [9, 10, 11]


def test_a_train_list_of_eight_is_too_small_to_draw_a_tenth(lists):
    data, folder = lists
    with pytest.raises(HmoeError, match="too few for a tenth .* or a list cartoon_val.txt"):
        dmg_splits(data, 0, ["photo"], read_split_lists(folder, data))


def test_lists_for_validation_are_taken_as_they_are(lists):
    data, folder = lists
    for domain, images in zip(data.domain_names, data.tree.files):
        write(folder, domain, "val", [images[8]])
    cut = dmg_splits(data, 5, ["photo"], read_split_lists(folder, data))
    parts = {part: found.tolist() for part, found in cut["sketch"].items()}
    assert parts == {"in": list(range(8)), "out": [8], "test": [9, 10, 11]}


def test_the_test_list_of_pacs_is_for_targets(lists):
    "There a domain's test list is train and validation together."
    data, folder = lists
    for domain, images in zip(data.domain_names, data.tree.files):
        (folder / f"{domain}_test.txt").unlink()
        (folder / f"{domain}_train.txt").rename(folder / f"{domain}_train_kfold.txt")
        write(folder, domain, "crossval_kfold", images[8:])
        write(folder, domain, "test_kfold", images[::-1])
    cut = dmg_splits(data, 0, ["photo"], read_split_lists(folder, data))
    assert sorted(cut["photo"]["in"].tolist()) == list(range(12))
    assert {part: len(found) for part, found in cut["sketch"].items()} == {"in": 8, "out": 4}


@pytest.mark.parametrize(
    "part, images, message",
    [
        ("train", "photo/none.png 1\n", "photo_train.txt names photo/none.png, which is not among"),
        ("test", "FIRST 1\n", "FIRST is in photo_train.txt and in photo_test.txt"),
        ("train", "FIRST 1\nFIRST 1\n", "photo_train.txt names FIRST twice"),
        ("train", "FIRST\n", "photo_train.txt, line 1: 'FIRST' is not a path and a label"),
        ("test", "\n \n", "photo_test.txt names no image"),
        ("train", None, "no list photo_train.txt for domain photo"),
        ("test_kfold", "FIRST 1\n", "two lists for test of photo"),
    ],
)
def test_lists_that_cannot_be_meant_are_refused(lists, part, images, message):
    data, folder = lists
    first, path = data.tree.files[2][0].replace(" ", "_"), folder / f"photo_{part}.txt"
    data.tree.files[2][0] = first
    write(folder, "photo", "train", data.tree.files[2][:8])
    if images is None:
        path.unlink()
    else:
        path.write_text(images.replace("FIRST", first))
    with pytest.raises(HmoeError) as said:
        read_split_lists(folder, data)
    assert message.replace("FIRST", first) in str(said.value).replace(f"{folder}/", "")
    assert "Fix: " in str(said.value)
    assert "\n" not in str(said.value)


def test_a_folder_without_lists_and_data_without_files_are_refused(lists, tmp_path):
    data, folder = lists
    (tmp_path / "empty").mkdir()
    with pytest.raises(HmoeError, match="holds no list of a split. Fix: files DOMAIN_train.txt"):
        register_splits(tmp_path / "empty")
    with pytest.raises(HmoeError, match="cannot be read .*Fix: a folder with DOMAIN_train.txt"):
        register_splits(tmp_path / "none")
    with pytest.raises(HmoeError, match="made of tensors.*leave --splits out"):
        read_split_lists(folder, load_dataset("DigitDomainsTiny"))


def test_the_content_of_lists_is_their_name(lists, tmp_path, own_names):
    data, folder = lists
    before = cached_split_lists(register_splits(folder), data).digest
    assert find_splits(before, data).digest == before
    moved = folder.rename(tmp_path / "elsewhere")
    with pytest.raises(HmoeError, match=f"the lists {before} .* Fix: --splits FOLDER"):
        find_splits(before, data)
    register_splits(moved)
    assert find_splits(before, data).digest == before
    write(moved, "photo", "train", data.tree.files[2][:7])
    assert cached_split_lists(moved, data).digest != before


def test_a_run_by_lists_holds_their_hash_and_finds_them_again(
    lists, tmp_path, own_names, monkeypatch
):
    _, folder = lists
    for domain in DOMAINS:
        images = [line.rpartition(" ")[0] for line in (folder / f"{domain}_train.txt").open()]
        write(folder, domain, "train", images[:6])
        write(folder, domain, "val", images[6:])
    name = find_dataset("Listed", tmp_path)
    given = dict(network="image_cnn", resolution=16, protocol="dmg", epochs=1, splits=folder)
    config = make_config("ERM", name, ["photo"], hparams={"batch_size": 5}, **given)
    without = make_config(
        "ERM", name, ["photo"], hparams={"batch_size": 5}, **given | {"splits": None}
    )
    assert config.steps == 4
    assert config.splits
    assert without.run_id != config.run_id
    assert not config.images["val_augment"]
    assert str(folder) not in json.dumps(config.to_dict())
    record = run(config, RunStore(tmp_path / "runs"))
    assert record["status"] == "complete", record["reason"]
    assert record["protocol"]["splits"] == f"lists {config.splits}"
    assert record["protocol"]["images"]["sketch"] == {"in": 6, "out": 2, "test": 3}
    assert (record["test_size"], record["in_domain_size"]) == (3, 9)
    monkeypatch.setattr(CONFIG, "splits", ())
    lost = run(config, RunStore(tmp_path / "others"))
    assert lost["status"] == "failed"
    assert "Fix: --splits FOLDER" in lost["reason"]


# What belongs to one protocol only


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(protocol="dgm"), "unknown protocol 'dgm'"),
        (dict(protocol="domainbed", epochs=2), "epochs belong to DMG's protocol"),
        (
            dict(protocol="domainbed", epochs=None, splits="x"),
            "the folder of lists .* cannot be read",
        ),
        (dict(sampler="pooled"), "the sampler pooled belongs to DomainBed's protocol"),
        (dict(domainbed_compat=True), "domainbed_compat belongs to DomainBed's protocol"),
        (dict(steps=5), "steps=5 and epochs=2 both say"),
        (dict(epochs=0), "epochs must be greater than or equal to 1, got 0"),
        (dict(hparams={"batch_size": 0}), "batch_size"),
    ],
)
def test_requests_that_mix_protocols_are_refused(given, message):
    with pytest.raises(HmoeError, match=message):
        spec_of(**given)


STUDY = """title = "by DMG's protocol"
algorithms = ["ERM"]
datasets = ["DigitDomainsTiny"]
test_domains = ["photo"]
seeds = 2
network = "small_cnn"
protocol = "dmg"
epochs = 3
"""


def test_a_study_may_state_epochs(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(STUDY + "[[runs]]\n[[runs]]\nsteps = 5\n[[runs]]\nepochs = 1\n")
    study = read_study(path)
    assert [(r.steps, r.epochs) for r in study.runs] == [(None, 3), (5, None), (None, 1)]
    assert [s.steps for s in study_configs(path)] == [9, 9, 5, 5, 3, 3]  # batches of 64
    assert {s.protocol for s in study_configs(path)} == {"dmg"}


@pytest.mark.parametrize(
    "right, wrong, line, message",
    [
        ('"dmg"', '"dgm"', 7, "unknown protocol 'dgm'"),
        ('"dmg"', '"domainbed"', 8, "epochs belong to DMG's protocol"),
        ("epochs = 3", "epochs = 3\nsteps = 4", 8, "steps=4 and epochs=3 both say"),
        ("epochs = 3", 'epochs = 3\nsampler = "pooled"', 9, "the sampler pooled belongs to"),
        (
            "epochs = 3",
            "epochs = 3\ndomainbed_compat = true",
            9,
            "domainbed_compat belongs to DomainBed's",
        ),
        ("epochs = 3", "", 1, "steps is missing"),
        ("epochs = 3", "epochs = 0", 8, "epochs must be greater than or equal to 1"),
        (
            "epochs = 3",
            'epochs = 3\n[search]\nrule = "oracle"',
            10,
            "the rule oracle is DomainBed's",
        ),
    ],
)
def test_a_study_that_mixes_protocols_is_refused_with_its_line(
    tmp_path, right, wrong, line, message
):
    path = tmp_path / "mine.toml"
    path.write_text(STUDY.replace(right, wrong))
    with pytest.raises(HmoeError) as said:
        check_study(path)
    assert f"line {line}: " in str(said.value)
    assert message in str(said.value)


def test_a_study_finds_lists_beside_itself_and_names_the_line_where_there_are_none(
    lists, tmp_path, own_names
):
    (tmp_path / "mine.toml").write_text(STUDY + 'splits = "nowhere"\n')
    check_study(tmp_path / "mine.toml")  # lists are data: they need not be here
    with pytest.raises(HmoeError, match="line 9: the folder of lists .*nowhere cannot be read"):
        study_configs(tmp_path / "mine.toml")
    (tmp_path / "mine.toml").write_text(STUDY + 'splits = "lists"\n')
    with pytest.raises(HmoeError, match="DigitDomainsTiny is made of tensors"):
        study_configs(tmp_path / "mine.toml")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    "A run of each protocol."
    store = RunStore(tmp_path_factory.mktemp("two"))
    plain = make_config(
        "ERM", "DigitDomainsTiny", ["sketch"], 1, network="small_cnn", steps=3, evaluate="all"
    )
    return run(plain, store), run(spec_of(evaluate="all"), store)


def test_no_table_has_both(two, tmp_path):
    plain, by_dmg = two
    for make in (run_results, accuracy_table, rule_of):
        with pytest.raises(HmoeError, match="followed two protocols.* Fix: a table for each"):
            make(frame_of([plain, by_dmg]))
        if make is not rule_of:
            make(frame_of([by_dmg])), make(frame_of([plain]))
    assert rule_of(frame_of([by_dmg])) == DMG_RULE
    assert "protocol: DMG's" in header("quick", frame_of([by_dmg]))
    assert "DMG" not in header("quick", frame_of([plain]))


def test_selection_and_export_keep_them_apart(two, tmp_path):
    plain, by_dmg = two
    with pytest.raises(HmoeError, match="followed two protocols"):
        select_model([plain, by_dmg], "sketch")
    assert select_model([by_dmg], "sketch")["run_id"] == by_dmg["run_id"]
    for rule in ("oracle", "leave-one-domain-out"):
        with pytest.raises(HmoeError, match=f"the rule {rule} is DomainBed's"):
            select_model([by_dmg], "sketch", rule)
    with pytest.raises(HmoeError, match="followed DMG's protocol, and DomainBed's scripts"):
        export_domainbed([plain, by_dmg], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export_domainbed([plain], tmp_path / "out")


def test_times_of_one_protocol_say_nothing_about_the_other(two):
    plain, by_dmg = two
    alike = spec_of(epochs=7, evaluate="all")
    seconds, _ = estimate(alike, measured_kinds([plain, by_dmg]))
    assert seconds == pytest.approx(by_dmg["wall_time_s"] / by_dmg["config"]["steps"] * alike.steps)
    assert estimate(alike, measured_kinds([plain])) is None


def test_a_repeated_run_has_the_same_record(two, tmp_path):
    assert outcome(run(spec_of(evaluate="all"), RunStore(tmp_path))) == outcome(two[1])


def test_description_counts_epochs():
    cut = {"a": {"in": range(70), "out": range(5)}, "t": {"in": range(9)}}
    run = SimpleNamespace(steps=3, test_domains=["t"], splits="abc")
    said = DMGProtocol(run).record(cut, 64)["protocol"]
    assert (said["updates_per_epoch"], said["epochs"], said["splits"]) == (2, 1.5, "lists abc")
    assert said["images"] == {"a": {"in": 70, "out": 5}, "t": {"in": 9}}


def test_algorithms_of_the_field_train_by_it():
    "Batches may lack a domain; those that look at each domain alone need it in every batch."
    for name in ("Aggregate", "Multi-Headed", "HMOE-DN"):
        assert get_algorithm(name)
        one = trainer(name, epochs=1)
        train(one, one.config.steps)
        assert len(one.checkpoints) == 1
