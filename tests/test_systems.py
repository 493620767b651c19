"""Three systems side by side: when a bootstrap may speak, and what the picture of costs shows."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from hmoe_repro.analysis.statistics import crossed_bootstrap, minimum_detectable_difference
from hmoe_repro.bench.systems import ENOUGH, plot_systems, systems_table, systems_verdict
from hmoe_repro.core.style import use_style

DOMAINS = ("negative", "photo", "plain", "sketch")
NAMES = ("ERM", "CORAL", "SWAD", "HMOE-DN", "DMG", "ERM-ViT", "GMoE")


def study(seeds, domains, behind=0.1, names=("ERM", "CORAL")):
    "Complete runs: every system after the first is `behind` the one before, in each cell."
    records = []
    for rank, name in enumerate(names):
        for d, domain in enumerate(DOMAINS[:domains]):
            for seed in range(seeds):
                accuracy = 0.8 - behind * rank - 0.05 * d + 0.01 * seed
                spec = {"algorithm": name, "dataset": "DigitDomains", "test_domains": [domain]}
                spec |= {"trial_seed": seed, "network": "small_cnn", "hparams": {}}
                chosen = {"step": 1, "validation_accuracy": 0.9, "test_accuracy": accuracy}
                made = {"run_id": f"{name}{domain}{seed}", "status": "complete", "spec": spec}
                records.append(made | {"selected": {"default": chosen}, "test_size": 100_000})
    return records


@pytest.mark.parametrize(
    "seeds, domains, interval", [(3, 3, True), (3, 4, True), (2, 2, False), (2, 4, False)]
)
def test_few_seeds_or_domains_give_no_interval(seeds, domains, interval):
    records = study(seeds, domains)
    cell = systems_table(records, None)["minus ERM"].iloc[1]
    assert cell == ("-10.0 (-10.0 to -10.0)" if interval else "-10.0")
    (line,) = systems_verdict(records, None)
    if interval:
        assert (
            line.startswith("1 of 1 systems differ from ERM (the 95 % CI")
            and "CORAL (-10.0" in line
        )
        return
    assert line.startswith("Significantly different"), "the answer, before its reservation"
    assert f"No interval: {seeds} trial seeds and {domains} test domains are too" in line
    limit = minimum_detectable_difference(records).detectable.iloc[-1]
    assert (
        f"from ERM in average accuracy (more than {limit:.1f} points, after Holm" in line
        and "CORAL (-10.0)" in line
    )
    near = systems_verdict(study(seeds, domains, behind=0.001), None)[0]
    assert "No algorithm differs significantly from ERM" in near and "95 % CI over" not in near


def test_a_bootstrap_of_four_cells_is_wrong_too_often():
    "Why there is a least number: of nothing but noise it finds far more than one in twenty."
    random, wrong = np.random.default_rng(0), {}
    for side in (2, ENOUGH + 3):
        found = []
        for _ in range(300):
            means = crossed_bootstrap(random.normal(size=(side, side)), 400)
            low, high = np.quantile(means, [0.025, 0.975])
            found.append(low > 0 or high < 0)
        wrong[side] = np.mean(found)
    assert wrong[2] > 0.1 > wrong[ENOUGH + 3]


def test_the_picture_names_everyone_once_and_begins_at_zero():
    use_style()
    cost = {"sizes": dict.fromkeys(NAMES, {}), "seconds": {"update": {}}, "peak_bytes": {}}
    for i, name in enumerate(NAMES):
        cost["seconds"]["update"][name] = [0.02 + 0.001 * i]  # close together, as they are
        cost["peak_bytes"][name] = 5e6 + 1e5 * i
    figure, axes = plt.subplots(1, 2, figsize=(7, 2.9), sharey=True)
    plot_systems(study(2, 2, 0.01, NAMES), cost, axes)
    figure.canvas.draw()
    for axis in axes:
        assert axis.get_xlim()[0] == 0 and not axis.texts
        low, high = axis.get_xlim()
        assert sum(low <= tick <= high for tick in axis.get_xticks()) > 2
    (legend,) = figure.legends
    assert sorted(text.get_text() for text in legend.get_texts()) == sorted(NAMES)
    assert legend.get_window_extent().x0 >= 0
    assert legend.get_window_extent().x1 <= figure.bbox.width
    plt.close(figure)
