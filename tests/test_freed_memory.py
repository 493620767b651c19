"""A process that keeps freed memory: fewer pages from the system, and the user's choice is kept."""

import ctypes
import signal
import subprocess
import sys
from multiprocessing import Pipe

import pytest

from hmoe_repro.core import freed_memory
from hmoe_repro.core.freed_memory import keep_freed_memory
from hmoe_repro.studies.worker import serve_runs

PAGES = """
import resource
from hmoe_repro.core.freed_memory import keep_freed_memory

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        bytearray(b"1") * 2**26
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

pages()
before = pages()
print(int(keep_freed_memory()))
pages()
print(before, pages())
"""


@pytest.fixture
def calls(monkeypatch):
    "The calls of `mallopt` in a process without settings of the allocator."
    for name in freed_memory._CHOSEN_BY_USER:
        monkeypatch.delenv(name, raising=False)
    made = []
    library = type("Library", (), {"mallopt": staticmethod(lambda *call: made.append(call) or 1)})
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(sys, "platform", "linux")
    return made


def test_a_second_allocation_gets_its_pages_from_the_first():
    said = subprocess.check_output([sys.executable, "-c", PAGES], text=True).split()
    if said[0] == "0":
        pytest.skip("another allocator than glibc's, or one that is set by the environment")
    before, after = int(said[1]), int(said[2])
    assert before > 5 * 2**26 / 2**16  # pages of at most 64 KiB
    assert after < before / 10


def test_both_thresholds_are_set(calls):
    assert keep_freed_memory()
    assert calls == [(-1, 2**30), (-3, 2**30)]  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_a_choice_of_the_user_is_kept(calls, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert not keep_freed_memory()
    assert not calls


def test_nothing_is_set_without_glibc(calls, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not keep_freed_memory()
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", None)  # not asked
    assert not keep_freed_memory()


def test_a_worker_keeps_freed_memory(calls):
    ours, theirs = Pipe()
    ours.close()  # so that the worker ends at once
    before = signal.getsignal(signal.SIGINT)
    try:
        serve_runs(theirs, "runs", "cpu", None, "")
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(calls) == 2
