"""Metadata and ids of images: they arrive with their image in every loader and at every step, come
from every form of a user's data, and mistakes in them are refused."""

import copy
import inspect
import pickle
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from hmoe_repro.algorithms import get_algorithm
from hmoe_repro.algorithms.averaging import SWAD, wrapped
from hmoe_repro.algorithms.base import ERM, HParam, concatenate
from hmoe_repro.algorithms.conformance import check_algorithm, random_batches
from hmoe_repro.algorithms.domainbed_adapter import DomainBedAlgorithm
from hmoe_repro.algorithms.robustness import GroupDRO
from hmoe_repro.apps.compare import compare
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.metadata import Metadata, Minibatch, as_column, describe_samples
from hmoe_repro.data.base import MultiDomainDataset, as_dataset
from hmoe_repro.data.image_folder import scan_tree
from hmoe_repro.data.loader import ImageDataset
from hmoe_repro.data.precomputed import PrecomputedDataset
from hmoe_repro.data.registry import (
    find_dataset,
    keep_data,
    kept_data,
    load_dataset,
    register_dataset,
)
from hmoe_repro.training.model import load_model
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.protocols import EpochSampler, Sampler, make_batch, make_splits
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore, outcome
from hmoe_repro.training.trainer import Batches, Trainer

DOMAINS = ["a", "b", "c"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch, own_names):
    for name in ("runs", "cache"):
        monkeypatch.setenv(f"HMOE_{name.upper()}", str(tmp_path / name))
    return tmp_path


def coded(domain, count):
    "Images whose first pixel is their number and whose second is their domain, and their metadata."
    x = torch.zeros(count, 3, 16, 16, dtype=torch.uint8)
    x[:, 0, 0, 0] = torch.arange(count)
    x[:, 0, 0, 1] = DOMAINS.index(domain)
    y = torch.arange(count) % 2
    number = torch.arange(count)
    meta = {
        "number": number,
        "pair": torch.stack([number, -number], 1).float(),
        "word": [f"{domain} {i}" for i in range(count)],
        "group": (number // 2) % 2,
    }
    return x, y, meta


def coded_sources():
    return {domain: coded(domain, 20 + 5 * i) for i, domain in enumerate(DOMAINS)}


def coded_data():
    return as_dataset(coded_sources())


class Grouped(ERM):
    "GroupDRO whose groups are the values of a key, 0 or 1."

    needs_meta = ("group",)
    HPARAMS = ERM.HPARAMS | {"eta": HParam(0.1, "step size of the weights", min=0)}

    def __init__(self, input_shape, num_classes, num_domains, hparams=None):
        super().__init__(input_shape, num_classes, num_domains, hparams)
        self.register_buffer("q", torch.full((2,), 0.5))

    def loss(self, minibatches):
        x, y = concatenate(minibatches)
        group = F.one_hot(torch.cat([batch.meta["group"] for batch in minibatches]), 2).float()
        losses = F.cross_entropy(self.predict(x), y, reduction="none")
        risks = losses @ group / group.sum(0).clamp(min=1)
        self.q.copy_(torch.softmax(self.q.log() + self.hparams["eta"] * risks.detach(), 0))
        return {"loss": self.q @ risks}


class Curious(ERM):
    "Reads a key without declaring it."

    def loss(self, minibatches):
        [batch.meta["undeclared"] for batch in minibatches]
        return super().loss(minibatches)


def check_coded(batch, domain):
    "Compare metadata and ids of a minibatch with what its pixels say."
    x, y = batch
    pixels = (255 * x[:, 0, 0]).round().long()
    number = pixels[:, 0]
    assert pixels[:, 1].unique().tolist() in ([DOMAINS.index(domain)], [])
    assert batch.meta["number"].tolist() == number.tolist()
    assert torch.equal(batch.meta["pair"], torch.stack([number, -number], 1).float())
    assert batch.meta["word"] == [f"{domain} {i}" for i in number.tolist()]
    assert batch.ids == [f"{domain}/{i}" for i in number.tolist()]
    assert y.tolist() == [i % 2 for i in number.tolist()]
    return number.tolist()


# Which metadata arrive with which image


@pytest.mark.parametrize("make", ["replacement", "pooled", "epochs"])
def test_metadata_arrive_with_their_image_over_many_steps(make):
    data = coded_data()
    domains = ["c", "a"]
    splits = [torch.arange(3, 25), torch.arange(18).flip(0)]
    samplers = {
        "replacement": lambda: Sampler(splits, 8, seed=1),
        "pooled": lambda: Sampler(splits, 8, seed=1, pooled=True),
        "epochs": lambda: EpochSampler(splits, 16, seed=1),
    }
    batches = Batches(data, domains, samplers[make](), "cpu")
    seen = {domain: [] for domain in domains}
    for _ in range(5):
        for domain, batch in zip(domains, batches.next(), strict=True):
            seen[domain] += check_coded(batch, domain)
    assert len(set(map(tuple, seen.values()))) == 2
    if make == "epochs":  # 40 images in batches of 16: three updates show each image once
        assert sorted(seen["c"])[:2] == [3, 3]
        assert set(seen["c"]) == set(range(3, 25))


def test_the_trainer_gives_them_to_loss_and_to_validation():
    seen = []

    class Watching(ERM):
        def loss(self, minibatches):
            assert all(type(batch) is Minibatch for batch in minibatches)
            seen.append([check_coded(b, d) for b, d in zip(minibatches, ["a", "c"], strict=True)])
            return super().loss(minibatches)

    data = coded_data()
    register_dataset("coded", domain_names=tuple(DOMAINS), summary="-")(lambda seed, folder: data)
    config = make_config(
        "ERM", "coded", ["b"], hparams={"batch_size": 4}, network="small_cnn", steps=3
    )
    trainer = Trainer(config, data, "cpu")
    trainer.algorithm = Watching(data.input_shape, 2, 2, {"network": "small_cnn", "batch_size": 4})
    for _ in range(3):
        trainer.update()
        drawn = [part.tolist() for part in trainer.batches.drawn]
        assert seen[-1] == drawn
    out = trainer.splits["a"]["out"].tolist()
    assert [
        i for b in trainer.evaluation.validation_batches("a") for i in check_coded(b, "a")
    ] == out


def write_folder(root, count=6):
    "Grey images of one value each, and a table that has the value and a text for each."
    rows = []
    for d, domain in enumerate(DOMAINS):
        for label in ("cat", "dog"):
            (root / domain / label).mkdir(parents=True)
            for i in range(count):
                value = 80 * d + 30 * (label == "dog") + 4 * i
                file = f"{domain}/{label}/{i}.png"
                Image.new("RGB", (24, 24), (value,) * 3).save(root / file)
                rows.append({"file_name": file, "value": value, "place": f"at {file}"})
    table = pd.DataFrame(rows).sample(frac=1, random_state=0)
    table.to_csv(root / "metadata.csv", index=False)
    return table


class Mean(nn.Module):
    key = "mean"
    shape = (1,)

    def forward(self, x):
        return x.mean((1, 2, 3))[:, None]


def value_of(x):
    "The grey value of normalised images."
    mean, std = 0.485, 0.229
    return (255 * (x[:, 0, 0, 0] * std + mean)).round().long().tolist()


@pytest.mark.parametrize(
    "options, workers",
    [({}, 0), ({}, 2), ({"source": "cache"}, 0), ({"data_augmentation": True}, 0)],
)
def test_metadata_of_image_files_arrive_with_their_image(place, options, workers):
    write_folder(place / "pictures")
    tree = scan_tree(place / "pictures")
    data = ImageDataset(tree, 16, {"data_augmentation": False} | options, workers=workers)
    splits = [torch.arange(12), torch.tensor([11, 2, 5])]
    batches = Batches(data, ["c", "a"], Sampler(splits, 5, seed=3), "cpu")
    for _ in range(4):
        minibatches = batches.next()
        for batch, domain, drawn in zip(minibatches, ["c", "a"], batches.drawn, strict=True):
            x, y = batch
            files = [tree.files[DOMAINS.index(domain)][i] for i in drawn.tolist()]
            assert batch.ids == files
            assert batch.meta["place"] == [f"at {file}" for file in files]
            assert y.tolist() == [int("dog" in file) for file in files]
            if not data.augmented:
                assert value_of(x) == batch.meta["value"].tolist()


def test_precomputed_features_keep_metadata_and_ids(place):
    write_folder(place / "pictures")
    images = ImageDataset(scan_tree(place / "pictures"), 16, {"data_augmentation": False})
    data = PrecomputedDataset(images, [Mean()])
    chosen = [torch.tensor([7, 0, 11]), torch.tensor([1])]
    for batch, domain, indices in zip(make_batch(data, ["b", "a"], chosen), "ba", chosen):
        assert batch.x.shape == (len(indices), 1)
        expected = make_batch(images, [domain], [indices])[0]
        assert batch.meta["value"].tolist() == expected.meta["value"].tolist()
        assert batch.ids == expected.ids
        torch.testing.assert_close(batch.x, Mean()(expected.x), atol=2e-3, rtol=0)  # float16


def test_left_out_files_take_their_metadata_along(place):
    table = write_folder(place / "pictures").set_index("file_name")
    (place / "pictures/b/cat/0.png").write_bytes(b"no image")
    data = ImageDataset(scan_tree(place / "pictures"), 16, {"unreadable": "skip"})
    with pytest.warns(UserWarning, match="cannot be read"):
        samples = describe_samples(data, "b")
    assert len(samples.ids) == 11
    assert samples.ids[0] == "b/cat/1.png"
    assert samples.columns["value"].tolist() == table.value[samples.ids].tolist()


def test_reduced_images_keep_their_metadata():
    data = coded_data()
    small = data.with_options(resolution=8)
    assert small.meta["word"] == data.meta["word"]
    assert describe_samples(small, "b").ids[24] == "b/24"


def test_samples_of_a_part_of_a_split():
    data = load_dataset("CrossedDigits")
    domain = data.domain_names[1]
    part = make_splits(data, 3)[domain]["out"]
    samples = describe_samples(data, domain, part)
    assert samples.ids == [f"{domain}/{i}" for i in part.tolist()]
    assert samples.columns.keys() == data.factors.keys()
    assert torch.equal(samples.columns["hue"], data.factors["hue"][1][part])
    named = replace(data, meta={"hue": [["x"] * len(y) for y in data.labels]})
    assert describe_samples(named, domain, part).columns["hue"] == ["x"] * len(part)


# A batch is a pair


def test_a_minibatch_is_a_pair_with_attributes():
    x, y = torch.rand(2, 3, 4, 4), torch.tensor([0, 1])
    calls = []

    def ids():
        calls.append(1)
        return ["a/0", "a/1"]

    batch = Minibatch(x, y, {"w": torch.ones(2)}, ids)
    assert isinstance(batch, tuple)
    assert len(batch) == 2
    first, second = batch
    assert first is x is batch.x is batch[0]
    assert second is y is batch.y
    xs, ys = zip(*[batch, (x, y)])
    assert xs == (x, x)
    assert not calls, "ids are formed although nobody reads them"
    assert batch.ids == batch.ids == ["a/0", "a/1"]
    assert len(calls) == 1
    for same in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert torch.equal(same.x, x)
        assert same.ids == ["a/0", "a/1"]
        assert torch.equal(same.meta["w"], torch.ones(2))
    assert Minibatch(x, y).ids is None


def test_metadata_are_looked_up_once_and_only_if_read():
    class Counted(dict):
        reads = 0

        def __getitem__(self, key):
            self.reads += 1
            return super().__getitem__(key)

    columns = Counted(w=torch.arange(5), t=list("abcde"))
    meta = Metadata(columns, torch.tensor([3, 0]), "cpu", "mine")
    assert set(meta) == {"w", "t"}
    assert len(meta) == 2
    assert "w" in meta
    assert columns.reads <= 1
    assert meta["w"].tolist() == [3, 0]
    assert meta["t"] == ["d", "a"]
    reads = columns.reads
    assert meta["w"] is meta["w"]
    assert columns.reads == reads
    assert meta.get("no") is None
    assert "no" not in meta
    with pytest.raises(HmoeError, match="mine has no metadata 'no'.*Valid: w, t"):
        meta["no"]


def test_tensors_are_moved_to_the_device_of_the_batch():
    columns = {"w": torch.arange(5), "t": list("abcde")}
    assert Metadata(columns, torch.tensor([1]), "meta")["w"].device.type == "meta"
    moved = coded_data().to("meta")
    assert {column.device.type for column in moved.meta["pair"]} == {"meta"}
    assert moved.meta["word"] == coded_data().meta["word"]
    assert moved.fingerprint == coded_data().fingerprint


def test_an_update_takes_triples_and_pairs():
    x, y = torch.rand(6, 3, 16, 16), torch.arange(6) % 2
    group = torch.tensor([0, 1, 1, 0, 1, 1])
    algorithm = Grouped((3, 16, 16), 2, 2, {"network": "small_cnn", "eta": 0.5})
    with torch.no_grad():
        losses = F.cross_entropy(
            algorithm.predict(torch.cat([x, x])), y.repeat(2), reduction="none"
        )
    both = group.repeat(2)
    risks = torch.stack([losses[both == g].mean() for g in (0, 1)])
    q = 0.5 * torch.exp(0.5 * risks)
    q = q / q.sum()
    reported = algorithm.update([(x, y, {"group": group}), (x, y, {"group": group})])
    assert reported["loss"] == pytest.approx((q @ risks).item(), abs=1e-5)
    torch.testing.assert_close(algorithm.q, q)
    with pytest.raises(HmoeError, match="no metadata 'group'"):
        algorithm.update([(x, y), (x, y)])
    with pytest.raises(HmoeError, match="a minibatch has 3 parts .*Tensor, Tensor, list"):
        algorithm.update([(x, y, [1])])
    with pytest.raises(HmoeError, match="a minibatch has 4 parts"):
        algorithm.update([(x, y, {}, {})])


@pytest.mark.parametrize("name", ["ERM", "GroupDRO", "Mixup", "HMOE-DN", "SMA-ERM", "MLDG"])
def test_updates_of_other_algorithms_do_not_depend_on_metadata(name):
    def trained(minibatches):
        torch.manual_seed(0)
        np.random.seed(0)
        algorithm = get_algorithm(name)((3, 16, 16), 2, 2, {"network": "small_cnn"})
        for _ in range(2):
            algorithm.update(minibatches)
        return algorithm.state_dict()

    pairs = [(torch.rand(6, 3, 16, 16), torch.arange(6) % 2) for _ in range(2)]
    with_meta = [Minibatch(x, y, {"group": y}, ["?"] * 6) for x, y in pairs]
    plain, other = trained(pairs), trained(with_meta)
    assert all(torch.equal(plain[key], other[key]) for key in plain)


class Theirs(nn.Module):
    "A class in DomainBed's style."

    def __init__(self, input_shape, num_classes, num_domains, hparams):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, num_classes))
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)

    def update(self, minibatches, unlabeled=None):
        all_x = torch.cat([x for x, y in minibatches])
        all_y = torch.cat([y for x, y in minibatches])
        loss = F.cross_entropy(self.predict(all_x), all_y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        told = minibatches[0].meta["word"][0] if minibatches[0].meta else ""
        return {"loss": loss.item(), "told": float(len(told))}

    def predict(self, x):
        return self.net(x)


def test_classes_of_domainbed_unpack_pairs_and_may_read_metadata():
    cls = type("Adapted", (DomainBedAlgorithm,), {"source": Theirs, "name": "Adapted"})
    data = coded_data()
    batches = make_batch(data, ["a", "c"], [torch.arange(4), torch.arange(9, 12)])
    algorithm = cls(data.input_shape, 2, 2, {"network": "small_cnn"})
    assert algorithm.update(batches)["told"] == len("a 0")
    assert algorithm.update([tuple(batch) for batch in batches])["told"] == 0


# Every form of a user's data


class Listed(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def items(domain, kind):
    x, y, meta = coded(domain, 12)
    made = []
    for i in range(len(y)):
        metadata = {key: values[i] for key, values in meta.items()}
        metadata["number"] = int(metadata["number"])
        if kind == "dictionaries":
            made.append({"label": int(y[i]), "image": x[i]} | metadata)
        else:
            made.append((x[i], y[i], metadata))
    return Listed(made)


@pytest.mark.parametrize("kind", ["dictionaries", "triples"])
def test_datasets_of_dictionaries_and_triples_are_the_tensors(kind):
    given = {domain: coded(domain, 12) for domain in DOMAINS}
    from_items = as_dataset({domain: items(domain, kind) for domain in DOMAINS})
    from_tensors = as_dataset(given)
    assert from_items.fingerprint == from_tensors.fingerprint
    for key, columns in from_tensors.meta.items():
        for column, other in zip(columns, from_items.meta[key], strict=True):
            assert column == other if isinstance(column, list) else torch.equal(column, other)
    pairs = as_dataset({domain: (x, y) for domain, (x, y, _) in given.items()})
    assert pairs.meta == {}
    assert pairs.fingerprint != from_tensors.fingerprint


def test_values_may_be_arrays_columns_and_lists():
    where = "here"
    for values in ([1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), pd.Series([1, 2, 3])):
        assert as_column(values, where).tolist() == [1, 2, 3]
    for values in (["u", "v"], ("u", "v"), np.array(["u", "v"]), pd.Series(["u", "v"])):
        assert as_column(values, where) == ["u", "v"]
    assert as_column([torch.ones(2), np.zeros(2)], where).tolist() == [[1, 1], [0, 0]]
    assert as_column([True, False], where).dtype == torch.bool
    assert as_column([torch.ones(1, requires_grad=True)], where).requires_grad is False


def test_every_value_is_in_the_fingerprint():
    data = coded_data()
    assert coded_data().fingerprint == data.fingerprint
    prints = {data.fingerprint}
    for key, value in (("number", 99), ("pair", torch.zeros(2)), ("word", "?")):
        sources = coded_sources()
        sources["b"][2][key][3] = value
        prints.add(as_dataset(sources).fingerprint)
    sources = coded_sources()
    for _, _, meta in sources.values():
        meta["digit"] = meta.pop("number")
    prints.add(as_dataset(sources).fingerprint)
    assert len(prints) == 5


def test_kept_data_have_their_metadata():
    data = coded_data()
    keep_data(data)
    back = kept_data(data.fingerprint)
    assert back.fingerprint == data.fingerprint
    assert list(back.meta) == list(data.meta)
    assert back.meta["word"] == data.meta["word"]
    assert back.meta["pair"][2].dtype == torch.float32


FUNCTION = """
import torch

def Mine(trial_seed):
    x = torch.rand(12, 3, 8, 8, generator=torch.Generator().manual_seed(trial_seed))
    y = torch.arange(12) % 2
    return {d: (x / n, y, {"who": [d] * 12}) for n, d in enumerate(("u", "v"), 1)}
"""


def test_a_function_in_a_file_may_return_tensors_with_metadata(place):
    (place / "mine.py").write_text(FUNCTION)
    name = find_dataset(str(place / "mine.py:Mine"))
    data = load_dataset(name, trial_seed=2)
    assert name == data.name == "Mine"
    assert data.meta["who"] == [["u"] * 12, ["v"] * 12]


def test_metadata_of_a_folder_are_in_its_fingerprint_and_any_order_of_rows_is_the_same(place):
    root = place / "pictures"
    table = write_folder(root)
    first = ImageDataset(scan_tree(root))
    table.sort_values("value").to_csv(root / "metadata.csv", index=False)
    assert ImageDataset(scan_tree(root)).fingerprint == first.fingerprint
    table.assign(value=table.value + 1).to_csv(root / "metadata.csv", index=False)
    assert ImageDataset(scan_tree(root)).fingerprint != first.fingerprint
    (root / "metadata.csv").unlink()
    bare = ImageDataset(scan_tree(root))
    assert bare.meta == {}
    table.rename(columns={"file_name": "file"}).to_csv(root / "metadata.csv", index=False)
    unnamed = scan_tree(root)  # a table without `file_name` stays a file that is left out
    assert "metadata.csv" in " ".join(unnamed.notes)
    assert ImageDataset(unnamed).fingerprint == bare.fingerprint


# Runs


def grouped_config(place):
    data = coded_data()
    register_dataset("coded", domain_names=tuple(DOMAINS), summary="-")(lambda seed, folder: data)
    imports = (
        "import torch\nimport torch.nn.functional as F\n"
        "from hmoe_repro.algorithms.base import ERM, HParam, concatenate\n\n"
    )
    file = place / "grouped.py"
    file.write_text(imports + inspect.getsource(Grouped))
    return make_config(
        f"{file}:Grouped",
        "coded",
        ["b"],
        hparams={"batch_size": 4},
        network="small_cnn",
        steps=12,
        checkpoint_frequency=5,
    )


def test_a_killed_run_that_reads_metadata_resumes_bitwise(place):
    config = grouped_config(place)
    whole, parts = RunStore(place / "whole"), RunStore(place / "parts")
    record = run(config, whole)
    assert record["status"] == "complete", record["reason"]

    def stop(step, steps):
        if step == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, parts, on_step=stop)
    resumed = run(config, parts)
    assert resumed["resumed"]
    assert outcome(resumed) == outcome(record)
    states = [load_model(config.run_id, store=store)[0].state_dict() for store in (whole, parts)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert states[0]["q"].tolist() != [0.5, 0.5]


def test_compare_trains_on_dictionaries_with_metadata():
    sets = {domain: items(domain, "dictionaries") for domain in DOMAINS}
    short = {"seeds": 1, "steps": 2, "hparams": {"batch_size": 4}, "jobs": 1, "device": "cpu"}
    compared = compare(["ERM", Grouped], sets, test_domains=["b"], **short)
    assert compared.frame.status.tolist() == ["complete"] * 2


# What is refused


def test_an_algorithm_whose_key_is_lacking_is_refused_before_training(place):
    with pytest.raises(
        HmoeError, match="Grouped.* reads the metadata 'group', which Digit"
    ) as caught:
        compare([Grouped], "DigitDomainsTiny", seeds=1, jobs=1)
    assert "group" in caught.value.fix
    assert not RunStore().scan()[0]
    with pytest.raises(HmoeError, match="'group'.* Valid: who"):
        data = {d: (*coded(d, 12)[:2], {"who": [d] * 12}) for d in DOMAINS}
        compare([Grouped], data, seeds=1, jobs=1)


def test_an_undeclared_key_fails_with_its_name_at_the_first_update():
    data = coded_data()
    algorithm = Curious(data.input_shape, 2, 2, {"network": "small_cnn"})
    batches = make_batch(data, ["a", "b"], [torch.arange(3)] * 2)
    with pytest.raises(
        HmoeError, match="tensors has no metadata 'undeclared'.*Valid: number, pair"
    ):
        algorithm.update(batches)


def test_the_check_covers_metadata():
    check_algorithm(Grouped)
    check_algorithm(Grouped, meta={"group": [1, 0, 1]})
    with pytest.raises(HmoeError, match="undeclared"):
        check_algorithm(Curious)
    check_algorithm(Curious, meta={"undeclared": ["p", "q"]})
    averaged = wrapped(SWAD, Grouped)
    assert averaged.needs_meta == ("group",)
    assert GroupDRO.needs_meta == ()

    class Drifting(Grouped):
        "Counts what it read in a plain attribute, which no state keeps."

        def loss(self, minibatches):
            self.seen = getattr(self, "seen", 0.0) + minibatches[0].meta["group"].float().sum()
            losses = super().loss(minibatches)
            return losses | {"loss": losses["loss"] * (1 + self.seen)}

    with pytest.raises(AssertionError, match="resumed"):
        check_algorithm(Drifting)


def test_random_metadata_change_no_image():
    plain = random_batches(2, (3, 8, 8), 4, seed=5)
    rich = random_batches(2, (3, 8, 8), 4, seed=5, meta={"w": torch.arange(3), "t": ["u", "v"]})
    for (x, y), batch in zip(plain, rich, strict=True):
        assert torch.equal(x, batch.x)
        assert torch.equal(y, batch.y)
        assert len(batch.meta["w"]) == len(batch.meta["t"]) == 8
    values = torch.cat([batch.meta["w"] for batch in rich])
    assert set(values.tolist()) == {0, 1, 2}


X, Y, _ = coded("a", 12)
N = torch.arange(12)
WRONG = [
    ({"w": N[:-1]}, {"w": N}, "'w' of domain 'a' have 11 values for 12 images"),
    ({"w": N}, {"w": ["t"] * 13}, "'w' of domain 'b' have 13 values for 12 images"),
    ({"w": N}, {"w": ["t"] * 12}, "'w' of domain 'b' are texts, those of 'a' int64"),
    ({"w": N}, {"w": N.float()}, "'w' of domain 'b' are float32, those of 'a' int64"),
    ({"w": torch.ones(12, 2)}, {"w": torch.ones(12, 3)}, "'b' are float32 of shape .3,., those of"),
    ({"w": [N[:i] for i in range(12)]}, {"w": N}, "'w' of domain 'a': value 0 has shape .0,."),
    ({"w": [None] * 12}, {"w": N}, "'w' of domain 'a': value 0 is NoneType"),
    ({"w": ["t"] * 11 + [3]}, {"w": N}, "'w' of domain 'a': value 0 is str"),
    ({"w": {"nested": 1}}, {"w": N}, "'w' of domain 'a' is dict"),
    ({"w": 3.0}, {"w": N}, "'w' of domain 'a' is float"),
    ({"w": "twelve texts"}, {"w": N}, "'w' of domain 'a' is str"),
    ({"w": torch.tensor(1)}, {"w": N}, "'w' of domain 'a' is a tensor of torch.int64 of shape"),
    ({"w": N}, {"v": N}, "domain 'a' has the metadata w, and domain 'b' does not"),
    ({}, {"v": N}, "domain 'b' has the metadata v, and domain 'a' does not"),
    ({"label": N}, {"label": N}, "the key 'label', which names the label itself"),
    ({3: N}, {3: N}, "the key 3"),
]


@pytest.mark.parametrize("first, second, said", WRONG)
def test_bad_metadata_name_domain_and_key(first, second, said):
    with pytest.raises(HmoeError, match=said) as caught:
        as_dataset({"a": (X, Y, first), "b": (X // 2, Y, second)})
    assert caught.value.fix


def test_a_data_set_checks_metadata_itself():
    def made(meta):
        return MultiDomainDataset("mine", ["a", "b"], ["0", "1"], [X, X], [Y, Y], meta=meta)

    assert made({"w": [N, N]}).meta["w"][1].tolist() == N.tolist()
    with pytest.raises(HmoeError, match="mine: metadata 'w' do not have values .* 2 domains .a, b"):
        made({"w": [N]})
    with pytest.raises(HmoeError, match="mine: metadata are list"):
        made([N])
    with pytest.raises(HmoeError, match="mine: metadata have the key 'image'"):
        made({"image": [N, N]})


ITEM = {"image": X[0], "label": 0}
BAD_ITEMS = [
    ([ITEM | {"w": 1}, ITEM], "items 0 and 1 .*'a' do not have the same metadata: w, and none"),
    ([{"image": X[0], "target": 0}], "item 0 .*'a' is a dictionary without 'label'"),
    ([(X[0], 0, 5)], "item 0 .*'a' has 3 elements .int after the label"),
    ([(X[0], 0, {}, 1)], "item 0 .*'a' has 4 elements"),
    ([(X[0], 0, {"label": 1})], "item 0 .*'a': metadata have the key 'label'"),
    (
        [ITEM | {"w": N}, ITEM | {"w": N[:3]}],
        "'w' of domain 'a': value 0 has shape .12,., and value",
    ),
    ([ITEM | {"w": b"bytes"}], "'w' of domain 'a': value 0 is bytes"),
]


@pytest.mark.parametrize("wrong, said", BAD_ITEMS)
def test_bad_items_of_a_dataset_are_named(wrong, said):
    with pytest.raises(HmoeError, match=said) as caught:
        as_dataset({"a": Listed(wrong), "b": (X, Y)})
    assert caught.value.fix


def test_bad_tables_of_a_folder_are_named(place):
    root = place / "pictures"
    table = write_folder(root)
    wrong = {
        "no row for 1 image": table.iloc[1:],
        "two rows for": pd.concat([table, table.iloc[:1]]),
        "no place for": table.assign(place=["", *table.place[1:]]),
        "'label', which names": table.rename(columns={"value": "label"}),
    }
    for said, rows in wrong.items():
        rows.to_csv(root / "metadata.csv", index=False)
        with pytest.raises(HmoeError, match=said):
            scan_tree(root)
    more = pd.concat([table, table.iloc[:1].assign(file_name="z/cat/1.png")])
    more.to_csv(root / "metadata.csv", index=False)
    assert "names 1 file that" in " ".join(scan_tree(root).notes)
    (root / "metadata.csv").write_bytes(b"\xff\xfe\x00file_name")
    with pytest.raises(HmoeError, match="metadata.csv cannot be read"):
        scan_tree(root)
