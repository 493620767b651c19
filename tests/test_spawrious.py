"""Spawrious' six data sets, on a folder of 20 images for each location and breed whose colour says
where they are, against the lists of the paper."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from commands import hmoe
from PIL import Image
from trees import places_tree, put

from hmoe_repro.core.devices import import_torchvision
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.benchmarks import KNOWN, known_state, read_known
from hmoe_repro.data.registry import DATASETS
from hmoe_repro.data.transforms import MEAN, STD
from hmoe_repro.data.verify import findings, verify_dataset
from hmoe_repro.studies.domainbed_export import DOMAINBED_DATASETS

LOCATIONS = ("beach", "desert", "dirt", "jungle", "mountain", "snow")
BREEDS = ("bulldog", "dachshund", "labrador", "corgi")  # in the order of the lists below
LEVELS = {  # locations of the breeds in training and in the test domain; of all breeds in training
    "SpawriousO2O_easy": ("desert jungle dirt snow", "dirt snow desert jungle", "beach"),
    "SpawriousO2O_medium": ("mountain beach dirt jungle", "jungle dirt beach snow", "desert"),
    "SpawriousO2O_hard": ("jungle mountain snow desert", "mountain snow desert jungle", "beach"),
    "SpawriousM2M_easy": ("desert mountain dirt jungle", "dirt jungle mountain desert", ""),
    "SpawriousM2M_medium": ("beach snow mountain desert", "desert mountain beach snow", ""),
    "SpawriousM2M_hard": ("dirt jungle snow beach", "snow beach dirt jungle", ""),
}
PER_FOLDER = 20
SMALL = {0: 0, 3168: 20, 3072: 19, 96: 1, 2756: 17, 412: 3}  # as many of 20 images
COLOURS = {place: (40 * i, 250 - 40 * i, 90) for i, place in enumerate(LOCATIONS)}


def expected(name, total):
    """(domain, breed, folder) -> how many images, by the words of the paper and of DomainBed."""
    group, test, filler = LEVELS[name]
    group, test, counts = group.split(), test.split(), {}
    for k, breed in enumerate(BREEDS):
        if filler:
            for i, share in enumerate((0.97, 0.87)):
                domain, first = f"SC_group_{i + 1}", int(share * total)
                counts[domain, breed, f"{i}/{group[k]}/{breed}"] = first
                counts[domain, breed, f"{i}/{filler}/{breed}"] = total - first
                counts["Test", breed, f"{i}/{test[k]}/{breed}"] = total
        else:
            other = (1, 0, 3, 2)[k]  # the other breed of the pair
            counts["SC_group_1", breed, f"0/{group[k]}/{breed}"] = total
            counts["SC_group_2", breed, f"0/{group[other]}/{breed}"] = total
            counts["Test", breed, f"0/{test[k]}/{breed}"] = total
            counts["Test", breed, f"0/{test[other]}/{breed}"] = total
    return counts


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "A data folder with all of Spawrious, of 20 images for each location and breed."
    data = tmp_path_factory.mktemp("data")
    for half, place, breed in product("01", LOCATIONS, BREEDS):
        folder = data / "spawrious224" / half / place / breed
        folder.mkdir(parents=True)
        for k in range(PER_FOLDER):
            Image.new("RGB", (12, 12), COLOURS[place]).save(folder / f"{k}.png")
        put(folder / "._0.png", b"of a Macintosh")
    return data


@pytest.fixture
def small(monkeypatch):
    "The data sets take of 20 images a folder what they take of 3,168."
    for name in LEVELS:
        columns = tuple((domain, SMALL[n]) for domain, n in KNOWN[name].columns)
        monkeypatch.setitem(KNOWN, name, replace(KNOWN[name], columns=columns))


def test_the_table_says_what_the_paper_says():
    for name in LEVELS:
        known, counts = KNOWN[name], Counter()
        for (domain, first), breed in product(known.columns, known.places):
            counts[domain, breed] += first or 3168
        by_rule = Counter()
        for (domain, breed, _), n in expected(name, 3168).items():
            by_rule[domain, breed] += n
        assert counts == by_rule
        for domain, of_class in known.class_counts.items():
            assert of_class == tuple(counts[domain, breed] for breed in known.classes)
        assert known.copies == {"the authors' copy": (25_344, 12_672, 12_672)}
        assert DATASETS[name].domain_names == ("Test", "SC_group_1", "SC_group_2")
        assert known.classes == ("bulldog", "corgi", "dachshund", "labrador")
        assert DOMAINBED_DATASETS[name] == 3
    assert [name for name in KNOWN if name.startswith("Spawrious")] == list(LEVELS)


@pytest.mark.parametrize("name", LEVELS)
def test_every_breed_is_where_the_paper_says(name, whole, small):
    tree = read_known(name, whole)
    assert tree.domain_names == ["Test", "SC_group_1", "SC_group_2"]
    assert tree.class_names == ["bulldog", "corgi", "dachshund", "labrador"]
    found = {}
    for domain, files, labels in zip(tree.domain_names, tree.files, tree.labels):
        for file, label in zip(files, labels.tolist()):
            folder, _, image = file.rpartition("/")
            assert folder.endswith(tree.class_names[label])
            found.setdefault((domain, tree.class_names[label], folder), []).append(image)
    assert {key: len(images) for key, images in found.items()} == expected(name, PER_FOLDER)
    in_order = sorted(f"{k}.png" for k in range(PER_FOLDER))
    assert in_order[1:3] == ["1.png", "10.png"], "by name, not by number"
    assert all(images == in_order[: len(images)] for images in found.values())
    assert len(set(tree.flat)) == len(tree) == 16 * PER_FOLDER, "an image in two domains"
    assert [len(files) for files in tree.files] == [160, 80, 80]
    test = LEVELS[name][1].split()
    order = test + (test if "O2O" in name else [test[k] for k in (1, 0, 3, 2)])
    seen = [file.split("/")[1:3] for file in tree.files[0][::PER_FOLDER]]
    assert seen == [[place, breed] for place, breed in zip(order, BREEDS * 2)], "DomainBed's order"
    if "O2O" in name:
        halves = [{file[0] for file in files} for files in tree.files]
        assert halves == [{"0", "1"}, {"0"}, {"1"}]


def test_names_alone_are_read(tmp_path):
    places_tree(tmp_path / "spawrious224", KNOWN["SpawriousM2M_easy"].parts, 1)
    for file in (tmp_path / "spawrious224").rglob("*.png"):
        file.write_bytes(b"no image")
    tree = read_known("SpawriousM2M_easy", tmp_path)
    assert [len(files) for files in tree.files] == [8, 4, 4]
    assert len(findings(verify_dataset("SpawriousM2M_easy", tmp_path), 99)) > 16


def test_a_missing_folder_is_named_with_the_fix(whole, small, tmp_path):
    with pytest.raises(HmoeError, match="spawrious224.*hmoe data download SpawriousO2O_hard"):
        read_known("SpawriousO2O_hard", tmp_path)
    assert known_state("SpawriousO2O_hard", tmp_path) == "missing"
    root = tmp_path / "spawrious224"
    places_tree(root, KNOWN["SpawriousM2M_hard"].parts)
    assert known_state("SpawriousM2M_hard", tmp_path) == "here"
    state = known_state("SpawriousO2O_hard", tmp_path)
    assert state.startswith("incomplete: lacks 0/desert/corgi")
    with pytest.raises(HmoeError) as caught:
        read_known("SpawriousO2O_hard", tmp_path)
    assert "SpawriousO2O_hard lacks 0/desert/corgi" in str(caught.value)
    assert "restore what is missing" in str(caught.value)
    for file in (root / "0/snow/corgi").iterdir():
        file.unlink()
    report = verify_dataset("SpawriousM2M_hard", tmp_path)
    assert report.missing == ["0/snow/corgi"]
    for file in root.rglob("*.png"):
        file.unlink()
    assert len(verify_dataset("SpawriousM2M_hard", tmp_path).missing) == 16


def test_an_image_is_cached_once_and_shows_its_location(whole, small, tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_CACHE", str(tmp_path))
    with pytest.warns(
        UserWarning, match="SpawriousO2O_easy has 320 images here, known versions have 50,688"
    ):
        data = DATASETS["SpawriousO2O_easy"].build(0, str(whole))
    cached = data.with_options(8, {"source": "cache"})
    assert len(cached.cache) == 16 * PER_FOLDER
    for position, (files, labels) in enumerate(zip(data.tree.files, data.labels)):
        pictures = cached.pictures(position, torch.arange(len(files)))
        for file, picture in zip(files, pictures):
            assert tuple(picture[:, 4, 4].tolist()) == COLOURS[file.split("/")[1]]
        assert torch.bincount(labels).tolist() == [len(files) // 4] * 4


def test_training_images_are_not_cropped(tmp_path):
    places_tree(tmp_path / "spawrious224", KNOWN["SpawriousM2M_easy"].parts, 1)
    with pytest.warns(UserWarning, match="images here"):
        data = DATASETS["SpawriousM2M_easy"].build(0, str(tmp_path)).with_options(24)
    T = import_torchvision().transforms
    theirs = T.Compose(
        [
            T.Resize((24, 24)),
            T.RandomHorizontalFlip(),
            T.ColorJitter(0.3, 0.3, 0.3, 0.3),
            T.RandomGrayscale(0.1),
            T.ToTensor(),
            T.Normalize(MEAN, STD),
        ]
    )
    image = Image.open(data.tree.root / data.tree.files[1][2]).convert("RGB")
    for seed in range(8):
        x = data.inputs(1, torch.tensor([2]), seeds=torch.tensor([seed]))
        torch.manual_seed(seed)
        assert torch.equal(x[0], theirs(image))


STUDY = """
title = "Backgrounds"
algorithms = ["ERM"]
datasets = ["SpawriousM2M_hard"]
test_domains = ["Test"]
seeds = 1
steps = 3
network = "image_cnn"
resolution = 16
"""


def test_commands_know_it(whole, small, tmp_path):
    given = {"folder": tmp_path, "HMOE_DATA": str(whole), "HMOE_CACHE": str(tmp_path / "cache")}
    said = hmoe("data", "verify", "SpawriousO2O_medium", **given)
    total = next(line for line in said.stdout.splitlines() if line.startswith("total"))
    assert total.split() == ["total", "160", "80", "80", "320"]
    assert "note: SC_group_2/corgi: 20 images instead of 3,168" in said.stdout
    assert "SpawriousO2O_medium: every image can be read" in said.stdout
    (tmp_path / "backgrounds.toml").write_text(STUDY)
    said = hmoe("plan", "backgrounds.toml", **given)
    assert said.returncode == 0, said.stderr
    assert "backgrounds.toml  1     1 " in said.stdout, said.stderr
    train = "train --algorithm ERM --dataset SpawriousM2M_hard --test-domain Test --device cpu"
    train += " --network image_cnn --resolution 16 --steps 3 --set batch_size=4"
    said = hmoe(*train.split(), **given)
    assert said.returncode == 0, said.stderr
    assert "Test" in said.stdout
