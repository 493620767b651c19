"""States: every type survives, and no damage goes unnoticed."""

import os
import subprocess
import sys

import pytest
import torch

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.training.checkpoint_io import is_sealed, load_state, save_state, sealed


def test_state_keeps_every_type_and_dtype(tmp_path):
    state = {
        "t": [torch.arange(3, dtype=torch.uint8), torch.randn(2, 2).half(), torch.tensor(3.0)],
        "d": {0: {"step": 1}, "x": None},
        "n": [2**60, 0.1, "s", True],
        "empty": {},
        "shared": None,
    }
    shared = torch.randn(4)
    state["shared"] = [
        shared,
        shared[1:3],
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ]
    save_state(tmp_path / "s", state)
    back = load_state(tmp_path / "s")
    assert back["d"] == state["d"]
    assert back["n"] == state["n"]
    assert back["empty"] == {}
    for a, b in zip(state["t"] + state["shared"], back["t"] + back["shared"]):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype
    assert b"pickle" not in (tmp_path / "s").read_bytes()


def test_cut_state_is_one_clear_error(tmp_path):
    save_state(tmp_path / "s", {"a": torch.zeros(100)})
    content = (tmp_path / "s").read_bytes()
    for cut in (b"", content[:4], content[: len(content) // 2], b"x" * 50):
        (tmp_path / "s").write_bytes(cut)
        with pytest.raises(HmoeError, match="not a saved state"):
            load_state(tmp_path / "s")


def test_a_seal_is_of_the_whole_file():
    content = sealed({"w": torch.arange(3.0)}, note="x")
    assert is_sealed(content)
    for place in (0, len(content) // 2, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        assert not is_sealed(bytes(changed))
    assert not is_sealed(content[:-1])


WRITE = """
import sys, torch
from hmoe_repro.training.checkpoint_io import sealed
names = sys.argv[1].split()
tensors = {n: torch.full((len(n),), ord(n[0])) for n in names} | {"x": torch.ones(2).half()}
sys.stdout.buffer.write(sealed(tensors, **{n: f"the \u00e4 of {n}" for n in names}))
"""


@pytest.mark.slow
def test_equal_content_is_equal_bytes_in_any_order_and_process():
    written = set()
    for seed, names in enumerate(
        ("run mode names tree", "tree mode run names", "names tree run mode")
    ):
        words = [sys.executable, "-c", WRITE, names]
        told = subprocess.run(
            words, env={**os.environ, "PYTHONHASHSEED": str(seed)}, capture_output=True, check=True
        )
        written.add(told.stdout)
    (content,) = written
    assert is_sealed(content)
    assert content.index(b'"mode":"the \xc3\xa4') < content.index(b'"run":')
