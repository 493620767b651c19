"""Three systems side by side: the differences to ERM, and what the picture of costs shows."""

import matplotlib.pyplot as plt
import pytest

from hmoe_repro.analysis.results import frame_of
from hmoe_repro.bench.systems import plot_systems, systems_table, systems_verdict
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
                made = {"run_id": f"{name}{domain}{seed}", "status": "complete", "config": spec}
                records.append(made | {"selected": {"default": chosen}, "test_size": 100_000})
    return frame_of(records)


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_the_interval_is_that_of_the_contrast(seeds):
    frame = study(seeds, 2)
    cell = systems_table(frame, None)["minus ERM"].iloc[1]
    assert cell == ("-10.0 (one seed)" if seeds == 1 else "-10.0 (95 % CI -10.0 to -10.0)")
    (line,) = systems_verdict(frame, None)
    said = "Not decided: one trial seed" if seeds == 1 else "CORAL -10.0 points (95 % CI"
    assert line.startswith(said) and "CORAL -10.0" in line


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
