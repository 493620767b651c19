"""Frequencies: transforms against waves that are known and against sums written out, noise that
stays in its ring, tokens that return to their places, and measurements that runs make."""

import json
import math
import re

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
from notebooks import page_functions

from hmoe_repro.analysis.experts import runs_with_choices
from hmoe_repro.analysis.results import frame_of
from hmoe_repro.analysis.spectra import (
    depth_changes,
    measured_runs,
    noise_differences,
    noise_drops,
    noise_rows,
    spectrum_rows,
    untrained_runs,
)
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.transforms import STD
from hmoe_repro.networks.registry import make_featurizer
from hmoe_repro.networks.spectra import (
    BANDS,
    as_map,
    band_mask,
    band_noise,
    bands_of,
    depth_modules,
    feature_spectra,
    log_amplitudes,
    networks_with_depth,
)
from hmoe_repro.report.render import render
from hmoe_repro.studies.studies import read_study, study_configs
from hmoe_repro.training import measurements as measuring
from hmoe_repro.training.measurements import (
    accuracy_with_noise,
    check_measure,
    measure_spectra,
    trained_run,
)
from hmoe_repro.training.model import build_dataset
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore, publish_study
from hmoe_repro.training.trainer import Trainer

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

FOURIER = page_functions("gmoe_fourier")

pytestmark = pytest.mark.usefixtures("warm_kernels")


@pytest.fixture(autouse=True)
def no_figures_left():
    yield
    plt.close("all")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# Spectra


def relative(maps):
    "Log amplitudes relative to frequency 0, mean over images."
    mean = log_amplitudes(maps).mean(0)
    return mean - mean[0]


@pytest.mark.parametrize("side", [8, 7])
def test_amplitudes_are_the_sums_of_the_definition(side):
    maps = torch.randn(2, 3, side, side, generator=generator(), dtype=torch.float64)
    x = torch.arange(side, dtype=torch.float64)
    wanted = []
    for k in range(side // 2 + 1):
        angle = 2 * math.pi * k * (x[:, None] + x) / side
        real, imaginary = (maps * angle.cos()).sum((2, 3)), (maps * angle.sin()).sum((2, 3))
        wanted.append(((real**2 + imaginary**2).sqrt() + 1e-6).log().mean(1))
    found = log_amplitudes(maps)
    assert found.shape == (2, side // 2 + 1)
    assert torch.allclose(found, torch.stack(wanted, 1), atol=1e-4)


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_a_wave_peaks_at_its_frequency_and_nowhere_else(k):
    x = torch.arange(16)
    wave = 1 + torch.cos(2 * math.pi * k * (x[:, None] + x) / 16)[None, None]
    curve = relative(wave)
    expected = 0.0 if k == 8 else math.log(0.5)
    assert math.isclose(curve[k], expected, abs_tol=1e-4)
    others = [value for i, value in enumerate(curve.tolist()) if i not in (0, k)]
    assert max(others) < -10


def test_white_noise_is_flat_but_for_the_ends():
    curve = relative(torch.randn(3000, 2, 12, 12, generator=generator()))
    assert abs(curve[1:-1] - 0.5 * math.log(2)).max() < 0.04
    assert abs(curve[-1]) < 0.04


def test_a_map_of_zeros_has_a_finite_spectrum():
    assert torch.isfinite(log_amplitudes(torch.zeros(1, 1, 4, 4))).all()
    assert log_amplitudes(torch.ones(1, 1, 1, 1)).shape == (1, 1)


# Networks


@pytest.fixture(scope="module")
def networks():
    return {
        "small_vit": make_featurizer("small_vit", (3, 16, 16)).eval(),
        "gmoe_small": make_featurizer("gmoe_small", (3, 16, 16)).eval(),
        "small_cnn": make_featurizer("small_cnn", (3, 16, 16)).eval(),
        "resnet18": make_featurizer("resnet18", (3, 32, 32), weights="random").eval(),
        "resnet50": make_featurizer("resnet50", (3, 32, 32), weights="random").eval(),
    }


def test_the_parts_of_a_network_in_order(networks):
    parts = {name: list(depth_modules(network)) for name, network in networks.items()}
    assert parts["small_vit"] == parts["gmoe_small"] == [f"block {i}" for i in range(6)]
    assert parts["small_cnn"] == [f"layer {i}" for i in range(4)]
    assert parts["resnet18"] == [f"layer{i}.{j}" for i in range(1, 5) for j in range(2)]
    assert len(parts["resnet50"]) == 3 + 4 + 6 + 3
    other = torch.nn.Linear(2, 2)
    assert depth_modules(other) == {}
    assert networks_with_depth(other) == []


def test_tokens_return_to_their_places_without_the_class_token(networks):
    tokens = torch.randn(2, 17, 5, generator=generator())
    maps = as_map(tokens, networks["small_vit"])
    assert maps.shape == (2, 5, 4, 4)
    for row in range(4):
        for column in range(4):
            assert torch.equal(maps[:, :, row, column], tokens[:, 1 + 4 * row + column])
    same = torch.randn(2, 5, 4, 4)
    assert as_map(same, networks["small_cnn"]) is same


def test_the_map_of_a_patch_follows_the_patch(networks):
    """A bright patch of the picture changes the tokens of its own place the most."""
    network, found = networks["small_vit"], []
    hook = network.body.patch_embed.register_forward_hook(
        lambda part, given, out: found.append(as_map(torch.cat([out[:, :1], out], 1), network))
    )
    picture = torch.zeros(1, 3, 16, 16)
    picture[:, :, 4:8, 12:16] = 1  # row 1, column 3
    with torch.no_grad():
        network(torch.zeros(1, 3, 16, 16)), network(picture)
    hook.remove()
    changed = (found[1] - found[0]).abs().sum((0, 1))
    assert changed[1, 3] > 0
    assert changed.sum() == changed[1, 3]


@pytest.mark.parametrize("name", ["small_vit", "small_cnn", "resnet18"])
def test_curves_are_those_of_the_outputs_whatever_the_batches(networks, name):
    network = networks[name]
    side = 32 if name == "resnet18" else 16
    x = torch.rand(5, 3, side, side, generator=generator())
    both = torch.nn.ModuleList([networks["resnet50"], network])  # of which one is used
    found = feature_spectra(both, network, [x[:2], x[2:]])
    assert found["maps"] == ("patches" if name == "small_vit" else "convolutions")
    found = found["curves"]
    wanted, hooks = {}, []
    for part, module in depth_modules(network).items():
        hooks.append(
            module.register_forward_hook(
                lambda m, given, out, part=part: wanted.update({part: as_map(out, network)})
            )
        )
    with torch.no_grad():
        network(x)
    for hook in hooks:
        hook.remove()
    assert list(found) == list(wanted)
    for part, maps in wanted.items():
        again = relative(maps)
        assert torch.allclose(torch.tensor(found[part]).double(), again, atol=1e-3), part
    assert not any(module._forward_hooks for module in depth_modules(network).values())


def test_hooks_are_removed_when_the_network_fails(networks):
    with pytest.raises(ZeroDivisionError):
        feature_spectra(networks["small_cnn"], lambda x: 1 / x, [0])
    assert not any(part._forward_hooks for part in depth_modules(networks["small_cnn"]).values())


# Noise


@pytest.mark.parametrize("band", BANDS)
def test_noise_has_its_energy_in_its_ring_and_the_norm_that_was_asked_for(band):
    noise = band_noise((3, 2, 32, 32), *band, 0.1, generator(1))
    energy = torch.fft.fft2(noise.double()).abs().square()
    k = torch.fft.fftfreq(32, dtype=torch.float64) * 2
    radius = (k[:, None] ** 2 + k**2).sqrt()
    inside = (radius >= band[0]) & (radius < band[1] + (1e-9 if band[1] == 1 else 0))
    assert energy[..., ~inside].sum() < 1e-9 * energy.sum()
    norms = noise.flatten(1).norm(dim=1) / math.sqrt(2 * 32 * 32)
    assert torch.allclose(norms, torch.full((3,), 0.1))
    assert noise.dtype == torch.float32


def test_rings_share_all_waves_up_to_pi():
    masks = torch.stack([band_mask(16, 16, *band) for band in BANDS])
    k = torch.fft.fftfreq(16, dtype=torch.float64) * 2
    inside = (k[:, None] ** 2 + k**2).sqrt() <= 1
    assert torch.equal(masks.sum(0), inside.long())
    assert bands_of(16, 16) == list(BANDS)
    assert (0.1, 0.2) not in bands_of(8, 8)


def test_maps_that_are_not_square_are_refused():
    for shape in ((1, 2, 4, 6), (4, 4)):
        with pytest.raises(HmoeError, match="needs square maps"):
            log_amplitudes(torch.zeros(shape))


def test_noise_depends_on_its_seed_alone():
    shape = (2, 3, 16, 16)
    one, two = (band_noise(shape, 0.2, 0.3, 1.0, generator(5)) for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, band_noise(shape, 0.2, 0.3, 1.0, generator(6)))


# Runs


def spec_of(algorithm="ERM", network="small_cnn", **changes):
    settings = {"network": network, "hparams": {"batch_size": 4}, "steps": 2}
    settings |= {"measure": "spectra", "test_domains": ["photo"]}
    return make_config(algorithm, "DigitDomainsTiny", **settings | changes)


def trainer_of(config):
    return Trainer(config, build_dataset(config), torch.device("cpu"))


def test_accuracy_with_noise_is_that_of_the_noisy_images():
    trainer = trainer_of(spec_of())
    trainer.update()
    algorithm = trainer.algorithm.eval()
    found = accuracy_with_noise(trained_run(trainer), algorithm, trainer.domains, "out")
    right, total = np.zeros(11), 0
    with torch.no_grad():
        for domain in trainer.domains:
            position = trainer.data.domain_index(domain)
            chosen = trainer.splits[domain]["out"][: 240 // 3]
            x, y = trainer.data.inputs(position, chosen), trainer.data.labels[position][chosen]
            noises = [
                band_noise(x.shape, *band, 0.1, generator(1000 * position + i))
                for i, band in enumerate(BANDS)
            ]
            for k, noise in enumerate([0 * x, *noises]):
                right[k] += (algorithm.predict(x + noise).argmax(1) == y).sum()
            total += len(y)
    assert found["images"] == total
    assert found["clean"] == right[0] / total
    assert np.allclose(found["noisy"], right[1:] / total, atol=1.5 / total)


def test_normalised_images_get_the_noise_of_their_pixels():
    class Photographs:
        options, input_shape = {}, (3, 8, 8)

    class Digits:
        input_shape = (2, 8, 8)

    class OfTrainer:
        data = Photographs()

    contrast = measuring._contrast(OfTrainer)
    assert contrast.shape == (3, 1, 1)
    assert torch.allclose(contrast.flatten(), 1 / torch.tensor(STD))
    OfTrainer.data = Digits()
    assert measuring._contrast(OfTrainer).flatten().tolist() == [1, 1]


@pytest.mark.parametrize(
    "algorithm, network, kind",
    [
        ("ERM", "small_cnn", "convolutions"),
        ("GMoE", "gmoe_small", "patches"),
        ("HMOE-DN", "small_vit", "patches"),
        ("SWAD", "small_cnn", "convolutions"),
    ],
)
def test_a_run_that_is_asked_to_measures_its_spectra(tmp_path, algorithm, network, kind):
    record = run(spec_of(algorithm, network), RunStore(tmp_path))
    assert record["status"] == "complete", record["reason"]
    found = record["spectra"]
    assert found["maps"] == kind
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert list(found["curves"])[0] == ("block 0" if kind == "patches" else "layer 0")
    assert all(curve[0] == 0 for curve in found["curves"].values())
    assert [len(found["noise"][part]["noisy"]) for part in ("out", "test")] == [10, 10]
    assert ("expert_choices" in record) == (algorithm == "GMoE")


def test_measuring_changes_nothing_else(tmp_path):
    with_spectra, without = spec_of(), spec_of(measure="")
    assert with_spectra.run_id != without.run_id
    one, two = (run(config, RunStore(tmp_path)) for config in (with_spectra, without))
    assert one["selected"] == two["selected"]
    assert one["checkpoints"] == two["checkpoints"]
    assert "spectra" not in two


def test_the_same_images_get_the_same_noise_in_every_network(monkeypatch):
    seen = []

    def note(shape, low, high, std, generator):
        seen.append(band_noise(shape, low, high, std, generator))
        return seen[-1]

    monkeypatch.setattr(measuring.spectra, "band_noise", note)
    for name in ("small_cnn", "small_vit"):
        measure_spectra(trained_run(trainer_of(spec_of(network=name))))
    half = len(seen) // 2
    assert half == 10 * 4
    assert all(map(torch.equal, seen[:half], seen[half:]))


def test_what_cannot_be_measured_is_refused_before_training():
    trainer = trainer_of(spec_of())
    check_measure(trainer)
    trainer.algorithm.featurizer = torch.nn.Identity()
    with pytest.raises(HmoeError, match="spectra.*small_cnn.*16 x 16"):
        check_measure(trainer)
    with pytest.raises(HmoeError, match="measure 'spectrum'") as caught:
        spec_of(measure="spectrum")
    assert "spectra" in caught.value.choices


def test_a_study_says_what_is_measured(tmp_path):
    text = """title = "two networks"
algorithms = ["ERM"]
datasets = ["DigitDomainsTiny"]
test_domains = ["photo"]
seeds = 1
steps = 2
network = "small_cnn"
measure = "spectra"
"""
    file = tmp_path / "mine.toml"
    file.write_text(text)
    assert [config.measure for config in study_configs(str(file))] == ["spectra"]
    file.write_text(text.replace('"spectra"', '"spectrum"'))
    with pytest.raises(HmoeError, match=r"mine.toml, line 8.*'spectrum'"):
        study_configs(read_study(str(file)))


# Evidence


def invented(network, domain, seed, drop):
    "A record whose accuracy falls by `drop` with noise of the upper rings."
    kind = "patches" if "vit" in network else "convolutions"
    curves = {"block 0": [0, -1, -2.0], "block 1": [0, -1, -3.0], "block 2": [0.0]}
    if kind == "convolutions":
        curves = {"layer 0": [0, -1, -2, -3, -4.0], "layer 1": [0, -1, -1.5 - seed]}
    noise = {
        part: {
            "images": 100,
            "bands": [[0.4, 0.5], [0.5, 0.6], [0.9, 1.0]],
            "clean": 0.9,
            "noisy": [0.85, 0.9 - drop, 0.9 - drop],
        }
        for part in ("out", "test")
    }
    config = {"algorithm": "ERM", "network": network, "test_domains": [domain], "trial_seed": seed}
    measured = {"maps": kind, "curves": curves, "noise": {"std": 0.1, **noise}}
    config["dataset"], run_id = "Invented", f"{network} {domain} {seed}"
    return {"status": "complete", "run_id": run_id, "config": config, "spectra": measured}


def framed(gap=0.1):
    "The frame of the study."
    return frame_of(study(gap))


def study(gap=0.1):
    "Two seeds on two test domains; the second network loses more."
    return [
        invented(
            network, domain, seed, 0.02 * seed + (gap + 1e-7 * (seed - 0.5)) * ("cnn" in network)
        )
        for network in ("small_vit", "small_cnn")
        for domain in ("ink", "sand")
        for seed in range(2)
    ]


def test_rows_of_curves_leave_out_single_pixels():
    rows = spectrum_rows(framed())
    vit = rows[rows.model == "ERM, small_vit"]
    assert set(vit.part) == {"block 0", "block 1"}
    assert set(vit.depth) == {0.0, 0.5}
    cnn = rows[(rows.model == "ERM, small_cnn") & (rows.part == "layer 0")]
    assert sorted(set(cnn.frequency)) == [0, 0.25, 0.5, 0.75, 1]
    with pytest.raises(HmoeError, match='measure = "spectra"'):
        measured_runs(frame_of([study()[0] | {"spectra": None}]))


def test_drops_are_in_points_with_the_clean_accuracy_beside_them():
    drops = noise_drops(noise_rows(framed()))
    one = drops[(drops.model == "ERM, small_cnn") & (drops.ring == 0.5)].iloc[0]
    assert math.isclose(one["mean"], 11)
    assert math.isclose(one.clean, 90)
    assert one.runs == 4
    # two domains with seeds 10 and 12: half of sqrt(1 + 1), with 2 degrees of freedom
    assert math.isclose(one.high - one["mean"], 4.3027 * math.sqrt(2) / 2, rel_tol=1e-4)


def test_differences_are_formed_in_pairs():
    table = noise_differences(noise_rows(framed()), "ERM, small_cnn").query("part == 'validation'")
    assert set(table.model) == {"ERM, small_vit"}
    assert table.pairs.tolist() == [4, 4, 4]
    assert np.allclose(table.difference, [0, -10, -10])
    # seeds differ by two points and the pairs by next to nothing, so the intervals are short
    assert np.allclose(table.high - table.low, [math.nan, 0, 0], atol=1e-3, equal_nan=True)
    assert table.significant.tolist() == [False, True, True]
    single = framed()[lambda frame: frame.trial_seed == 0]
    alone = noise_differences(noise_rows(single), "ERM, small_cnn")
    assert alone.low.isna().all()
    assert not alone.significant.any()


def test_the_baseline_is_erm_on_a_convolutional_network():
    frame = framed()
    assert FOURIER.convolutional_baseline(frame) == "ERM, small_cnn"
    other = frame.assign(algorithm="IRM", run_id="IRM " + frame.run_id)
    assert FOURIER.convolutional_baseline(other) == "IRM, small_cnn"
    assert FOURIER.convolutional_baseline(pd.concat([other, frame])) == "ERM, small_cnn"
    with pytest.raises(HmoeError, match="no convolutional network"):
        FOURIER.convolutional_baseline(frame[:4])


def test_a_baseline_must_exist_and_have_something_in_common():
    rows = noise_rows(framed())
    with pytest.raises(HmoeError, match="model 'ERM, resnet18'") as caught:
        noise_differences(rows, "ERM, resnet18")
    assert "ERM, small_vit" in caught.value.choices
    apart = rows[(rows.model == "ERM, small_vit") == (rows.test_domain == "ink")]
    with pytest.raises(HmoeError, match="in common"):
        noise_differences(apart, "ERM, small_cnn")


@pytest.fixture(scope="module")
def kept_run(tmp_path_factory):
    "A run with experts that kept pictures of its domains: its record, and what it kept."
    folder = tmp_path_factory.mktemp("kept")
    store, config = RunStore(folder / "runs"), spec_of("GMoE", "gmoe_small")
    record = run(config, store)
    ids = [config.run_id]
    publish_study("quick-gmoe", ids, store, folder / "results", with_arrays=ids)
    frame = frame_of([record], "quick-gmoe")
    (kept,) = runs_with_choices(frame, str(folder / "results"))
    return record, kept


def test_a_network_before_training_is_the_one_that_its_run_began_with(kept_run):
    record, kept = kept_run
    state = torch.get_rng_state()
    (found,) = untrained_runs(frame_of([record]), [kept]).record
    assert torch.equal(state, torch.get_rng_state())
    algorithm = trainer_of(spec_of("GMoE", "gmoe_small")).algorithm.eval()
    choices = kept
    trained_on = choices.domain[choices.shown] != choices.domain_names.index("photo")
    assert 0 < trained_on.sum() < len(trained_on)
    x = torch.from_numpy(choices.images[trained_on]).float() / 255
    curves = feature_spectra(algorithm.featurizer, algorithm.predict, [x])["curves"]
    assert list(curves) == list(found["spectra"]["curves"])
    for name, curve in curves.items():
        assert found["spectra"]["curves"][name] == pytest.approx(curve, abs=1e-5)
        if len(curve) > 1:
            assert curve[-1] != pytest.approx(record["spectra"]["curves"][name][-1], abs=1e-6)


def test_what_began_trained_or_has_no_pictures_is_left_out(kept_run):
    record, kept = kept_run
    for change in ({"weights": "IMAGENET1K_V1"}, {"test_domains": ["ink"]}, {"resolution": 224}):
        changed = frame_of([record | {"config": record["config"] | change}])
        assert untrained_runs(changed, [kept]).empty
    assert untrained_runs(frame_of([record]), []).empty
    other = record | {"config": record["config"] | {"trial_seed": 1}, "run_id": "other"}
    assert len(untrained_runs(frame_of([record, other]), [kept])) == 1, (
        "the first seed stands for all"
    )


def test_a_change_with_depth_stands_beside_that_of_the_untrained_network():
    first = study()[:1]
    measured = first[0]["spectra"] | {"curves": {"block 0": [0, -2.5], "block 1": [0, -2.0]}}
    before = spectrum_rows(frame_of([first[0] | {"spectra": measured}]))
    table = depth_changes(spectrum_rows(framed()), before).set_index("model")
    vit, cnn = table.loc["ERM, small_vit"], table.loc["ERM, small_cnn"]
    assert (vit["first"], vit["last"], vit.change, vit.runs, vit.untrained) == (-2, -3, -1, 4, 0.5)
    # changes of 2.5 and 1.5 in both domains: half of sqrt(.25 + .25), with 2 degrees of freedom
    assert cnn.change == 2
    assert math.isnan(cnn.untrained)
    assert math.isclose(cnn.high - 2, 4.3027 * math.sqrt(0.5) / 2, rel_tol=1e-4)
    answer, short, *_ = FOURIER.spectra_verdict(framed(), "ERM, small_cnn", before)
    fall, rise, noise = answer.split("; ")
    assert re.search("fall .*ERM, small_vit$", fall)
    assert re.search("rise .*ERM, small_cnn$", rise)
    assert re.search("significantly less.*ERM, small_cnn.*2.*2", noise)
    assert re.search(r"small_vit -1.00.*\+0.50", short)
    assert short.endswith("not measured).")


def test_sentences_follow_the_records():
    lines = FOURIER.spectra_verdict(framed(), "ERM, small_cnn")
    assert len(lines) == 2 + 2
    rows, found = lines[2].split(": ")
    assert rows.split(", points lost")[0].split(" − ") == [
        "ERM, small_vit",
        "ERM, small_cnn, validation",
    ]
    difference, lost = found.split("; ")
    assert re.findall(r"-[\d.]+", difference) == ["-10.0"] * 3
    assert difference.endswith(", significant")
    assert re.findall(r"\d+\.\d", lost) == ["1.0", "90.0", "11.0", "90.0"]
    turned = FOURIER.spectra_verdict(framed(gap=-0.01), "ERM, small_cnn")
    assert "+1.0 (95" in turned[2]
    alone = FOURIER.spectra_verdict(framed()[lambda frame: frame.trial_seed == 0], "ERM, small_cnn")
    assert "-10.0 (one seed)" in alone[2]
    assert "0.0 of 90.0" in alone[2]


# The page


@pytest.mark.slow
def test_the_page_of_trained_runs(tmp_path):
    store = RunStore(tmp_path / "runs")
    configs = [
        spec_of(algorithm, network, trial_seed=seed, test_domains=[domain])
        for algorithm, network in (("ERM", "small_cnn"), ("GMoE", "gmoe_small"))
        for domain in ("photo", "sketch")
        for seed in range(2)
    ]
    records = [run(config, store) for config in configs]
    ids = [config.run_id for config in configs]
    publish_study("quick-gmoe", ids, store, tmp_path / "results", with_arrays=ids[4:])
    page = render("gmoe_fourier", "quick", store=tmp_path / "results", output=tmp_path / "figures")
    made = {file.name for file in page.parent.iterdir()}
    assert {"gmoe_fourier.png", "gmoe_fourier_noise_test.png", "gmoe_fourier.csv"} <= made
    table = pd.read_csv(page.parent / "gmoe_fourier_differences.csv")
    assert set(table.model) == {"GMoE, gmoe_small"}
    assert (table.pairs == 4).all()
    falls = [
        100 * (found["clean"] - found["noisy"][3])
        for found in (r["spectra"]["noise"]["test"] for r in records)
    ]
    ring = table[(table.part == "test domain") & (table.ring == 0.3)].iloc[0]
    assert math.isclose(ring.difference, np.mean(falls[4:]) - np.mean(falls[:4]), abs_tol=1e-9)
    assert ring.low <= ring.difference <= ring.high
    text = page.read_text()
    assert "points lost to" in text
    assert text.count("; untrained ") >= 2


def test_the_page_says_where_nothing_was_measured(tmp_path):
    store, config = RunStore(tmp_path / "runs"), spec_of(measure="")
    run(config, store)
    publish_study("quick-gmoe", [config.run_id], store, tmp_path / "results")
    page = render("gmoe_fourier", "quick", store=tmp_path / "results", output=tmp_path / "figures")
    assert "measured its spectra." in page.read_text()
