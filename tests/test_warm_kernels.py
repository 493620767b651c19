"""A forked kernel is an ordinary one in all that a notebook can see, and ends when it should."""

import os
import signal
import subprocess
import sys
import time

import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

SEEN = (
    """
import os, sys
loaded = "torch" in sys.modules
import matplotlib.pyplot as plt
import torch
sorted((k, v) for k, v in os.environ.items() if not k.startswith(("KMP_", "JPY_", "JUPYTER_")))
""",
    """
print(loaded)
""",
    """
[p for p in sys.path if p], os.getcwd(), sys.argv[1:2], plt.get_backend(), torch.get_num_threads()
""",
    """
import hmoe_repro
hmoe_repro.__file__, sys.stdout.__class__.__name__, __name__
""",
    """
plt.plot([1, 2]); plt.show()
""",
)


def outputs(folder, **environment):
    "What the cells of SEEN show in a kernel started in `folder`."
    page = new_notebook(cells=[new_code_cell(source) for source in SEEN])
    NotebookClient(
        page, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute(env=os.environ | environment)
    return [[o.get("text") or o["data"].get("text/plain") for o in c.outputs] for c in page.cells]


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are forked on Linux only")
class TestForked:
    def test_a_notebook_sees_what_it_sees_in_an_ordinary_kernel(
        self, warm_kernels, monkeypatch, tmp_path, root
    ):
        monkeypatch.setenv("PYTHONPATH", str(root))
        monkeypatch.delenv("MPLBACKEND")
        forked = outputs(tmp_path, MINE="1")
        monkeypatch.delenv("JUPYTER_PATH")
        fresh = outputs(tmp_path, MINE="1")
        assert (forked.pop(1), fresh.pop(1)) == (["True\n"], ["False\n"])
        assert forked == fresh
        assert str(root) in fresh[1][0]
        assert "'MINE', '1'" in fresh[0][0]

    @pytest.mark.slow
    def test_what_libraries_read_when_imported_makes_an_ordinary_kernel(
        self, warm_kernels, tmp_path
    ):
        shown = outputs(tmp_path, OMP_NUM_THREADS="2", MKL_NUM_THREADS="2")
        assert shown[1] == ["False\n"]
        assert shown[2][0].endswith(" 2)")

    def test_it_ends_with_whoever_started_it(self, warm_kernels):
        manager, client = start_new_kernel()
        shown = []
        client.execute_interactive(
            "import os; print(os.getpid())",
            timeout=30,
            output_hook=lambda m: shown.append(m["content"].get("text")),
        )
        child = int("".join(filter(None, shown)))
        client.stop_channels()
        os.kill(manager.provisioner.pid, signal.SIGKILL)
        until = time.monotonic() + 20
        while alive(child) and time.monotonic() < until:
            time.sleep(0.05)
        assert not alive(child)
        manager.shutdown_kernel(now=True)


def alive(child):
    "Is a process there that is not a zombie?"
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(child)], capture_output=True, text=True)
    return bool(done.stdout.strip()) and not done.stdout.startswith("Z")
