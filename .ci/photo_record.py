"""Measure `hmoe discover` and `--serve` on folders of photographs: results/bench-photos.json.

    HMOE_DATA=FOLDER python .ci/photo_record.py [STAGE ...]
    python .ci/photo_record.py --table

Without a stage all that the record lacks are measured, each in a process of its own. Times are of
the processor, because other programs may run. Each stage has the commit that it was measured at, so
the code must be committed. docs/discover.md states numbers of this record, and
tests/test_photo_record.py compares them. `--table` writes the table of that page.
"""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "results" / "bench-photos.json"
BEFORE = ROOT / "results" / "bench-groupings.json"  # trials before the work on photographs
PAGE = ROOT / "docs" / "discover.md"
CODE = ("hmoe_repro", ".ci/photo_record.py", "tests/phone_folder.py")
DRAWS = 3
FOUR_STYLES = ("photographs and drawings, four styles", "digits, four styles")
ONE_STYLE = ("photographs alone", "plain digits alone")
COUNT = 700
STAGES = {
    **{
        f"{name}, draw {draw}": ("group", name, draw)
        for draw in range(DRAWS)
        for name in FOUR_STYLES
    },
    "corrected": ("correct",),
    "phone": ("phone",),
    "many": ("many", 224),
    "many, small": ("many", 64),
    "serve": ("serve", 10_000),
    "reading": ("reading", 40),
    **{
        f"{name}, draw {draw}": ("group", name, draw) for draw in range(DRAWS) for name in ONE_STYLE
    },
}


def clean_commit() -> str:
    "Return the commit of the code, twelve digits; end the program if the code has changed since."

    def git(*arguments):
        return subprocess.check_output(["git", "-C", str(ROOT), *arguments], text=True).strip()

    changed = git("status", "--porcelain", "--", *CODE)
    if changed:
        sys.exit(f"commit these changes first, so that the record can name its code:\n{changed}")
    return git("rev-parse", "--short=12", "HEAD")


def used() -> float:
    "Return the seconds of processor time of this process and of its ended children."
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def peak_megabytes() -> float:
    "Return the largest resident memory of this process, in MB."
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def scores(found, seconds: float) -> dict:
    "Return the numbers of findings that the record keeps."
    from hmoe_repro.apps.discover import found_domains, summarise_findings

    summary = summarise_findings(found)
    names = ("agreement", "pairs", "nmi_domain", "nmi_class", "recognised", "held_out", "between")
    kept = {name: summary.get(name) for name in names}
    return kept | {
        "images": len(found.images),
        "groups": len(summary["groups"]),
        "found": bool(found_domains(summary)),
        "cpu_seconds": seconds,
        "peak_megabytes": peak_megabytes(),
    }


def measured(folder, labels=None, **settings):
    "Group a folder of which nothing is known; return the findings and seconds of processor time."
    from hmoe_repro.apps.discover import discover

    os.environ["HMOE_CACHE"] = str(Path(folder).parent / "cache")
    before = used()
    found = discover(folder, labels, "cpu", restarts=1, **settings)
    return found, used() - before


def group(work: Path, name: str, draw: int) -> dict:
    "Group a folder of known styles."
    from hmoe_repro.bench.grouping_trials import write_folder

    labels = write_folder(name, work / "images", COUNT, draw)
    found, seconds = measured(work / "images", labels, seed=draw)
    return scores(found, seconds)


def correct(work: Path) -> dict:
    "Group photographs and drawings, and train again with their styles as groups."
    import pandas as pd

    from hmoe_repro.apps.discover import groups_csv
    from hmoe_repro.bench.grouping_trials import write_folder

    labels = write_folder(FOUR_STYLES[0], work / "images", COUNT, 0)
    found, first = measured(work / "images", labels)
    (work / "groups.csv").write_bytes(groups_csv(found))
    table = pd.read_csv(work / "groups.csv")
    styles = pd.read_csv(labels).set_index("file").domain
    table.assign(group=styles[table.file].to_numpy()).to_csv(work / "groups.csv", index=False)
    corrected, seconds = measured(work / "images", labels, groups=work / "groups.csv")
    return scores(corrected, seconds) | {"first_cpu_seconds": first}


def phone(work: Path) -> dict:
    "Group a made-up folder of a telephone, with all that goes wrong in one."
    import pandas as pd

    sys.path.insert(0, str(ROOT / "tests"))
    from phone_folder import make_phone_folder

    planted = make_phone_folder(work / "phone")
    labels = pd.DataFrame(planted.styles.items(), columns=["file", "domain"])
    labels = labels[~labels.file.isin(planted.damaged)]
    labels.to_csv(work / "labels.csv", index=False)
    found, seconds = measured(work / "phone", work / "labels.csv")
    kinds = found.quality.counts
    left_out = [entry.file for entry in found.left_out]
    return scores(found, seconds) | {"findings": kinds, "left_out": left_out}


def fill(folder: Path, count: int, size: tuple[int, int], different: int):
    "Write `count` photographs by name, of which `different` are made and the others are links."
    import numpy as np

    sys.path.insert(0, str(ROOT / "tests"))
    from phone_folder import STYLES, make_photograph

    folder.mkdir()
    generator = np.random.default_rng(0)
    for i in range(count):
        path = folder / f"IMG_{i:05d}.jpg"
        if i < different:
            image = make_photograph(generator, STYLES[i % len(STYLES)])
            image.resize(size).save(path, quality=90)
        else:
            os.link(folder / f"IMG_{i % different:05d}.jpg", path)


def many(work: Path, resolution: int) -> dict:
    "Group all images of PACS without their subjects, and write the page."
    import shutil

    import pandas as pd

    from hmoe_repro.apps.discover import save_findings
    from hmoe_repro.data.registry import load_dataset

    folder = work / "photographs"
    folder.mkdir()
    data = load_dataset("PACS")
    styles = []
    for domain, files in zip(data.domain_names, data.tree.files):
        for file in files:
            name = f"IMG_{len(styles):05d}.jpg"
            shutil.copy(data.tree.root / file, folder / name)
            styles.append((name, domain))
    labels = work / "labels.csv"
    pd.DataFrame(styles, columns=["file", "domain"]).to_csv(labels, index=False)
    before = peak_megabytes()
    found, seconds = measured(folder, labels, classes=False, resolution=resolution)
    grouped = peak_megabytes()
    (work / "report").mkdir()
    started = used()
    page = save_findings(found, folder, work / "report")
    page_seconds = used() - started
    return scores(found, seconds) | {
        "resolution": resolution,
        "before_megabytes": before,
        "grouped_megabytes": grouped,
        "page_cpu_seconds": page_seconds,
        "page_megabytes": page.stat().st_size / 1e6,
        "findings": found.quality.counts,
    }


def status_of(process: int) -> tuple[float, float]:
    "Return the seconds of processor time and the largest memory in MB of a running process."
    ticks = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    status = Path(f"/proc/{process}/status").read_text()
    kilobytes = re.search(r"VmHWM:\s+(\d+)", status)
    assert kilobytes
    seconds = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return seconds, int(kilobytes[1]) * 1024 / 1e6


def serve(work: Path, count: int) -> dict:
    "Serve the page of many photographs of 12 megapixels, and ask for 200 of them."
    import pandas as pd

    from hmoe_repro.apps.own_images import image_files, write_corrected_groups

    folder = work / "photographs"
    output = work / "report"
    fill(folder, count, (4000, 3000), 20)
    files = image_files(folder)
    output.mkdir()
    names = [f"group {i % 3 + 1}" for i in range(count)]
    table = pd.DataFrame({"file": files, "group": names, "found": ["group 1", *names[:-1]]})
    write_corrected_groups(output / "groups.csv", table)
    command = [sys.executable, "-m", "hmoe_repro", "discover", str(folder), "--output", str(output)]
    os.environ["HMOE_CACHE"] = str(work / "cache")
    started = time.monotonic()
    with subprocess.Popen([*command, "--serve"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = ""
        while not address.startswith("http://"):
            address = process.stdout.readline()

        def ask(path):
            with urllib.request.urlopen(address.strip() + path, timeout=120) as answer:
                return answer.read()

        for path in ("", "images", "thumbnail/0"):
            assert ask(path)
        shown = time.monotonic() - started
        cpu, _ = status_of(process.pid)
        for number in range(1, 200):
            ask(f"thumbnail/{number}")
        after, memory = status_of(process.pid)
        process.terminate()
    return {
        "images": count,
        "seconds_to_first_picture": shown,
        "cpu_seconds_to_first_picture": cpu,
        "cpu_seconds_of_a_picture": (after - cpu) / 199,
        "peak_megabytes": memory,
    }


def reading(work: Path, count: int) -> dict:
    """Read photographs of 12 megapixels as inputs of 224 pixels, whole and reduced.

    Three rounds, in which torchvision's loader and ours take turns, in one process with one thread.
    Processor times are medians.
    """
    import statistics

    import torch

    from hmoe_repro.core.devices import import_torchvision
    from hmoe_repro.data.image_folder import scan_tree
    from hmoe_repro.data.loader import ImageDataset
    from hmoe_repro.data.transforms import MEAN, STD

    torch.set_num_threads(1)
    torchvision = import_torchvision()
    os.environ["HMOE_CACHE"] = str(work / "cache")
    place = work / "data" / "telephone"
    place.mkdir(parents=True)
    fill(place / "any", count, (4000, 3000), count)
    resolution = 224
    transforms = torchvision.transforms
    steps = [transforms.Resize((resolution, resolution)), transforms.ToTensor()]
    steps.append(transforms.Normalize(MEAN, STD))
    folder = torchvision.datasets.ImageFolder(str(place), transforms.Compose(steps))
    whole = ImageDataset(scan_tree(work / "data"), resolution, workers=0)
    started = used()
    assert len(whole.labels[0]) == count  # every file is examined once
    examined = used() - started
    reduced = whole.with_options(options={"decoding": "reduced"})
    every = torch.arange(count)
    ways = {
        "torchvision": lambda: next(iter(torch.utils.data.DataLoader(folder, count)))[0],
        "whole": lambda: whole.inputs(0, every),
        "reduced": lambda: reduced.inputs(0, every),
    }
    seconds = {way: [] for way in ways}
    inputs = {}
    for _ in range(3):
        for way, read in ways.items():
            started = used()
            inputs[way] = read()
            seconds[way].append(used() - started)
    assert torch.equal(inputs["torchvision"], inputs["whole"])
    medians = {way: statistics.median(times) / count for way, times in seconds.items()}
    difference = (inputs["whole"] - inputs["reduced"]).abs() * torch.tensor(STD)[:, None, None]
    return {
        "images": count,
        "resolution": resolution,
        "cpu_seconds_of_an_image": medians | {"examined": examined / count},
        "mean_difference": 255 * difference.mean().item(),
    }


def run_stage(name: str) -> dict:
    "Measure a stage in this process, with runs and the cache of its images in a temporary folder."
    from hmoe_repro.core.environment import environment

    commit = clean_commit()
    task, *arguments = STAGES[name]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        os.environ["HMOE_RUNS"] = str(work / "runs")
        warnings.simplefilter("ignore")
        result = globals()[task](work, *arguments)
        others = max(0.0, os.getloadavg()[0] - 1)
        facts = environment("cpu") | {"commit": commit}
        return result | {"other_processes": others, "environment": facts}


def read_record() -> dict:
    "Return the record, stage -> numbers."
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


TITLES = {
    "phone": "made-up phone, three styles",
    "many": "all of PACS, four styles",
    "many, small": "all of PACS, four styles, at 64 pixels",
}
HEAD = "| folder | photographs | groups | NMI before | NMI | pairs | processor time | memory |"


def nmi(value: float | None) -> str:
    "Format an NMI, with a dash for folders of one style."
    return "–" if value is None else f"{value:.2f}".removeprefix("0")


def table_line(title: str, stage: dict | None, before: dict | None) -> str:
    "Return the line of a folder in the table of docs/discover.md."
    cells = [title]
    nmi_before = nmi(before["nmi_domain"]) if before else "not measured"
    if stage is None:
        cells += ["not measured", "", nmi_before, "", "", "", ""]
    else:
        together, without = stage["pairs"]
        cells += [
            f"{stage['images']:,}",
            str(stage["groups"]) if stage["found"] else "none reliable",
            nmi_before,
            nmi(stage["nmi_domain"]),
            f"{nmi(together)} ({nmi(without)})",
            f"{stage['cpu_seconds']:.0f} s",
            f"{stage['peak_megabytes'] / 1000:.1f} GB",
        ]
    return f"| {' | '.join(cells)} |"


def table_lines() -> list[str]:
    "Return the table of docs/discover.md: a line for each folder that is grouped."
    record = read_record()
    before = {}
    for trial in json.loads(BEFORE.read_text())["trials"]:
        if trial["method"] == "features":
            before[f"{trial['folder']}, draw {trial['draw']}"] = trial
    lines = [HEAD, "|---|---:|---:|---:|---:|---:|---:|---:|"]
    for name, (task, *_) in STAGES.items():
        if task in ("group", "phone", "many"):
            title = TITLES.get(name, name)
            lines.append(table_line(title, record.get(name), before.get(name)))
    return lines


def write_table():
    "Replace the table of docs/discover.md."
    text = PAGE.read_text(encoding="utf-8")
    start = text.index(HEAD)
    end = text.index("\n\n", start)
    PAGE.write_text(text[:start] + "\n".join(table_lines()) + text[end:], encoding="utf-8")


def main(names: list[str]):
    "Measure the named stages, or all that the record lacks."
    clean_commit()
    for name in names or [name for name in STAGES if name not in read_record()]:
        command = [sys.executable, __file__, "--in-this-process", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(f"{name}: failed")
            continue
        record = read_record()  # another stage may have ended
        record[name] = json.loads(done.stdout.splitlines()[-1])
        ordered = {stage: record[stage] for stage in STAGES if stage in record}
        RECORD.write_text(json.dumps(ordered, indent=1) + "\n")
        print(name, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in-this-process"]:
        print(json.dumps(run_stage(sys.argv[2])))
    elif sys.argv[1:] == ["--table"]:
        write_table()
    else:
        main(sys.argv[1:])
