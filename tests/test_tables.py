"""Tables, their errors and their verdicts, against numbers by hand."""

import math

import invented
import numpy as np
import pandas as pd
import pytest

from hmoe_repro.analysis.clusters import highest_nmi
from hmoe_repro.analysis.results import frame_of
from hmoe_repro.analysis.tables import (
    accuracy_table,
    cell_statistics,
    paper_numbers,
    row_name,
    run_results,
    table_notes,
)
from hmoe_repro.core.errors import HmoeError

AVERAGE = "Average of photo, sketch"  # two of the four domains of these data


@pytest.fixture
def miniature():
    return frame_of(invented.miniature())


def test_cells_are_the_means_and_errors_of_the_protocol(miniature):
    cells = cell_statistics(miniature).set_index(["algorithm", "mode", "test_domain"])
    photo = cells.loc[("HMOE-DN", "mix", "photo")]
    assert photo["mean"] == pytest.approx(70)
    assert photo.n == 3
    assert photo.stderr == pytest.approx(
        100 * math.sqrt(((0.1) ** 2 + 0.05**2 + 0.05**2) / 2) / math.sqrt(3)
    )
    average = cells.loc[("ERM", "default", "Average")]
    assert average["mean"] == pytest.approx((60 + 84) / 2)
    assert average.stderr == pytest.approx(100 * np.std([0.65, 0.71, 0.80], ddof=1) / math.sqrt(3))


def test_the_table_says_what_is_missing(miniature):
    table = accuracy_table(miniature).set_index(["algorithm", "mode"])
    assert list(table.columns) == [AVERAGE, "photo", "sketch"]
    assert list(table.index) == [("ERM", "default"), ("HMOE-DN", "mix"), ("HMOE-DN", "max")]
    assert table.loc[("ERM", "default"), "photo"] == "60.0 ± 5.8"
    assert table.loc[("HMOE-DN", "mix"), "sketch"] == "85.0 (1/3)"
    notes = "\n".join(table_notes(miniature))
    assert "failed: HMOE-DN on sketch, seed 1" in notes
    assert "NaN loss at step 40" in notes
    assert "missing: HMOE-DN on sketch, seeds 1, 2" in notes
    assert "one trial seed" not in notes
    assert notes.endswith("with n - 1, / root of n; those of DomainBed, with n, are 18 % smaller")


def test_a_cell_without_any_seed_takes_the_average_with_it(miniature):
    gone = invented.measured("HMOE-DN", "sketch", 0, mix=1)["run_id"]
    table = accuracy_table(miniature[miniature.run_id != gone]).set_index(["algorithm", "mode"])
    assert table.loc[("HMOE-DN", "mix"), "sketch"] == "– (0/3)"
    assert table.loc[("HMOE-DN", "mix"), AVERAGE] == "– (0/3)"


def test_no_seed_in_common_gives_a_mean_but_no_error():
    runs = [
        invented.measured("ERM", "photo", 0, default=0.5),
        invented.measured("ERM", "sketch", 1, default=0.7),
    ]
    table = accuracy_table(frame_of(runs))
    assert table.loc[0, "photo"] == "50.0 (1/2)"
    assert table.loc[0, AVERAGE] == "60.0 (0/2 whole)"


def test_one_seed_has_no_standard_error():
    runs = [
        invented.measured("ERM", "photo", 0, default=0.5),
        invented.measured("ERM", "sketch", 0, default=0.7),
    ]
    frame = frame_of(runs)
    assert accuracy_table(frame).loc[0].tolist() == ["ERM", "default", "60.0", "50.0", "70.0"]
    assert "one trial seed: no standard errors" in table_notes(frame)


def test_two_runs_for_one_cell_are_refused(miniature):
    again = invented.measured("ERM", "photo", 0, default=0.9) | {"run_id": "f" * 12}
    with pytest.raises(HmoeError, match="both ERM on photo with seed 0.*Fix"):
        run_results(pd.concat([miniature, frame_of([again])]))


def test_pairs_of_test_domains_stay_out_of_the_table(miniature):
    pair = invented.measured("ERM", "photo", 0, default=0.1)
    pair["config"]["test_domains"] = ["photo", "sketch"]
    both = pd.concat([miniature, frame_of([pair])])
    assert accuracy_table(both).equals(accuracy_table(miniature))


def test_no_table_of_nothing():
    with pytest.raises(HmoeError, match="so there is no table"):
        accuracy_table(frame_of([]))
    assert table_notes(frame_of([invented.failed("ERM", "photo", 0)]))[0].startswith("failed: ERM")


# Verdicts


def test_the_ceiling_of_nmi_is_reached_by_the_best_balanced_experts():
    from sklearn.metrics import normalized_mutual_info_score

    domains, experts = (
        np.repeat([0, 1, 2], 20),
        np.arange(60) % 20 % 2 + 2 * np.repeat([0, 1, 2], 20),
    )
    assert highest_nmi(3, 6) == pytest.approx(normalized_mutual_info_score(domains, experts))
    assert highest_nmi(3, 5) == pytest.approx(2 * math.log(3) / math.log(15))
    assert highest_nmi(3, 3) == 1 == highest_nmi(1, 1)


# Curves


def test_a_row_is_called_by_its_algorithm_and_its_mode_if_it_has_a_choice():
    assert row_name("ERM", "default") == "ERM"
    assert row_name("HMOE-DN", "ood") == "HMOE-DN OOD"


def test_the_rows_of_the_domains_average_to_the_published_table_1():
    row = ["dataset", "algorithm", "mode"]
    artefacts = [f"HMOE Table {number}" for number in range(4, 10)]
    of_domains = paper_numbers(artefact=artefacts).groupby(row).value.mean()
    averages = paper_numbers(artefact="HMOE Table 1").set_index(row).value
    assert len(of_domains) == 54
    assert (of_domains - averages[of_domains.index]).abs().max() < 0.11
