"""Trials of `discover` on folders of known styles: what is drawn, what is said of the results."""

import pandas as pd
from notebooks import page_functions
from PIL import Image

from hmoe_repro.bench.grouping_trials import (
    TRIAL_FOLDERS,
    groupings_frame,
    groupings_table,
    write_folder,
)
from hmoe_repro.bench.timing import SCALES


def test_a_folder_has_as_many_of_each_class_and_style(tmp_path):
    tables = []
    for draw, folder in enumerate(("a", "b")):
        labels = write_folder("digits, four styles", tmp_path / folder, 120, draw)
        tables.append(pd.read_csv(labels))
        files = {path.relative_to(tmp_path / folder) for path in (tmp_path / folder).rglob("*.png")}
        assert {str(file) for file in files} == set(tables[-1].file)
        classes = tables[-1].file.str.partition("/")[0]
        assert (pd.crosstab(classes, tables[-1].domain) == 3).all(axis=None)
        assert len(tables[-1]) == 120
    one, other = (Image.open(tmp_path / f / tables[0].file[0]).tobytes() for f in ("a", "b"))
    assert one != other
    assert set(SCALES["groupings"]["full"]["folders"]) == set(TRIAL_FOLDERS)
    alone = write_folder("plain digits alone", tmp_path / "c", 20, 0)
    assert set(pd.read_csv(alone).domain) == {"plain"}


def trial(folder, method, draw, nmi, found):
    row = {"folder": folder, "method": method, "draw": draw, "found": found, "groups": 4}
    row |= {"nmi_domain": nmi, "nmi_plain_domain": nmi and 0.4, "nmi_expert": nmi and 0.5}
    return row | {"nmi_class": 0.0, "seconds": 10.0}


def test_the_answer_names_every_method_and_false_alarms():
    trials = [trial("styles", "features", draw, nmi, True) for draw, nmi in enumerate([0.6, 0.8])]
    trials += [trial("styles", "pixels", 0, 0.3, False), trial("alone", "features", 0, None, True)]
    trials += [trial("alone", "pixels", 0, None, False)]
    record = {"trials": trials, "rounds": 2}
    styles, alone = page_functions("groupings").groupings_answer(record)
    assert (
        "pretrained features 0.700 (0.600 to 0.800), reliable by its own verdict in 2 of 2"
        in styles
    )
    assert "HMOE, from pixels 0.300" in styles
    assert "colour and contrast 0.400" in styles
    assert alone.startswith("Alone")
    assert "error" in alone
    assert "NMI" not in alone
    assert "pretrained features, reliable by its own verdict in 1 of 1" in alone
    assert "HMOE, from pixels, reliable by its own verdict in 0 of 1" in alone
    line = page_functions("groupings").best_line(record)
    assert "pretrained features agree best with the styles: NMI 0.70 (0.60 to 0.80 over 2" in line
    assert len(line.split()) <= 25
    frame = groupings_frame(record)
    assert frame.by.value_counts().to_dict()["HMOE, on pretrained features"] == 2


def test_the_table_has_means_over_draws():
    trials = [trial("a", "features", draw, nmi, draw > 0) for draw, nmi in enumerate([0.6, 0.8])]
    trials[1]["groups"] = 5
    table = groupings_table({"trials": trials}).set_index("grouped by")
    assert table.loc["pretrained features"].tolist() == ["a", "1 of 2", "4, 5", 0.7, 0.0, 10.0]
    assert table["NMI with styles"].tolist() == [0.7, 0.5, 0.4]
    assert table.seconds.count() == 1
