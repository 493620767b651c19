"""What a GPU computes, against the CPU and against itself. Skipped where there is none; on one:

    python -m pytest tests/test_cuda.py

needs pytest and no plugin of it. What can be seen without a GPU is in test_elsewhere.py.
"""

from unittest.mock import patch

import pytest
import torch

from hmoe_repro.algorithms import FAMILIES, get_algorithm
from hmoe_repro.algorithms.conformance import small_network
from hmoe_repro.core.determinism import device_determinism
from hmoe_repro.core.seeds import random_state, restore_random_state, seed_everything
from hmoe_repro.data.registry import load_dataset
from hmoe_repro.networks.precision import set_precision
from hmoe_repro.studies.sweep import sweep
from hmoe_repro.training.checkpoint_io import load_state, save_state
from hmoe_repro.training.model import load_model
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.protocols import EVALUATION_BATCH, mode_accuracies
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore, outcome
from hmoe_repro.training.trainer import Trainer

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]
DEVICE = torch.device("cuda")
SHAPE, UPDATES = ((3, 16, 16), 4, 3), 20
every_algorithm = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(autouse=True)
def not_rounded():
    "As in a run of precision float32: no TF32, and cuDNN repeats itself."
    with device_determinism("float32", DEVICE):
        yield


def on_the_cpu(draw):
    "A function such as torch.rand that draws on the CPU, so that both devices get the same."
    return lambda *args, device=None, **kwargs: draw(*args, **kwargs).to(device or "cpu")


def made(name, device=DEVICE, precision="float32"):
    """An untrained algorithm with a tenth of its learning rate. At the whole of it, rounding alone
    (two memory layouts on one CPU) parts losses by up to 0.007 in 20 updates, for Adam's first
    steps have one length however small a gradient is; at a tenth by 0.00002 (ARM: 0.006)."""
    seed_everything(0)
    cls = get_algorithm(name)
    hparams = {"network": small_network(cls), "lr": cls.HPARAMS["lr"].default / 10}
    hparams |= {"drop_path": 0.0} if "drop_path" in cls.HPARAMS else {}  # drawn on the device
    algorithm = cls(*SHAPE, hparams)
    algorithm.total_steps = UPDATES
    set_precision(algorithm, precision)
    return algorithm.to(device).train()


def batches(device):
    draw = torch.Generator().manual_seed(1)
    one = lambda i: (
        (torch.rand(16, 3, 16, 16, generator=draw) + i / 3).to(device),
        torch.randint(4, (16,), generator=draw).to(device),
    )
    return [[one(i) for i in range(3)] for _ in range(UPDATES)]


def losses(name, device, precision="float32"):
    "The loss of each of 20 updates."
    algorithm = made(name, device, precision)
    found = []
    permute, rand = on_the_cpu(torch.randperm), on_the_cpu(torch.rand)
    alike = lambda x: torch.rand(x.shape, dtype=x.dtype, device=x.device)
    draws = {"randperm": permute, "rand": rand, "rand_like": alike}
    with patch.multiple(torch, **draws):
        for step, batch in enumerate(batches(device)):
            seed_everything(step)
            found.append(algorithm.update(batch)["loss"])
    return found


MOST = {"ARM": 0.02}  # by which losses may differ, relatively; 0.001 for all others


def near(ours, theirs, most=1e-3):
    worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours, theirs, strict=True))
    assert worst < most, f"losses differ by {worst:.2g}: {ours} and {theirs}"


@every_algorithm
def test_20_updates_are_those_of_the_cpu(name):
    near(losses(name, DEVICE), losses(name, "cpu"), MOST.get(name, 1e-3))


@pytest.mark.parametrize("name", ["ERM", "HMOE-DN", "IRM", "DANN"])
@pytest.mark.parametrize("precision, most", [("bf16", 0.1), ("tf32", 0.02)])
def test_lower_precision_trains_alike_and_not_the_same(name, precision, most):
    exact = losses(name, DEVICE)
    with device_determinism(precision, DEVICE):
        rounded = losses(name, DEVICE, precision)
    near(rounded, exact, most)
    if precision == "bf16":
        assert rounded != exact


def short_config(name="HMOE-DN", steps=12, **options):
    hparams = {"batch_size": 8, **options.pop("hparams", {})}
    options = {"network": small_network(get_algorithm(name))} | options
    return make_config(
        name,
        "DigitDomainsTiny",
        ["sketch"],
        hparams=hparams,
        steps=steps,
        checkpoint_frequency=5,
        **options,
    )


def trainer(asked):
    return Trainer(asked, load_dataset("DigitDomainsTiny", 0).to(DEVICE), DEVICE)


def weights(of):
    return [t.detach().cpu() for t in of.algorithm.state_dict().values()]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(weights(ours), weights(theirs), strict=True))


@pytest.mark.parametrize(
    "name, precision",
    [(n, "float32") for n in FAMILIES] + [("HMOE-DN", "bf16"), ("HMOE-DN", "tf32")],
)
def test_a_run_goes_on_to_the_bit(name, precision, tmp_path):
    asked = short_config(name, precision=precision)
    with device_determinism(precision, DEVICE):
        first = trainer(asked)
        for _ in range(6):
            first.update()
        first.evaluate()
        save_state(tmp_path / "state", first.state())
        second = trainer(asked)
        seed_everything(99)  # what must not matter, because the state brings its own
        second.load(load_state(tmp_path / "state"))
        second_draws = torch.rand(3, device=DEVICE)
        second.load(load_state(tmp_path / "state"))
        assert torch.equal(second_draws, torch.rand(3, device=DEVICE))
        second.load(load_state(tmp_path / "state"))
        for _ in range(6):
            second.update()
        first.load(load_state(tmp_path / "state"))
        for _ in range(6):
            first.update()
    assert same(first, second)
    assert first.losses.sums == second.losses.sums


def test_the_devices_generator_is_put_back():
    state = random_state(DEVICE)
    drawn = torch.rand(5, device=DEVICE)
    restore_random_state(state, DEVICE)
    assert torch.equal(drawn, torch.rand(5, device=DEVICE))


# SelfReg's random orders need the size of every class of a batch.
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "SelfReg"])
def test_an_update_waits_for_the_gpu_only_to_read_its_losses(name):
    going, tolist, read = trainer(short_config(name)), torch.Tensor.tolist, []
    for _ in range(3):
        going.update()  # what is made once may wait

    def allowed(tensor):
        if not tensor.is_cuda:
            return tolist(tensor)
        read.append(tensor.shape)
        torch.cuda.set_sync_debug_mode("default")
        try:
            return tolist(tensor)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    with patch.object(torch.Tensor, "tolist", allowed):
        torch.cuda.set_sync_debug_mode("error")
        try:
            going.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(read) == (6 if name == "EoA" else 1)


def test_a_hidden_transfer_would_be_found():
    value = torch.zeros(3, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError):
            value.sum().item()
        with pytest.raises(RuntimeError):
            torch.arange(3).to(DEVICE)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["ERM", "HMOE-DL", "ARM", "MTL"])
def test_accuracies_are_those_of_the_cpu(name):
    data, algorithm = load_dataset("DigitDomainsTiny", 0), made(name, "cpu")
    indices = torch.arange(len(data.labels[0])).repeat(3)
    assert len(indices) > 2 * EVALUATION_BATCH
    expected = mode_accuracies(algorithm, data, data.domain_names[0], indices)
    found = mode_accuracies(
        algorithm.to(DEVICE), data.to(DEVICE), data.domain_names[0], indices, DEVICE
    )
    most = 2.5 / len(indices)  # two images on the border between classes
    for mode in expected:
        assert found[mode] == pytest.approx(expected[mode], abs=most)


def test_runs_in_one_process_do_not_meet():
    alone, other = trainer(short_config("HMOE-DN")), trainer(short_config("ERM"))
    for _ in range(6):
        alone.update()
    mixed = trainer(short_config("HMOE-DN"))
    for _ in range(6):
        mixed.update()
        other.update()
    assert same(alone, mixed)


def test_runs_side_by_side_are_those_made_one_after_another(tmp_path):
    asked = [short_config(name) for name in ("ERM", "HMOE-DN", "HMOE-DL", "CORAL")]
    together, apart = RunStore(tmp_path / "together"), RunStore(tmp_path / "apart")
    results = sweep(asked, store=together, jobs=2, device="cuda")
    assert all(status == "complete" for status, _ in results.values()), results
    for one in asked:
        assert outcome(run(one, apart, "cuda")) == outcome(together.read(one.run_id))


def test_a_whole_run_ends_with_codes_and_a_model_that_loads(tmp_path):
    store, asked = RunStore(tmp_path), short_config("HMOE-DN")
    record = run(asked, store, "cuda")
    assert record["status"] == "complete", record["reason"]
    assert record["discovery"]["experts_used"] >= 1
    assert record["environment"]["device"] == record["environment"]["determinism"] == "cuda"
    algorithm, _ = load_model(asked.run_id, store=store)
    assert algorithm.predict(torch.rand(2, *algorithm.input_shape)).shape == (2, 10)


def test_tf32_is_used_only_where_it_is_asked_for():
    a, b = torch.rand(2, 256, 256, dtype=torch.float64)

    def error():
        return ((a.float().to(DEVICE) @ b.float().to(DEVICE)).double().cpu() - a @ b).abs().max()

    with device_determinism("float32", DEVICE):
        exact = error()
    with device_determinism("tf32", DEVICE):
        rounded = error()
    assert exact < 1e-3 < rounded
