"""Every library notebook runs on a CPU, offline and without data, in under a minute,
and shows what is stored in it. A notebook of which nothing changed since its outputs were stored
(nbs/executed.json) is executed by `make test-slow` alone.

The kernels are forked from a process that has imported the large libraries, so START seconds are
added. Here a notebook shares the processors with other tests, which may make it BESIDE times as
slow. The minute is one of the machine on which ON_REFERENCE was measured: `slowness` compares."""

import functools
import json
import os
import time

import pytest
import torch
from notebooks import LIBRARY, ROOT, ci, for_each, name_of, read

LIMIT, START, BESIDE = 60, 5, 2
NOWHERE = "http://127.0.0.1:9"
ON_REFERENCE = 0.95  # seconds of a busy processor (2 GHz server) for the training of `slowness`


@functools.cache
def slowness():
    "How many times as long as on the reference a fixed piece of training takes here; at least 1."
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 32, 3, padding=1),
        torch.nn.ReLU(),
    )
    images = torch.ones(64, 3, 28, 28)
    start = time.process_time()
    for _ in range(20):
        layers(images).square().mean().backward()
    seconds = time.process_time() - start
    torch.set_num_threads(threads)
    return max(1.0, seconds / ON_REFERENCE)


def kinds(cell):
    "What sort of outputs a cell has, in order; a stream counts once, however the kernel cut it."
    found = [
        (o["output_type"], *sorted(o.get("data", {})), o.get("name"))
        for o in cell["outputs"]
        if o.get("name") != "stderr"
    ]
    return [k for i, k in enumerate(found) if i == 0 or k != found[i - 1] or k[0] != "stream"]


CHANGED = [pytest.param(p, marks=() if ci.is_stale(p) else pytest.mark.slow) for p in LIBRARY]


@for_each(LIBRARY)
def test_no_notebook_was_edited_without_being_executed(path):
    assert not ci.is_edited(path), f"make notebooks, or .ci/notebooks.py {path.stem}"


@pytest.mark.usefixtures("warm_kernels")
@pytest.mark.parametrize("path", CHANGED, ids=lambda p: name_of(p))
def test_it_runs_within_a_minute_and_shows_what_is_stored(
    path, shared_tree, monkeypatch, tmp_path_factory
):
    for name in ("HMOE_DATA", "HMOE_RESULTS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, NOWHERE)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1,localhost")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(shared_tree))
    # A kernel takes up to four seconds to end. Killed, it leaves its temporary files behind.
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("n")))
    limit = slowness() * BESIDE * LIMIT
    start = time.perf_counter()
    executed = ci.run_notebook(
        shared_tree / path.relative_to(ROOT), timeout=int(2 * limit), shutdown="immediate"
    )
    seconds = time.perf_counter() - start
    stored = {c["id"]: kinds(c) for c in read(path)["cells"] if c["cell_type"] == "code"}
    assert {c["id"]: kinds(c) for c in executed.cells if c.cell_type == "code"} == stored, (
        "stored outputs are not those of this source: make notebooks"
    )
    assert START + seconds < limit, f"{seconds:.0f} s on {os.cpu_count()} processors"


def test_printed_text_is_stored_whole_however_the_kernel_cut_it():
    printed = [{"name": "stdout", "output_type": "stream", "text": text} for text in "abc"]
    picture = {"output_type": "display_data", "data": {"image/png": "x"}}
    whole = printed[0] | {"text": "ab"}
    assert ci.joined_streams([*printed[:2], picture, printed[2]]) == [whole, picture, printed[2]]


def test_what_makes_stored_outputs_old(tmp_path, monkeypatch):
    "The code of the notebook, a module behind it however far, a file that it read, the versions."
    monkeypatch.setattr(ci, "ROOT", tmp_path)
    monkeypatch.setattr(ci, "EXECUTED", tmp_path / "executed.json")
    for cached in ("imported_directly", "all_executed"):  # what they keep is another tree's
        monkeypatch.setattr(ci, cached, getattr(ci, cached).__wrapped__)
    for name, text in {
        "hmoe_repro/__init__.py": "",
        "hmoe_repro/core.py": "A = 1",
        "hmoe_repro/data/base.py": "from ..core import A",
        "hmoe_repro/other.py": "B = 1",
        "results/a.jsonl": "{}",
        "constraints.txt": "torch==1",
        "nbs/1_x/01_y.ipynb": json.dumps(
            {"cells": [{"cell_type": "code", "source": ["from hmoe_repro.data import base"]}]}
        ),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    path = tmp_path / "nbs/1_x/01_y.ipynb"

    def seen():
        return ci.is_edited(path), ci.is_stale(path)

    assert seen() == (True, True)
    entry = {"source": ci.source_digest(path), "reads": ["results/*.jsonl"]}
    entry["inputs"] = ci.inputs_digest(path, entry["reads"])
    ci.EXECUTED.write_text(json.dumps({"1_x/01_y": entry}))
    assert seen() == (False, False)
    for name, after in {
        "hmoe_repro/other.py": (False, False),
        "hmoe_repro/core.py": (False, True),
        "results/a.jsonl": (False, True),
        "constraints.txt": (False, True),
    }.items():
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(before + " ")
        assert seen() == after, name
        (tmp_path / name).write_text(before)
    assert seen() == (False, False)
    (tmp_path / "results/b.jsonl").write_text("{}")
    assert seen() == (False, True)
    path.write_text(path.read_text().replace("base", "base as b"))
    assert seen() == (True, True)
