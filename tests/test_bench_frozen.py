"""The bench of frozen stages: that both loops do the same work, and that table, targets, answer and
picture are computed from the record."""

import json

import matplotlib
import pytest
import torch
from notebooks import page_functions

from hmoe_repro.bench import timing
from hmoe_repro.bench.frozen_stages import (
    COMPUTED,
    FROZEN_STAGES,
    PACS_CLASSES,
    frozen_jobs,
    frozen_table,
    frozen_targets,
    kind_of,
    our_erm,
    plain_model,
    plain_update,
    precomputed_rows,
    times_plain,
)
from hmoe_repro.bench.timing import Target, scale_of, target_table, write_record
from hmoe_repro.cli.select_report import _benches
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.report.render import render

matplotlib.use("Agg")

TINY = scale_of("frozen", "tiny")
FROZEN = page_functions("speed_frozen")
frozen_answer = FROZEN.frozen_answer


@pytest.fixture(scope="module")
def tiny():
    return FROZEN_STAGES.run(3, "tiny", lambda line: None)


def invented(**seconds):
    """Two resolutions, 4 images an update, the second round on a machine that is half as fast. Ours
    is 1.25, 4 and 200 times as fast at 64 pixels, 0.8, 2 and 100 times at 32."""
    plain = {32: (0.8, 0.4, 0.2), 64: (1.0, 0.8, 0.4)}
    ours = {32: (1.0, 0.2, 0.002), 64: (0.8, 0.2, 0.002)}
    record = {"what": "frozen", "scale": "full", "rounds": 3, "bf16": "amx", "seconds": {}}
    record["sizes"] = {"sides": [32, 64], "stages": [0, 3, "all"], "domains": 2, "batch": 2}
    for side in plain:
        for stages, slow, fast in zip((0, 3, "all"), plain[side], ours[side]):
            times = {"plain": slow, "float32": fast} | ({"bf16": fast / 2} if side == 32 else {})
            rounds = {name: [s, 2 * s, s] for name, s in times.items()}
            record["seconds"][kind_of(side, stages)] = rounds
    priced = [kind_of(side, stages) for side in plain for stages in (3, "all")]
    record["seconds"][COMPUTED] = {kind: [0.03, 0.06, 0.03] for kind in priced}
    record["seconds"] |= seconds
    return record


# What is timed


@pytest.mark.parametrize("stages", [0, 3, 5, "all"])
def test_both_loops_train_the_same_weights_to_the_same_loss(stages):
    x, y = torch.rand(6, 3, 64, 64), torch.randint(PACS_CLASSES, (6,))
    ours, batches = our_erm(TINY.network, stages, list(zip(x.split(2), y.split(2))))
    model, adam = plain_model(TINY.network, stages)
    state = ours.featurizer.body.state_dict()
    if stages:
        state = ours.featurizer.frozen.body.state_dict() | state
    state |= {f"classifier.{name}": value for name, value in ours.classifier.state_dict().items()}
    model.load_state_dict(state)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(map(torch.numel, trained)) == sum(map(torch.numel, ours.parameters()))
    assert sum(len(group["params"]) for group in adam.param_groups) == len(trained)
    before = [p.detach().clone() for p in model.parameters()]
    loss = plain_update(model, adam, x, y)
    assert loss == pytest.approx(ours.update(batches)["loss"], abs=1e-3)
    for old, new in zip(before, model.parameters(), strict=True):
        assert new.requires_grad != torch.equal(old, new), "frozen or trained, not both"
    assert not [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d) and m.training]


def test_an_update_with_frozen_stages_reads_rows_and_computes_none(monkeypatch):
    x, y = torch.rand(4, 3, 64, 64), torch.randint(PACS_CLASSES, (4,))
    ours, batches = our_erm(TINY.network, 3, [(x, y)])
    frozen = ours.featurizer.frozen
    rows, _ = batches[0]
    torch.testing.assert_close(ours.featurizer(rows), ours.featurizer(x), atol=1e-2, rtol=0)
    assert torch.equal(rows, precomputed_rows(frozen, x))
    assert rows.dim() == 2
    monkeypatch.setattr(frozen, "compute", lambda x: pytest.fail("computed again"))
    ours.update(batches)


@pytest.mark.parametrize(
    "hardware, precisions", [("amx", {"float32", "bf16"}), ("emulated", {"float32"})]
)
def test_bf16_is_measured_where_it_is_fast(monkeypatch, hardware, precisions):
    monkeypatch.setattr(timing, "bf16_hardware", lambda: hardware)
    names = {}
    for kind, name in frozen_jobs(TINY):
        names.setdefault(kind, set()).add(name)
    assert names[kind_of(32, 3)] == {"plain"} | precisions
    assert names[kind_of(64, 3)] == {"plain", "float32"}
    assert names[COMPUTED] == {kind_of(side, n) for side in TINY.sides for n in (3, "all")}


def test_a_tiny_bench_measures_every_case_in_every_round(tiny):
    assert set(tiny["seconds"]) == {
        COMPUTED,
        *(kind_of(side, n) for side in TINY.sides for n in TINY.stages),
    }
    rounds = [s for kind in tiny["seconds"].values() for s in kind.values()]
    assert all(len(s) == 3 and min(s) > 0 for s in rounds)
    assert json.loads(json.dumps(tiny)) == tiny, "plain JSON"
    assert len(frozen_table(tiny)) == 6


def test_the_full_scale_is_the_pretrained_network_on_three_domains():
    full = scale_of("frozen", "full")
    assert (full.network, full.domains) == ("efficientnet_lite0", 3)
    assert full.sides == [112, 160, 224]
    assert full.stages == [0, 3, 5, "all"]
    with pytest.raises(HmoeError, match="unknown scale 'huge'"):
        FROZEN_STAGES.run(3, "huge")


# What is computed from a record


def test_a_ratio_compares_times_of_one_round():
    assert times_plain(invented(), 64)[3].tolist() == pytest.approx([4, 4, 4])
    uneven = {"plain": [3.0, 8.0, 5.0], "float32": [1.0, 4.0, 5.0]}
    found = times_plain(invented(**{kind_of(64, 3): uneven}), 64)[3]
    assert found.tolist() == pytest.approx([3, 2, 1])


def test_the_table_by_hand():
    table = frozen_table(invented()).set_index(["pixels", "frozen stages"])
    row = table.loc[(32, "3")]
    assert (row["images/s, plain"], row["images/s, float32"]) == ("10.0", "20.0")
    assert row["times plain"] == pytest.approx(2)
    assert row["quartiles"] == "2.00–2.00"
    assert row["bf16, times float32"] == "2.00"
    # a domain's two images take 0.03 s, an image 15 ms; an update saves 0.2 s / 4 images
    assert row["once, ms an image"] == "15.0"
    assert row["paid after passes"] == "0.30"
    nothing = table.loc[(64, "0"), ["bf16, times float32", "once, ms an image"]]
    assert nothing.tolist() == ["–", "–"]


def test_a_price_that_is_never_regained_is_not_a_number_of_passes():
    slower = {kind_of(64, 3): {"plain": [1.0] * 3, "float32": [2.0] * 3}}
    table = frozen_table(invented(**slower)).set_index(["pixels", "frozen stages"])
    assert table.loc[(64, "3"), "paid after passes"] == "–"


def test_a_target_is_met_or_missed_by_the_ratio_of_its_case():
    table = target_table(invented(), frozen_targets(invented())).set_index("target")
    text = "{} pixels, {} stages frozen: times the plain loop"
    assert len(table) == 6
    missed = table.verdict[table.verdict != "met"]
    assert missed.to_dict() == {text.format(32, "no"): "not met"}
    assert table["median"][text.format(64, 3)] == pytest.approx(4)
    by_hand = Target("twice", "≥", 5.0, lambda record: times_plain(record, 64)[3])
    assert target_table(invented(), [by_hand]).verdict.tolist() == ["not met"]


def test_the_answer_has_every_median():
    assert frozen_answer(invented()) == (
        "Times as fast as the plain loop at 32 / 64 pixels, by frozen stages: "
        "0.80 and 1.25 with none frozen; 2.00 and 4.00 with 3 frozen; 100 and 200 with all frozen."
    )


def test_the_answer_is_that_of_the_most_stages_at_the_largest_resolution():
    line = FROZEN.most_frozen_line(invented())
    assert line.startswith("With all stages frozen, an update at 64 pixels is 200 times as fast")
    assert len(line.split()) <= 25


# Page and command


def test_the_page_shows_its_record_and_begins_with_the_answer(warm_kernels, tiny, tmp_path):
    write_record(tiny, tmp_path / "bench-frozen.json")
    shown = render("speed_frozen", "bench", store=tmp_path, output=tmp_path / "figures")
    made = {f"speed_frozen{end}" for end in (".png", ".csv", "_targets.csv", ".provenance.json")}
    assert made <= {p.name for p in shown.parent.iterdir()}
    text = shown.read_text()
    assert "Scale tiny" in text
    assert str(tmp_path) not in text
    assert text.count("cannot be measured here (scale tiny)") >= len(frozen_targets(tiny))
    evidence = json.loads((shown.parent / "speed_frozen.provenance.json").read_text())
    assert evidence["artefact"] == "speed_frozen"
    assert evidence["scale"] == "tiny"
    assert frozen_answer(tiny) in text


def test_the_command_measures_this_and_prints_table_and_targets(tiny):
    bench = _benches()["frozen"]
    assert bench is FROZEN_STAGES
    assert bench.page == "speed_frozen"
    shown = bench.all_tables(tiny)
    assert {title: len(table) for title, table in shown.items()} == {
        "Images a second of an update": 6,
        "Targets": 6,
    }
