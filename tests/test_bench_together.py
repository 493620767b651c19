"""Updates a second of several processes on one device: their sum, their table, and a failure."""

import itertools
import time
from types import SimpleNamespace

import pytest

from hmoe_repro.bench import side_by_side
from hmoe_repro.bench.side_by_side import (
    SIDE_BY_SIDE,
    count_updates,
    together_entries,
    together_table,
    updates_together,
)
from hmoe_repro.bench.timing import SCALES, scale_of
from hmoe_repro.core.errors import HmoeError

TINY = scale_of("together", "tiny")


def test_updates_are_counted_from_the_end_of_the_wait(monkeypatch):
    ticks = itertools.count(100.0, 0.15)  # seconds at each look at the clock
    monkeypatch.setattr(side_by_side, "timer", lambda: next(ticks))
    updates = []

    class Counter:
        def to(self, device):
            return self

        train = lambda self: self  # noqa: E731
        update = lambda self, minibatches: updates.append(len(minibatches))  # noqa: E731

    monkeypatch.setattr(side_by_side, "get_algorithm", lambda name: lambda *arguments: Counter())
    size = SimpleNamespace(**vars(TINY) | {"seconds": 0.4, "warm_up": 3, "block": 5})
    waited_after = []
    rate = count_updates("ERM", size, wait=lambda: waited_after.append(len(updates)))
    # looks at 0.15, 0.30 and 0.45 s, five updates before each
    assert rate == pytest.approx(15 / 0.45)
    assert waited_after == [3]
    assert updates == [TINY.domains] * (3 + 15)


def test_rates_of_all_processes_are_added_for_each_task(monkeypatch):
    use_threads(monkeypatch)
    monkeypatch.setattr(side_by_side, "count_updates", lambda name, *rest, wait: float(len(name)))
    tasks = [("ERM", 1), ("DANN", 3), ("ERM", 2), ("ERM", 3)]
    assert updates_together(tasks, TINY) == [3.0, 12.0, 6.0, 9.0]


def test_a_process_that_fails_ends_all_of_them(monkeypatch):
    def count(name, size, device, wait):
        if name == "DANN":
            raise RuntimeError("out of memory")
        wait()
        return 1.0

    use_threads(monkeypatch)
    monkeypatch.setattr(side_by_side, "count_updates", count)
    started = time.monotonic()
    with pytest.raises(HmoeError, match="one of 2 processes on cpu failed: .*Error"):
        updates_together([("ERM", 2), ("DANN", 1), ("ERM", 2)], TINY)
    assert time.monotonic() - started < side_by_side.PATIENCE / 10


def test_a_process_that_dies_is_noticed(monkeypatch):
    use_threads(monkeypatch)
    monkeypatch.setattr(side_by_side, "_take_part", lambda index, *rest: None)  # no answer
    made = Threads.get_context("spawn")
    monkeypatch.setattr(made.Process, "exitcode", -9)
    monkeypatch.setattr(Threads, "get_context", staticmethod(lambda method: made))
    with pytest.raises(HmoeError, match="one of 2 processes on cpu failed: .* exit code -9"):
        updates_together([("ERM", 2)], TINY)


def test_rounds_alternate_and_keep_their_order(monkeypatch):
    asked = []

    def rates(tasks, size, device):
        asked.extend(tasks)
        return [float(i) for i, _ in enumerate(tasks)]

    monkeypatch.setattr(side_by_side, "updates_together", rates)
    size = SimpleNamespace(algorithms=["A", "B"], counts=[1, 4], seconds=1)
    measured = SimpleNamespace(size=size, rounds=2, device="cpu", say=lambda line: None)
    found = together_entries(measured)["updates_per_second"]
    assert asked == [("A", 1), ("A", 4), ("B", 1), ("B", 4), ("A", 4), ("A", 1), ("B", 4), ("B", 1)]
    assert found == {
        "A": {"1": [0.0, 5.0], "4": [1.0, 4.0]},
        "B": {"1": [2.0, 7.0], "4": [3.0, 6.0]},
    }


def test_ratios_are_those_within_a_round():
    record = {"updates_per_second": {"ERM": {"1": [10.0, 40.0, 10.0], "4": [30.0, 40.0, 35.0]}}}
    four = together_table(record).set_index("processes").loc[4]
    assert four["updates a second"] == 35.0
    assert four["times one"] == 3.0  # of 3, 1 and 3.5; of the medians it were 3.5
    assert four["range"] == "1.00–3.50"


@pytest.mark.parametrize("scale", SCALES["together"])
def test_every_scale_measures_one_process_first(scale):
    counts = scale_of("together", scale).counts
    assert counts[0] == 1
    assert sorted(set(counts)) == counts


@pytest.mark.slow
def test_two_real_processes():
    record = SIDE_BY_SIDE.run(1, "tiny", say=lambda line: None)
    rates = record["updates_per_second"]["ERM"]
    assert {count: len(values) for count, values in rates.items()} == {"1": 1, "2": 1}
    assert min(rates["1"] + rates["2"]) > 0


class Threads:
    "Threads in place of processes: they share the functions that a test has replaced."

    @staticmethod
    def get_context(method):
        import queue
        import threading

        class Thread(threading.Thread):
            exitcode = None

            def kill(self):
                assert not self.is_alive()

        return SimpleNamespace(Queue=queue.Queue, Barrier=threading.Barrier, Process=Thread)


def use_threads(monkeypatch):
    "Let threads of this process do what new processes would."

    def begin(variables, module, function, arguments):
        assert variables["OMP_NUM_THREADS"] == "1"
        getattr(side_by_side, function)(*arguments)

    monkeypatch.setattr(side_by_side, "multiprocessing", Threads)
    monkeypatch.setattr(side_by_side, "begin_process", begin)
