"""The bench: what a ratio is, what a verdict is, what a damaged record is answered with, and that
the plain loop and ours do the same work."""

import json
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from notebooks import page_functions
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hmoe_repro.analysis.results import read_benchmark
from hmoe_repro.bench.timing import (
    SCALES,
    bf16_hardware,
    judge_target,
    judge_values,
    machine_notes,
    measure,
    ratios,
    scale_of,
    summary,
    target_table,
    write_record,
)
from hmoe_repro.bench.updates import (
    PLAIN_MODELS,
    TARGETS,
    UPDATE_SPEED,
    WORKLOADS,
    bench_table,
    gflop,
    our_trainer,
    plain_accuracy,
    plain_updates,
    random_images,
    speedups,
    update_alone,
    whole_run_seconds,
    whole_run_table,
)
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.base import as_input
from hmoe_repro.networks.precision import PRECISIONS
from hmoe_repro.report.render import KINDS, render
from hmoe_repro.training.protocols import mode_accuracies

TINY = scale_of("updates", "tiny")
PAGE = page_functions("speed")


def invented(**changed):
    "A record with round numbers: three rounds, the second on a machine that is half as fast."
    noise = np.array([1.0, 2.0, 1.0])

    def rounds(seconds):
        return list(seconds * noise)

    seconds = {
        "ERM update": {
            "plain": rounds(1.2),
            "float32": rounds(1.0),
            "bf16": rounds(0.4),
            "bf16-compile": rounds(0.3),
        },
        "HMOE-DN update": {
            "plain": rounds(1.3),
            "float32": rounds(1.15),
            "bf16": rounds(0.5),
            "bf16-compile": rounds(0.4),
        },
        "evaluation": {
            "plain": rounds(2.0),
            "float32": rounds(1.6),
            "bf16": rounds(0.5),
            "bf16-compile": rounds(0.8),
        },
    }
    record = {
        "what": "updates",
        "scale": "full",
        "rounds": 3,
        "images": 320,
        "image": [1, 28, 28],
        "evaluated": 1024,
        "seconds": seconds,
        "outside": {"ERM update": [0.01, 0.02, 0.06], "HMOE-DN update": [0.06, 0.07, 0.08]},
        "group_norm": {
            "64 x 28 x 28": {
                "float32": [0.1] * 3,
                "bf16, PyTorch's": [0.3] * 3,
                "bf16, blockwise": [0.2] * 3,
            }
        },
        "matrix_gflops": {"float32": [200.0] * 3, "bf16": [1000.0] * 3},
        "gflop": {"ERM update": 140.0, "HMOE-DN update": 155.0},
        "bf16": "amx",
        "skipped": {"float32-compile": "no compiler"},
        "first_call": {
            "ERM update": {"bf16-compile": 31.0},
            "HMOE-DN update": {},
            "evaluation": {},
        },
        "busy": 0.99,
        "finished": "2026-01-01T00:00:00+00:00",
        "environment": {
            "device_name": "A processor",
            "versions": {"torch": "2.13"},
            "library": "abc",
            "commit": "def",
        },
    }
    return record | changed


def verdicts(record):
    return dict(zip((target.text for target in TARGETS), target_table(record, TARGETS)["verdict"]))


# Ratios and verdicts


def test_a_ratio_compares_times_of_one_round():
    assert np.allclose(speedups(invented(), "ERM update").float32, 1.2)
    assert np.allclose(speedups(invented(), "evaluation").bf16, 4)
    assert np.allclose(ratios(invented(), "evaluation", "bf16").plain, 4)
    found = summary(pd.DataFrame({"a": [5, 1, 4, 2, 3]}), "times").loc["a"]
    assert found["times"] == 3
    assert found["quartiles"] == "2.00–4.00"


def test_the_table_has_a_row_for_each_path_and_computes_rates():
    table = bench_table(invented()).set_index(["workload", "path"])
    assert len(table) == 12
    assert table.loc[("ERM update", "plain"), "times plain"] == 1
    row = table.loc[("ERM update", "bf16-compile")]
    assert row["seconds"] == 0.3
    assert row["images/s"] == "1,067"
    assert row["GFLOP/s"] == "467"
    assert row["quartiles"] == "4.00–4.00"
    assert np.isclose(row["times plain"], 4)
    assert table.loc[("evaluation", "float32"), "images/s"] == "640"
    assert table.loc[("evaluation", "float32"), "GFLOP/s"] == "–"


def test_a_whole_run_is_its_updates_and_its_evaluations():
    record = invented()
    seconds = whole_run_seconds(record)
    assert list(seconds) == list(record["seconds"]["ERM update"])
    assert np.isclose(seconds["plain"][0], 5001 * 1.2 + 18 * 70_000 * 2.0 / 1024)
    assert np.isclose(seconds["float32"][0], 5001 * 1.0 + 18 * 20_999 * 1.6 / 1024)
    assert np.allclose(seconds.loc[1], 2 * seconds.loc[0])
    table = whole_run_table(record).set_index("path")
    assert np.isclose(table.loc["plain", "minutes"], 8462.1375 / 60)
    assert np.isclose(table.loc["float32", "times plain"], 8462.1375 / 5591.5875)
    text = "whole run of ERM, computed, best bf16 path, times plain"
    target = next(target for target in TARGETS if target.text == text)
    assert judge_target(record, target).outcome == "met"
    slow = invented()
    for path in ("bf16", "bf16-compile"):
        slow["seconds"]["ERM update"][path] = [0.65, 1.3, 0.65]
    assert np.isclose(judge_target(slow, target).median, 8462.1375 / (5001 * 0.65 + 184.5615))
    assert judge_target(slow, target).outcome == "not met"


def test_targets_are_judged_from_the_record():
    found = verdicts(invented())
    missed = [text for text, verdict in found.items() if verdict != "met"]
    assert missed == ["HMOE-DN update, float32, share outside (%)"]
    assert len(found) == 9
    slow = invented()
    slow["seconds"]["ERM update"]["float32"] = [1.19, 2.38, 1.19]
    assert verdicts(slow)["ERM update, float32, times plain"] == "not met"
    dear = invented()
    dear["seconds"]["HMOE-DN update"]["float32"] = [1.25, 2.5, 1.25]
    assert verdicts(dear)["HMOE-DN update / ERM update, float32"] == "not met"


@pytest.mark.parametrize(
    "sign, bound, values, expected",
    [
        ("≥", 1.08, (1.08, 1.08, 1.1), "met"),
        ("≥", 1.08, (1.07, 1.0, 1.1), "not met (within the spread)"),
        ("≤", 1.2, (1.2, 1.1, 1.3), "met (within the spread)"),
        ("<", 5.0, (5.0, 5.0, 5.0), "not met"),
        ("<", 5.0, (2.0, 1.0, 3.0), "met"),
    ],
)
def test_a_verdict_says_when_the_bound_lies_within_the_spread(sign, bound, values, expected):
    assert judge_values(*values, sign, bound).text() == expected


@pytest.mark.parametrize(
    "hardware, reason",
    [
        ("emulated", "cannot be measured here (no AMX: bf16 is emulated)"),
        ("avx512_bf16", "cannot be measured here (no AMX: bf16 is AVX512_bf16)"),
    ],
)
def test_bf16_targets_need_the_hardware_and_others_do_not(hardware, reason):
    found = verdicts(invented(bf16=hardware))
    assert [v == reason for v in found.values()] == ["bf16" in t for t in found]
    assert sum("bf16" in t for t in found) == 3


def test_a_tiny_record_meets_and_misses_nothing():
    assert set(verdicts(invented(scale="tiny")).values()) == {
        "cannot be measured here (scale tiny)"
    }


def test_sentences_are_computed():
    notes = "\n".join(PAGE.bench_notes(invented()))
    assert (
        "140 GFLOP in float32 at 140 GFLOP/s, 70% of what a matrix product reaches on this core "
        "(200 float32, 1000 bf16)" in notes
    )
    assert "bf16-compile 31 s" in notes
    assert "Skipped: float32-compile: no compiler" in notes
    machine = "\n".join(machine_notes(invented()))
    assert "multiplies bf16 in hardware (AMX)" in machine
    assert "other processes used" not in machine
    loaded = "\n".join(machine_notes(invented(busy=0.6, bf16="emulated")))
    assert "got 60% of a core: **other processes used the machine" in loaded
    assert "bf16 products are emulated" in loaded


def test_the_answer_has_both_precisions_and_the_quartiles_of_the_faster():
    record = invented()
    rounds = speedups(record, "ERM update")
    line = PAGE.speed_line(record)
    halves = [name for name in rounds if name.startswith("bf16")]
    best = rounds[rounds[halves].median().idxmax()]
    assert f"is {rounds['float32'].median():.2f} times as fast as the plain loop" in line
    assert f"{best.median():.2f} times in bf16 (quartiles {best.quantile(0.25):.2f} to" in line
    assert len(line.split()) <= 25
    alone = record | {"seconds": {"ERM update": dict(record["seconds"]["ERM update"])}}
    for name in halves:
        del alone["seconds"]["ERM update"][name]
    assert "bf16" not in PAGE.speed_line(alone)


# The record on disk


def test_a_record_returns_as_it_was_written(tmp_path):
    write_record(invented(), tmp_path / "bench.json")
    assert read_benchmark(tmp_path / "bench.json", "updates") == invented()


@pytest.mark.parametrize(
    "text, complaint",
    [
        (json.dumps(invented())[:500], "truncated or not JSON"),
        ("", "truncated or not JSON"),
        (json.dumps(invented(what="moe")), "is not a benchmark record of 'updates'"),
    ],
)
def test_a_damaged_record_is_one_line_with_the_fix(tmp_path, text, complaint):
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(HmoeError, match=re.escape(complaint)) as caught:
        read_benchmark(tmp_path / "bench.json", "updates")
    assert "Fix: `hmoe bench --what updates --publish`" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_record_says_how_to_make_one(tmp_path):
    with pytest.raises(HmoeError, match="no benchmark record at .*Fix: `hmoe bench --what updates"):
        read_benchmark(tmp_path / "bench.json", "updates")


# What is timed


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(0)
    return random_images(TINY)


def layers_of(model):
    "Its layers with weights, kind by kind, in order."
    kinds = (nn.Conv2d, nn.GroupNorm, nn.Linear)
    return [m for kind in kinds for m in model.modules() if isinstance(m, kind)]


def same_weights(ours, plain):
    "Give the plain model the weights of ours; only its layers have other names."
    for mine, theirs in zip(layers_of(ours), layers_of(plain), strict=True):
        theirs.load_state_dict(mine.state_dict())
    own = {name for name, _ in plain.named_parameters()} & {*ours.state_dict()}
    plain.load_state_dict({name: ours.state_dict()[name] for name in own}, strict=False)


@pytest.mark.parametrize("name", PLAIN_MODELS)
def test_the_plain_loop_is_the_same_mathematics(name, data):
    """Same weights, same batch: same loss, and after one update of each optimiser the same
    parameters."""
    trainer = our_trainer(name, "float32", data, TINY)
    plain = PLAIN_MODELS[name](TINY.width, TINY.domains)
    same_weights(trainer.algorithm, plain)
    x, y = as_input(data.images[0][:12]), data.labels[0][:12]
    theirs = plain.loss(x.contiguous(), y, 0.0)
    optimizer = torch.optim.Adam(plain.parameters(), lr=trainer.algorithm.hparams["lr"])
    theirs.backward()
    ours = trainer.algorithm.update([(x, y)])["loss"]
    assert abs(ours - theirs.item()) < 1e-5
    for a, b in zip(layers_of(plain), layers_of(trainer.algorithm), strict=True):
        for name, value in a.named_parameters():
            found = b.get_parameter(name).grad
            torch.testing.assert_close(value.grad, found, rtol=1e-3, atol=1e-5, msg=str(a))
    optimizer.step()
    assert (
        optimizer.param_groups[0]["lr"] == trainer.algorithm.optimizer.param_groups[0]["lr"] == 1e-3
    )


def test_plain_updates_learn_and_plain_accuracy_counts(data):
    torch.manual_seed(0)
    model = PLAIN_MODELS["ERM"](TINY.width, TINY.domains)
    updates = plain_updates(model, data, TINY)
    losses = [next(updates) for _ in range(12)]
    assert all(isinstance(v, float) for v in losses)
    assert len(set(losses)) == 12
    trainer = our_trainer("ERM", "float32", data, TINY)
    same_weights(trainer.algorithm, model)
    part = torch.arange(30)
    loader = DataLoader(
        TensorDataset(data.images[0][part].float() / 255, data.labels[0][part]), batch_size=7
    )
    assert plain_accuracy(model, loader) == pytest.approx(
        mode_accuracies(trainer.algorithm, data, "0", part)["default"]
    )


def test_full_scale_has_the_arithmetic_of_rotated_mnist():
    """139 billion operations in an ERM update of 5 x 64 images (counted here on ten images)."""
    small = SimpleNamespace(**SCALES["updates"]["full"] | {"batch": 2, "stored": 10})
    trainer = our_trainer("ERM", "float32", random_images(small), small)
    assert gflop(update_alone(trainer)) * 32 == pytest.approx(139.2, abs=0.5)
    full = scale_of("updates", "full")
    assert {*full.precisions, "tf32"} == {*PRECISIONS}
    assert full.domains * full.batch == 320


def test_rounds_turn_the_order_and_skip_what_cannot_run():
    order, lines = [], []

    def broken():
        raise HmoeError("no compiler")

    jobs = {("kind", name): partial(order.append, name) for name in "ab"} | {("other", "c"): broken}
    seconds, first, skipped = measure(jobs, 3, lines.append)
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert len(lines) == 3
    assert {name: len(found) for name, found in seconds["kind"].items()} == {"a": 3, "b": 3}
    assert skipped == {"c": "no compiler"}
    assert set(first) == {("kind", "a"), ("kind", "b")}


def test_an_error_that_is_not_the_compilers_is_not_skipped():
    def broken():
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        measure({("kind", "a"): broken}, 1)


@pytest.mark.parametrize(
    "flags, kind",
    [
        ({"amx_bf16", "amx_tile"}, "amx"),
        ({"avx512_bf16"}, "avx512_bf16"),
        ({"avx512f", "avx512_vnni"}, "emulated"),
        (set(), "emulated"),
    ],
)
def test_hardware_is_read_from_the_flags(flags, kind):
    assert bf16_hardware(flags) == kind


# The whole


@pytest.fixture(scope="module")
def tiny():
    said = []
    return UPDATE_SPEED.run(3, "tiny", said.append) | {"said": said}


def test_a_tiny_bench_measures_every_path_in_every_round(tiny):
    assert tiny["said"] == ["round 1 of 3", "round 2 of 3", "round 3 of 3"]
    assert all(
        set(tiny["seconds"][w]) == {"plain", "float32", "bf16"}
        and all(len(v) == 3 and min(v) > 0 for v in tiny["seconds"][w].values())
        for w in WORKLOADS
    )
    assert all(share < 1 for shares in tiny["outside"].values() for share in shares)
    assert set(tiny["outside"]) == {"ERM update", "HMOE-DN update"}
    assert not tiny["skipped"]
    assert set(tiny["group_norm"]) == {"16 x 8 x 8", "32 x 4 x 4"}
    assert tiny["gflop"]["HMOE-DN update"] > tiny["gflop"]["ERM update"] > 0
    assert {"library", "commit", "versions", "device_name"} <= set(tiny["environment"])
    assert tiny["environment"]["threads"] == 1
    assert 0 < tiny["busy"]


@pytest.mark.slow
def test_the_page_shows_the_record(warm_kernels, tiny, tmp_path):
    (tmp_path / "store").mkdir()
    write_record({k: v for k, v in tiny.items() if k != "said"}, tmp_path / "store" / "bench.json")
    page = render(
        "speed", "bench", store=tmp_path / "store", output=tmp_path / "figures", formats=KINDS
    )
    made = {p.name for p in page.parent.iterdir()}
    assert {
        "speed.ipynb",
        "speed.png",
        "speed.pdf",
        "speed.md",
        "speed.csv",
        "speed.tex",
        "speed_targets.md",
        "speed.provenance.json",
    } <= made
    assert (page.parent / "speed_targets.md").read_text().count(
        "cannot be measured here (scale tiny)"
    ) == len(TARGETS)
    text = page.read_text()
    assert "Scale tiny" in text
    assert str(tmp_path) not in text
    evidence = json.loads((page.parent / "speed.provenance.json").read_text())
    assert evidence["environment"] == tiny["environment"]
    assert len(evidence["record_sha256"]) == 64


def test_unknown_scales_are_refused():
    with pytest.raises(HmoeError, match="unknown scale 'huge'. Valid: full, tiny"):
        UPDATE_SPEED.run(3, "huge")


def test_the_page_says_which_group_norm_is_used_and_whether_that_pays():
    norms = {
        "64 x 28 x 28": {"bf16, PyTorch's": [0.3] * 3, "bf16, blockwise": [0.2] * 3},
        "128 x 14 x 14": {"bf16, PyTorch's": [0.02] * 3, "bf16, blockwise": [0.05] * 3},
    }
    table = PAGE.group_norm_table(invented(group_norm=norms))
    assert table["channels a group"].tolist() == [8, 16]
    assert table["used in bf16"].tolist() == ["blockwise", "PyTorch's"]
    assert table["bf16, blockwise (ms)"].tolist() == pytest.approx([200, 50])
