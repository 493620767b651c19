"""What only a GPU would notice, noticed on the CPU: every algorithm's update and prediction with
its tensors on another device (see elsewhere.py), and an update of a run with what it carries."""

import pytest
import torch
from elsewhere import elsewhere

from hmoe_repro.algorithms import FAMILIES, get_algorithm
from hmoe_repro.algorithms.base import ERM
from hmoe_repro.algorithms.conformance import small_network
from hmoe_repro.data.registry import load_dataset
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.protocols import mode_accuracies
from hmoe_repro.training.trainer import Trainer

META = torch.device("meta")
# GMoE counts its experts' tokens, SelfReg and ADRMX the images of each class they draw from
READERS = ("GMoE", "SelfReg", "ADRMX")
NAMES = [name for name in FAMILIES if name not in READERS]
CASES = [(name, {}) for name in NAMES] + [
    (name, {"domainbed_compat": True})
    for name in NAMES
    if "domainbed_compat" in get_algorithm(name).HPARAMS
]
READS = {"EoA": 6}  # one for each of its models; all others one
# partners and weights, which are drawn on the CPU so that every device draws the same, in one copy
ARRIVALS = dict.fromkeys(("CutMix", "IntraDomainMixup", "MixStyle", "EFDMix"), 1)
every_case = pytest.mark.parametrize("name, hparams", CASES, ids=lambda v: v if v else "")


def moved(name, hparams):
    "An algorithm and a batch of three domains, there."
    cls = get_algorithm(name)
    algorithm = cls((3, 16, 16), 4, 3, {"network": small_network(cls), **hparams})
    batch = [
        (torch.rand(8, 3, 16, 16, device=META), torch.zeros(8, dtype=torch.long, device=META))
        for _ in range(3)
    ]
    return algorithm.to(META).train(), batch


@every_case
def test_an_update_stays_on_its_device_and_reads_its_losses_once(name, hparams):
    if name == "HDUVA":
        pytest.skip("the gradient of a gamma sample has no kernel for `meta`")
    algorithm, batch = moved(name, hparams)
    algorithm.total_steps = 4  # MetaReg's first updates are of its first phase, the last is not
    with elsewhere() as (mode, read):
        for count in (1, 2, 3):
            algorithm.update(batch)
            assert len(read) == count * READS.get(name, 1)
            assert mode.arrivals <= count * ARRIVALS.get(name, 0)


@every_case
def test_predicting_stays_on_its_device(name, hparams):
    if name == "MTL" and hparams:
        pytest.skip("it draws from a generator, which `meta` has none of")
    algorithm, batch = moved(name, hparams)
    algorithm.eval()
    with elsewhere() as (mode, read), torch.no_grad():
        logits = algorithm.predict_modes(batch[0][0])
    assert all(v.is_meta and v.shape == (8, 4) for v in logits.values())
    assert not read
    assert not mode.arrivals


def test_a_penalty_that_switches_on_stays_on_the_device_too():
    switches = {
        "IRM": "irm_penalty_anneal_iters",
        "VREx": "vrex_penalty_anneal_iters",
        "Fishr": "penalty_anneal_iters",
        "IB-IRM": "ib_penalty_anneal_iters",
        "EQRM": "eqrm_burnin_iters",
        "RDM": "rdm_penalty_anneal_iters",
        "TRM": "iters",
        "ERM++": "linear_steps",
        "iDAG": "dag_anneal_steps",
    }
    for name, switch in switches.items():
        algorithm, batch = moved(name, {switch: 1})
        with elsewhere() as (mode, read):
            for _ in range(3):
                algorithm.update(batch)
        assert len(read) == 3
        assert not mode.arrivals


def test_a_run_carries_its_indices_over_in_one_copy_and_reads_a_test_once():
    config = make_config(
        "HMOE-DL", "DigitDomainsTiny", ["sketch"], hparams={"batch_size": 4}, steps=9
    )
    data = load_dataset("DigitDomainsTiny", 0)
    with elsewhere() as (mode, read):
        trainer = Trainer(config, data.to(META), META)
        before = mode.arrivals
        for count in (1, 2):
            trainer.update()
            assert (mode.arrivals - before, len(read)) == (count, count)
        before, parts = mode.arrivals, torch.arange(50).repeat(3)
        mode_accuracies(trainer.algorithm, trainer.data, data.domain_names[0], parts, META)
        assert (mode.arrivals - before, len(read)) == (1, 3)
        assert len(parts) > 64


class Careless(ERM):
    """`made` says what goes wrong: a tensor made on the CPU, or a value that is read."""

    made = None

    def loss(self, minibatches):
        loss = super().loss(minibatches)["loss"]
        return {"loss": loss + self.made(minibatches[0][1])}


@pytest.mark.parametrize(
    "made",
    [
        lambda y: torch.zeros(8).mul(y).sum(),
        lambda y: int(y.max()),
        lambda y: torch.bincount(y).sum(),
        lambda y: y.cpu().sum(),
    ],
    ids=["a CPU tensor", "a read", "bincount", "a copy to the CPU"],
)
def test_carelessness_is_found(made):
    algorithm, batch = moved("ERM", {})
    algorithm.__class__, algorithm.made = Careless, made
    with elsewhere(), pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        algorithm.update(batch)


def test_a_number_among_the_losses_is_reported_on_any_device():
    class Reporting(ERM):
        def loss(self, minibatches):
            return super().loss(minibatches) | {"weight": 0.5}

    algorithm, batch = moved("ERM", {})
    algorithm.__class__ = Reporting
    with elsewhere():
        assert set(algorithm.update(batch)) == {"loss", "weight"}
