"""The data of the page to play with (play.md, static/play.js), from the committed records."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from hmoe_repro.analysis.embeddings import display_rgb, place_codes, runs_with_codes, subset, tiled
from hmoe_repro.analysis.results import arrays, results
from hmoe_repro.data.kmeans_baseline import image_statistics, kmeans
from hmoe_repro.data.registry import load_dataset
from hmoe_repro.method.clustering import cluster_scores
from hmoe_repro.training.protocols import make_splits

LOSSES = {(1, 1): "all losses", (0, 1): "without L_en", (0, 0): "L_y alone"}
CUT = 2.0  # outputs of experts are drawn from -CUT to CUT
COLUMNS = 32  # images in a row of the sheet


def coded(values) -> str:
    """Numbers from 0 to 1 as one byte each, in base64."""
    scaled = np.rint(255 * np.clip(np.asarray(values, dtype=np.float64), 0, 1))
    return base64.b64encode(scaled.astype(np.uint8).tobytes()).decode()


def film() -> dict:
    """The runs of Fig. 3 by their losses: for each seed what the rule found, and for each epoch
    the experts' outputs and the gate values over a grid, (seeds, epochs, grid, experts)."""
    made = {}
    for run in sorted(results("quick-toy").itertuples(), key=first_seed):
        h = run.record["config"]["hparams"]
        losses = LOSSES.get((h["lambda_en"], h["lambda_kl"]))
        if losses and "load_balance" not in h:
            made.setdefault(losses, []).append((run.record["toy"], arrays(run)))
    made = {losses: made[losses] for losses in LOSSES.values()}
    toy, a = made["all losses"][0]
    shared = {"epochs": toy["snapshot_epochs"], "cut": CUT, "ends": a["grid"][[0, -1]].tolist()}
    shared["points"] = np.round([a["points_x"][0], a["points_y"][0]], 4).T.tolist()
    runs = {}
    for losses, parts in made.items():
        seeds = [seed for record, _ in parts for seed in record["per_seed"]]
        experts, gates = (np.concatenate([a[n] for _, a in parts]) for n in ("experts", "gates"))
        found = {"found": "intervals_found", "majority": "majority_found"}
        runs[losses] = {key: [int(seed[name]) for seed in seeds] for key, name in found.items()}
        runs[losses]["seeds"] = [seed["seed"] for seed in seeds]
        runs[losses]["experts"] = coded((experts / CUT + 1) / 2)
        runs[losses]["gates"] = coded(gates)
    return shared | {"runs": runs}


def first_seed(run) -> int:
    """The first seed of a run of the toy."""
    return run.record["toy"]["per_seed"][0]["seed"]


def codes_of(run, a: dict, data) -> tuple[dict, list, torch.Tensor]:
    """A run on the map, the place (domain, index) of the image of each code, and these images:
    the validation images of the training domains, then 20 of the test domain."""
    splits, parts = make_splits(data, int(run.trial_seed)), []
    for split in ("out", "test"):
        for d in np.unique(a[f"domain_{split}"]):
            indices = splits[data.domain_names[d]][split.replace("test", "in")]
            parts.append([(int(d), int(i)) for i in indices[: (a[f"domain_{split}"] == d).sum()]])
    known = len(a["class_out"])
    images = [image for part in parts for image in part]
    chosen = [*range(known), *(known + subset(len(a["class_test"]), 20))]
    images = [images[i] for i in chosen]
    whole = {n: np.concatenate([a[f"{n}_out"], a[f"{n}_test"]])[chosen] for n in NAMES}
    pictures = torch.stack([data.images[d][i] for d, i in images])
    if not np.array_equal(pictures[a["panel_index"]], a["panel_images"]):
        raise ValueError(f"run {run.run_id}: its codes are of other images than the split gives.")
    groups = kmeans(image_statistics(pictures[:known] / 255), len(np.unique(a["domain_out"])))
    scores = cluster_scores(groups, a["domain_out"], a["class_out"])
    placed = place_codes(a)
    made = {
        "test": run.test_domain,
        "known": known,
        "places": np.concatenate([placed["train"], placed["test"]]).round(2).tolist(),
        "embeddings": placed["embeddings"].round(2).tolist(),
        "gates": whole["gate"].astype(float).round(3).tolist(),
        "domain": whole["domain"].tolist(),
        "class": whole["class"].tolist(),
        "kmeans": groups.tolist(),
        "nmi": {name: round(run.record["discovery"][f"nmi_{name}"], 2) for name in NAMES[:2]},
    }
    made["nmi"]["kmeans"] = round(scores["nmi_domain"], 2)
    return made, images, pictures


NAMES = ("domain", "class", "gate")


def maps() -> dict:
    """The runs of HMOE-DN on the digits whose codes are kept, and one sheet of all images."""
    frame = results("quick-digits")
    data, runs, tiles = load_dataset("DigitDomains"), [], {}
    for run, a in runs_with_codes(frame[frame.algorithm == "HMOE-DN"]):
        made, images, pictures = codes_of(run, a, data)
        for image, picture in zip(images, pictures):
            tiles.setdefault(image, picture)
        runs.append(made | {"tile": images})
    order = {image: number for number, image in enumerate(tiles)}
    for run in runs:
        run["tile"] = [order[image] for image in run["tile"]]
    pictures = display_rgb(torch.stack([*tiles.values()]))
    sheet, file = tiled(pictures, COLUMNS, -(-len(pictures) // COLUMNS)), io.BytesIO()
    Image.fromarray(sheet).save(file, "png", optimize=True)
    sheet = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    found = {"domains": list(data.domain_names), "columns": COLUMNS, "side": pictures.shape[1]}
    return found | {"runs": runs, "sheet": sheet}


def write(path: Path) -> None:
    """Write the data as a script, because a page opened from a file may not fetch another."""
    data = json.dumps({"film": film(), "maps": maps()}, separators=(",", ":"))
    path.write_text(f"const PLAY_DATA = {data};\n", encoding="utf-8")
