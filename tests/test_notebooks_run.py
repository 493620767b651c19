"""Every library notebook runs on a CPU, offline and without data, in under a minute,
and shows what is stored in it.

The kernels are forked from a process that has imported the large libraries, so START seconds are
added. Here a notebook shares the processors with other tests, which may make it BESIDE times as
slow."""

import os
import time

import pytest
from notebooks import LIBRARY, ROOT, ci, name_of, read

LIMIT, START, BESIDE = 60, 5, 2
NOWHERE = "http://127.0.0.1:9"


def kinds(cell):
    "What sort of outputs a cell has, in order; a stream counts once, however the kernel cut it."
    found = [
        (o["output_type"], *sorted(o.get("data", {})), o.get("name"))
        for o in cell["outputs"]
        if o.get("name") != "stderr"
    ]
    return [k for i, k in enumerate(found) if i == 0 or k != found[i - 1] or k[0] != "stream"]


@pytest.mark.usefixtures("warm_kernels")
@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
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
    start = time.perf_counter()
    executed = ci.run_notebook(
        shared_tree / path.relative_to(ROOT), timeout=2 * BESIDE * LIMIT, shutdown="immediate"
    )
    seconds = time.perf_counter() - start
    stored = {c["id"]: kinds(c) for c in read(path)["cells"] if c["cell_type"] == "code"}
    assert {c["id"]: kinds(c) for c in executed.cells if c.cell_type == "code"} == stored, (
        "stored outputs are not those of this source: make notebooks"
    )
    assert START + seconds < BESIDE * LIMIT, f"{seconds:.0f} s on {os.cpu_count()} processors"


def test_there_are_notebooks_to_run():
    assert len(LIBRARY) >= 5
