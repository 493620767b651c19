"""Tiny data sets in the documented layouts of the benchmarks, and archives in those of their
sources."""

import functools
import io
import json
import tarfile
import zipfile

import pandas as pd
from PIL import Image

from hmoe_repro.core.devices import import_torchvision
from hmoe_repro.data.benchmarks import KNOWN
from hmoe_repro.data.transforms import MEAN, STD, picture_transform

FORMATS = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP", "bmp": "BMP"}


@functools.cache
def picture(suffix="jpg", shade=0, size=8):
    "The bytes of a small image."
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((size, size)).convert("RGB").point(
        lambda v: (v + 40 * shade) % 256
    ).save(buffer, FORMATS[suffix])
    return buffer.getvalue()


def put(path, content=None, shade=0):
    "Write a file, by default an image of the format that its name says."
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture(path.suffix[1:].lower(), shade) if content is None else content)


def classes_of(name):
    "The classes of a known data set, or as many made up."
    known = KNOWN[name]
    return known.classes or tuple(f"class_{i:03d}" for i in range(known.num_classes))


def folder_tree(root, domains, classes, per_class=2, suffix="jpg"):
    "`root/<domain>/<class>/<image>`; returns the number of images of each domain."
    for i, domain in enumerate(domains):
        for c in classes:
            for k in range(per_class + i % 2):
                put(root / domain / c / f"{k:03d}.{suffix}", shade=i)
    return [len(classes) * (per_class + i % 2) for i in range(len(domains))]


def camelyon_tree(root, per_hospital=4, images=True):
    "WILDS Camelyon17: `metadata.csv` and `patches/`; returns the table."
    rows = [
        {
            "patient": f"{4 + h:03d}",
            "node": h,
            "x_coord": 100 * k,
            "y_coord": 7 * k,
            "tumor": k % 2,
            "slide": h,
            "center": h,
            "split": 0,
        }
        for k in range(per_hospital)
        for h in range(5)
    ]
    frame = pd.DataFrame(rows)
    root.mkdir(parents=True)
    frame.to_csv(root / "metadata.csv")
    for r in rows if images else ():
        slide = f"patient_{r['patient']}_node_{r['node']}"
        put(
            root / "patches" / slide / f"patch_{slide}_x_{r['x_coord']}_y_{r['y_coord']}.png",
            shade=r["center"],
        )
    return frame


COUNTRIES = {
    "CHN": "Asia",
    "FRA": "Europe",
    "NAM": "Africa",
    "USA": "Americas",
    "FJI": "Oceania",
    "ATA": "",
    "XKX": None,
}


def fmow_tree(root, images=True):
    "WILDS FMoW: two tables and `images/`; every fifth row is sequestered; returns the table."
    codes, classes = list(COUNTRIES), KNOWN["WILDSFMoW"].classes
    rows = [
        {
            "split": "seq" if i % 5 == 3 else ("train", "val", "test")[i % 3],
            "category": classes[i % 62],
            "country_code": codes[i % 7],
            "timestamp": "2012-01-01T00:00:00Z",
        }
        for i in range(62 * 6)
    ]
    frame = pd.DataFrame(rows)
    root.mkdir(parents=True)
    frame.to_csv(root / "rgb_metadata.csv", index=False)
    pd.DataFrame(
        [
            {"alpha-2": c[:2], "alpha-3": c, "region": r}
            for c, r in COUNTRIES.items()
            if r is not None
        ]
    ).to_csv(root / "country_code_mapping.csv", index=False)
    for i in range(len(rows)) if images else ():
        put(root / "images" / f"rgb_img_{i}.png", shade=i % 5)
    return frame


def places_tree(root, folders, per_folder=2):
    """A folder of images for each of `folders`, numbered in an order that is not that of the names
    as text, and one more that belongs to no data set."""
    for shade, folder in enumerate((*folders, "domain_adaptation_ds/beach/bulldog")):
        for k in range(per_folder):
            put(root / folder / f"{k}.png", shade=shade % 6)


def known_tree(data_dir, name, per_class=2):
    "A known data set under its folder of `data_dir`; returns that folder."
    known = KNOWN[name]
    root = data_dir / known.folder
    if known.layout == "folders":
        folder_tree(root, known.domains, classes_of(name), per_class)
    elif known.layout == "places":
        places_tree(root, known.parts, per_class)
    else:
        {"camelyon": camelyon_tree, "fmow": fmow_tree}[known.layout](root)
    return root


def packed(folder, path):
    "A zip or tar.gz of everything in `folder`."
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for p in files:
                archive.write(p, p.relative_to(folder).as_posix())
    else:
        with tarfile.open(path, "w:gz") as archive:
            for p in files:
                archive.add(p, p.relative_to(folder).as_posix())
    return path


def cct20(folder, images=60):
    """CCT20 as LILA has it: a tar of images and one of five annotation files; returns (paths,
    tables)."""
    categories = [
        {"id": 1 + i, "name": c}
        for i, c in enumerate((*KNOWN["TerraIncognita"].classes, "car", "deer"))
    ]
    locations = (38, "43", 46, "100", 7)
    made = [
        {"id": f"i{k}", "file_name": f"{k:04d}.jpg", "location": locations[k % 5]}
        for k in range(images)
    ]
    notes = [
        {"id": f"a{k}{j}", "image_id": f"i{k}", "category_id": 1 + (k // 5 + j) % 12}
        for k in range(images)
        for j in range(1 + k % 3)
    ] + [{"id": "again", "image_id": "i0", "category_id": 1}]
    tables = [
        {
            "categories": categories,
            "images": made[s::5],
            "annotations": [a for a in notes if a["image_id"] in {m["id"] for m in made[s::5]}],
        }
        for s in range(5)
    ]
    for m in made:
        put(
            folder / "a" / "eccv_18_all_images_sm" / m["file_name"],
            picture("jpg", int(m["file_name"][:4]) % 6),
        )
    for split, table in zip(("train", "cis_val", "cis_test", "trans_val", "trans_test"), tables):
        put(
            folder / "b" / "eccv_18_annotation_files" / f"{split}_annotations.json",
            json.dumps(table).encode(),
        )
    return [
        packed(folder / "a", folder / "images.tar.gz"),
        packed(folder / "b", folder / "annotations.tar.gz"),
    ], tables


def evaluation_transform(resolution):
    "torchvision's transform from an image to a normalised tensor, without randomness."
    T = import_torchvision().transforms
    return T.Compose([T.Resize((resolution, resolution)), T.ToTensor(), T.Normalize(MEAN, STD)])


def training_transform(resolution, resize_first=False):
    "torchvision's transform with augmentation, which draws from the global generator."
    T = import_torchvision().transforms
    steps = picture_transform(resolution, resize_first).transforms
    return T.Compose([*steps, T.ToTensor(), T.Normalize(MEAN, STD)])
