"""SAM and its relatives against updates written out in loops over parameters, and the rule for the
losses that they train."""

import copy

import by_hand
import numpy as np
import pytest
import torch
from torch import nn

from hmoe_repro.algorithms import MEMBERS, algorithm_names, describe_algorithm, get_algorithm
from hmoe_repro.algorithms.averaging import inner_hparams_of
from hmoe_repro.algorithms.base import ALGORITHMS, ERM, register
from hmoe_repro.algorithms.conformance import check_algorithm, random_batches
from hmoe_repro.algorithms.hparams import draw_hparams, merge_hparams, with_network
from hmoe_repro.algorithms.sharpness import ASAM, DISAM, GSAM, SAGM, SAM, is_loss_only, sharpened
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seeds import seed_everything
from hmoe_repro.networks.search_space import HParam

ALL = (SAM, ASAM, GSAM, SAGM, DISAM)
EACH = pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.name)
SIZES = pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 2, 3)], ids=str)
COMBINED = ("SAM+CORAL", "ASAM+MMD", "GSAM+VREx", "SAGM+GroupDRO", "DISAM+CORAL")
SHAPE, SMALL = ((3, 16, 16), 4, 3), {"network": "small_cnn"}


def norm_by_hand(tensors):
    "The length of all numbers together, one by one."
    return sum(value * value for t in tensors for value in t.flatten().tolist()) ** 0.5


def perturbation_by_hand(cls, names, weights, g, h):
    "The step up of each parameter."
    if cls is ASAM:
        sizes = [
            w.abs() + h["asam_eta"] if "weight" in name else torch.ones_like(w)
            for name, w in zip(names, weights)
        ]
        length = norm_by_hand([t * each for t, each in zip(sizes, g)])
        return [h["rho"] * t * t * each / length for t, each in zip(sizes, g)]
    down = h["sagm_alpha"] if cls is SAGM else 0.0
    return [h["rho"] * each / norm_by_hand(g) - down * each for each in g]


def direction_by_hand(cls, g, g_p, h):
    "What the optimiser gets."
    if cls is SAGM:
        return [0.5 * a + 0.5 * b for a, b in zip(g, g_p)]
    if cls is not GSAM:
        return g_p
    product = sum((a * b).sum().item() for a, b in zip(g, g_p))
    cosine = product / (norm_by_hand(g) * norm_by_hand(g_p))
    ratio = cosine * norm_by_hand(g) / norm_by_hand(g_p)
    return [b - h["gsam_alpha"] * (a - ratio * b) for a, b in zip(g, g_p)]


def climbed_by_hand(cls, losses, loss, h):
    "The loss that is climbed: DISAM takes off the mean squared difference of pairs of domains."
    if cls is not DISAM:
        return loss
    m = len(losses)
    return loss - h["disam_lambda"] * sum((a - b) ** 2 for a in losses for b in losses) / (
        2 * m * m
    )


def follow(cls, fast, batches_of, loss_of, weight_decay=0.0, updates=4):
    "Updates of `fast`, and the same by hand; `loss_of(model, batches)` is the loss of both passes."
    slow = copy.deepcopy(fast)
    names = [name for name, _ in slow.named_parameters()]
    parameters = list(slow.parameters())
    adam = by_hand.Adam(parameters, weight_decay=weight_decay)
    for t in range(updates):
        batches = batches_of(t)
        of_domains = [by_hand.cross_entropy(slow.predict(x), y) for x, y in batches]
        loss = loss_of(slow, batches)
        up = climbed_by_hand(cls, of_domains, loss, fast.hparams)
        g = by_hand.gradients(up, parameters)
        first = by_hand.gradients(loss, parameters)
        weights = [p.detach().clone() for p in parameters]
        e = perturbation_by_hand(cls, names, weights, g, fast.hparams)
        with torch.no_grad():
            for p, step in zip(parameters, e):
                p += step
        perturbed = loss_of(slow, batches)
        g_p = by_hand.gradients(perturbed, parameters)
        with torch.no_grad():
            for p, w in zip(parameters, weights):
                p.copy_(w)
        adam.step(direction_by_hand(cls, first, g_p, fast.hparams))
        reported = fast.update(batches)
        assert all(type(value) is float for value in reported.values())
        assert reported["loss"] == pytest.approx(loss.item(), rel=1e-9)
        assert reported["perturbed_loss"] == pytest.approx(perturbed.item(), rel=1e-9)
        by_hand.assert_same_parameters(fast, slow, tolerance=1e-9)


def mean_loss(model, batches):
    "The mean cross entropy of all images."
    x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
    return by_hand.cross_entropy(model.predict(x), y)


@EACH
@SIZES
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_an_update_by_hand(cls, sizes, weight_decay):
    settings = {"rho": 0.7, "weight_decay": weight_decay}
    settings |= {"gsam_alpha": 0.3} if cls is GSAM else {}
    settings |= {"sagm_alpha": 0.05} if cls is SAGM else {}
    settings |= {"disam_lambda": 0.4} if cls is DISAM else {}
    fast = by_hand.tiny(cls, **settings)
    follow(cls, fast, lambda t: by_hand.draw(sizes, seed=t), mean_loss, weight_decay)


@EACH
def test_an_update_on_the_loss_of_vrex_by_hand(cls):
    "Across the update from which the penalty counts, where Adam is new."
    both = sharpened(cls, get_algorithm("VREx"))
    fast = by_hand.tiny(both, rho=0.3, vrex_lambda=2.0, vrex_penalty_anneal_iters=100)

    def loss_of(model, batches):
        risks = [by_hand.cross_entropy(model.predict(x), y) for x, y in batches]
        mean = sum(risks) / len(risks)
        return mean + sum((r - mean) ** 2 for r in risks) / len(risks)  # weight 1 before the jump

    follow(cls, fast, lambda t: by_hand.draw((4, 4, 4), seed=t), loss_of)
    assert fast.jumps() == [100]


@EACH
def test_a_radius_of_nothing_is_the_plain_step(cls):
    nothing = {"rho": 0.0} | ({"sagm_alpha": 0.0} if cls is SAGM else {})
    models = by_hand.tiny(cls, **nothing), by_hand.tiny(ERM)
    for t in range(3):
        losses = [model.update(by_hand.draw((4, 4, 4), seed=t)) for model in models]
        assert losses[0]["loss"] == pytest.approx(losses[1]["loss"], rel=1e-12)
        assert losses[0]["perturbed_loss"] == pytest.approx(losses[0]["loss"], rel=1e-12)
    by_hand.assert_same_parameters(*models)


@EACH
def test_the_perturbation_has_its_length_and_the_loss_rises(cls):
    alpha = {"sagm_alpha": 1e-6} if cls is SAGM else {}
    model = by_hand.tiny(cls, rho=1e-4, **alpha)
    losses = model.update(by_hand.draw((8, 8, 8), seed=1))
    assert losses["perturbed_loss"] > losses["loss"]
    g = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    e = model.perturbation(g)
    if cls is ASAM:
        lengths = [e[name] / size for name, size in model.sizes(g).items()]
    else:
        lengths = list(e.values())
    expected = 1e-4
    if cls is SAGM:
        expected = abs(1e-4 - 1e-6 * norm_by_hand(g.values()))
    assert norm_by_hand(lengths) == pytest.approx(expected, rel=1e-9)


def test_gsam_climbs_perpendicular_to_the_perturbed_gradient():
    model = by_hand.tiny(GSAM, gsam_alpha=0.7)
    g, g_p = ({name: torch.randn_like(p) for name, p in model.named_parameters()} for _ in range(2))
    direction = model.direction(g, g_p)
    flat = lambda gradient: torch.cat([gradient[name].flatten() for name in g])  # noqa: E731
    difference = flat(direction) - flat(g_p)
    assert (difference @ flat(g_p)).abs() < 1e-9
    assert difference @ flat(g) < 0


def test_units_of_the_weights_do_not_matter_to_asam():
    "Two linear layers, one times 4 and the other divided by it: the same function."

    class Chain(ERM):
        def __init__(self, *args):
            super().__init__(*args)
            self.featurizer = nn.Sequential(nn.Flatten(), nn.Linear(192, 5, bias=False))
            self.classifier = nn.Linear(5, 4, bias=False)

    rises = {}
    for cls in (SAM, ASAM):
        settings = {"network": "small_cnn", "rho": 0.1} | ({"asam_eta": 0.0} if cls is ASAM else {})
        for factor in (1.0, 4.0):
            seed_everything(0)
            model = sharpened(cls, Chain)(by_hand.SHAPE, 4, 3, settings).double()
            with torch.no_grad():
                model.featurizer[1].weight.mul_(factor)
                model.classifier.weight.div_(factor)
            losses = model.update(by_hand.draw((4, 4, 4), seed=0))
            rises[cls, factor] = losses["perturbed_loss"] - losses["loss"]
    assert rises[ASAM, 1.0] == pytest.approx(rises[ASAM, 4.0], rel=1e-9)
    assert rises[SAM, 1.0] != pytest.approx(rises[SAM, 4.0], rel=0.1)


# Both passes, and what they leave


class Normed(nn.Sequential):
    num_features = 6

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(192, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))


def normed(cls, **hparams):
    seed_everything(0)
    made = {"make_featurizer": lambda self: Normed()}
    return type("WithNorm", (cls,), made)(by_hand.SHAPE, 4, 3, SMALL | hparams).double()


class Doubled(ERM):
    "A loss of one's own."

    name = "Doubled"

    def loss(self, minibatches):
        return {"loss": 2 * super().loss(minibatches)["loss"]}


@pytest.mark.parametrize("base", [ERM, Doubled], ids=lambda cls: cls.name)
@pytest.mark.parametrize("cls", [SAM, ASAM, GSAM, SAGM, DISAM], ids=lambda cls: cls.name)
def test_batch_norm_keeps_the_statistics_of_the_first_pass(cls, base):
    sharp, plain = normed(sharpened(cls, base)), normed(base)
    batches = by_hand.draw((4, 4, 4), seed=0)
    sharp.update(batches)
    plain.update(batches)
    for (name, a), b in zip(sharp.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(a, b), name
    assert sharp.featurizer[2].num_batches_tracked == 1


def test_both_passes_see_the_same_buffers_and_other_random_numbers():
    seen, drawn = [], []

    class Watched(ERM):
        def __init__(self, *args):
            super().__init__(*args)
            self.register_buffer("count", torch.zeros(()))

        def loss(self, minibatches):
            seen.append(self.count.item())
            drawn.append(torch.rand(()).item())
            self.count += 1
            return super().loss(minibatches)

    model = sharpened(SAM, Watched)(*SHAPE, SMALL)
    for step in range(3):
        model.update(random_batches(3, (3, 16, 16), 4, step))
    assert seen == [0, 0, 1, 1, 2, 2]
    assert len(set(drawn)) == 6


def test_weights_return_exactly_even_if_the_second_pass_fails():
    class Failing(ERM):
        calls = 0

        def loss(self, minibatches):
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("out of memory")
            return super().loss(minibatches)

    model = sharpened(SAM, Failing)(*SHAPE, SMALL | {"rho": 10.0})
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="out of memory"):
        model.update(random_batches(3, (3, 16, 16), 4, 0))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_parameters_without_a_gradient_stay():
    model = by_hand.tiny(SAM)
    model.featurizer.requires_grad_(False)
    before = copy.deepcopy(model.featurizer.state_dict())
    for t in range(2):
        model.update(by_hand.draw((4, 4, 4), seed=t))
    assert all(torch.equal(v, before[k]) for k, v in model.featurizer.state_dict().items())


@pytest.mark.parametrize("name", [*MEMBERS["sharpness"], "SAM+HMOE-DN", "SAGM+GroupDRO"])
def test_killed_runs_resume_bitwise(name, tmp_path):
    by_hand.assert_resumes(get_algorithm(name), tmp_path)


# Which losses


def test_what_is_loss_only():
    names = [name for name in algorithm_names() if name not in MEMBERS["sharpness"]]
    refused = {name for name in names if not is_loss_only(get_algorithm(name))}
    assert refused == {
        "ANDMask", "SANDMask", "DANN", "CDANN", "Transfer", "ADRMX", "SagNet", "MLDG", "Fish",
        "MetaReg", "SWAD", "SMA", "EoA", "ERM++", "URM", "GMDG", "iDAG",
    }  # fmt: skip
    for name in sorted(refused) + ["SAM", "SWAD-ERM"]:
        with pytest.raises(HmoeError, match="is not one step on one loss.*SWAD-SAM"):
            get_algorithm(f"SAM+{name}")


@pytest.mark.parametrize(
    "name", ["SAM+" * 5000 + "ERM", "SWAD-SAM+" * 5000 + "ERM", "SAM+SWAD-ERM"]
)
def test_endless_names_are_refused_at_once(name):
    with pytest.raises(HmoeError, match="is not one step on one loss") as refused:
        get_algorithm(name)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("name", ["SAM+", "SAM", "+SAM", "SAM+Nothing", "sam+CORAL"])
def test_half_names_are_unknown(name):
    if name == "SAM":
        assert get_algorithm(name) is SAM
        return
    with pytest.raises(HmoeError, match="unknown algorithm"):
        get_algorithm(name)


def test_an_update_of_a_users_class_is_refused():
    class Mine(ERM):
        def update(self, minibatches, unlabeled=None):
            return super().update(minibatches)

    with pytest.raises(HmoeError, match="SAM.Mine is impossible"):
        sharpened(SAM, Mine)


def test_a_hyper_parameter_of_both_is_refused():
    class Mine(ERM):
        HPARAMS = ERM.HPARAMS | {"rho": HParam(1.0, "of mine")}

    with pytest.raises(HmoeError, match="both have a hyper-parameter rho.*rename it in Mine"):
        sharpened(SAM, Mine)


def test_a_loss_that_is_no_scalar_is_refused():
    class Mine(ERM):
        def loss(self, minibatches):
            return {"nll": super().loss(minibatches)["loss"]}

    with pytest.raises(HmoeError, match="must return a dictionary"):
        sharpened(SAM, Mine)(*SHAPE, SMALL).update(random_batches(3, (3, 16, 16), 4, 0))


@pytest.mark.parametrize("name", [*COMBINED, "SAM+HMOE-DN", "SWAD-SAM+CORAL"])
def test_combinations_pass_the_conformance_test(name):
    check_algorithm(get_algorithm(name))


def test_a_combination_has_what_both_declare():
    both = get_algorithm("GSAM+HMOE-DL")
    of_loss = get_algorithm("HMOE-DL")
    assert both.name == "GSAM+HMOE-DL"
    assert both.modes == of_loss.modes
    assert both.measurements == of_loss.measurements
    assert both.HPARAMS.keys() - of_loss.HPARAMS.keys() == {"rho", "gsam_alpha"}
    assert both.needs_domain_labels
    assert get_algorithm("DISAM").needs_domain_labels
    assert get_algorithm("DISAM+SD").needs_domain_labels
    assert not get_algorithm("SAM+SD").needs_domain_labels
    assert get_algorithm("SAM+CORAL").version == get_algorithm("CORAL").version
    assert get_algorithm("SAM+ERM") is SAM
    described = describe_algorithm("SAM+CORAL")
    assert described["family"] == "sharpness"
    assert "mmd_gamma=1 [10^U(-1, 1)]" in described["hyper-parameters"]
    assert "rho=0.05 [one of 0.01, 0.02, 0.05, 0.1, 0.2, 0.5]" in described["hyper-parameters"]


def test_a_search_draws_the_settings_of_both():
    alone = draw_hparams(with_network(get_algorithm("CORAL").HPARAMS, "small_cnn"), 3, 1)
    both = draw_hparams(with_network(get_algorithm("SAM+CORAL").HPARAMS, "small_cnn"), 3, 1)
    assert alone.items() <= both.items()
    assert both.keys() - alone.keys() == {"rho"}
    assert both["rho"] in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
    drawn = {
        draw_hparams(with_network(ASAM.HPARAMS, "small_cnn"), seed, 1)["rho"]
        for seed in range(1, 40)
    }
    assert {min(drawn) < 1e-3, max(drawn) > 0.5} == {True}


def test_defaults():
    added = lambda cls: {  # noqa: E731
        name: merge_hparams(cls.HPARAMS, {})[name] for name in cls.HPARAMS.keys() - ERM.HPARAMS
    }
    assert added(SAM) == {"rho": 0.05}
    assert added(ASAM) == {"rho": 0.5, "asam_eta": 0.01}
    assert added(GSAM) == {"rho": 0.05, "gsam_alpha": 0.4}
    assert added(SAGM) == {"rho": 0.05, "sagm_alpha": 0.001}
    assert added(DISAM) == {"rho": 0.05, "disam_lambda": 0.1}
    with pytest.raises(HmoeError, match="rho must be at least 0"):
        merge_hparams(SAM.HPARAMS, {"rho": -0.1})


def test_a_single_domain_has_no_variance():
    models = [cls(*SHAPE[:2], 1, SMALL) for cls in (SAM, DISAM)]
    models[1].load_state_dict(models[0].state_dict())
    batch = random_batches(1, (3, 16, 16), 4, 0)
    losses = [model.update(batch) for model in models]
    assert losses[1]["variance"] == 0
    assert losses[0]["perturbed_loss"] == losses[1]["perturbed_loss"]


def test_an_average_of_weights_is_unaffected():
    "SWAD of SAM trains what SAM trains."
    batches = [random_batches(3, (3, 16, 16), 4, t) for t in range(3)]
    averaged, alone = get_algorithm("SMA-SAM+CORAL"), get_algorithm("SAM+CORAL")
    seed_everything(1)
    outer = averaged(*SHAPE, SMALL | {"rho": 0.1})
    seed_everything(1)
    inner = alone(*SHAPE, inner_hparams_of(alone, outer.hparams))
    for given in batches:
        assert outer.update(given) == inner.update(given)
    for (name, a), b in zip(outer.current.named_parameters(), inner.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_registered_class_combines_by_its_name():
    @register("Mine", paper="-", needs_domain_labels=False)
    class Mine(ERM):
        "My algorithm."

    try:
        both = get_algorithm("SAM+Mine")
        assert both.name == "SAM+Mine"
        assert both.base is Mine
        assert both.__qualname__ == Mine.__qualname__
    finally:
        del ALGORITHMS["Mine"]


@pytest.mark.parametrize("name", ["SAGM", "SAM+CORAL", "SWAD-DISAM"])
def test_a_stopped_run_resumes_bitwise(name, tmp_path):
    record = by_hand.stopped_and_resumed(name, tmp_path, rho=0.1)
    assert record["config"]["hparams"]["rho"] == 0.1
    assert record["config"]["algorithm"] == name
    assert np.isfinite(record["checkpoints"][-1]["losses"]["perturbed_loss"])


def test_a_class_of_a_file_combines_and_is_restored(tmp_path, monkeypatch, own_names):
    from hmoe_repro.algorithms.from_file import (
        algorithm_from_file,
        new_algorithm,
        restore_algorithm,
        source_hash,
    )

    monkeypatch.setenv("HMOE_RUNS", str(tmp_path))
    new_algorithm("Between", str(tmp_path / "between.py"))
    name = algorithm_from_file(f"{tmp_path}/between.py:Between")
    both = get_algorithm(f"SAM+{name}")
    assert both.name == "SAM+Between (between.py)"
    assert source_hash(both) == source_hash(get_algorithm(name))
    restored = restore_algorithm(both.name, source_hash(both), trust_code=True)
    assert restored.base is get_algorithm(name)
    check_algorithm(restored)


# The studies


def test_the_studies_have_the_length_of_table_1_and_its_rows_of_erm():
    from hmoe_repro.studies.studies import study_configs

    search, table, first = (
        study_configs(f"quick-{name}") for name in ("sharpness-search", "sharpness", "table1")
    )
    algorithms = {config.algorithm for config in search}
    assert algorithms == {*MEMBERS["sharpness"], "SAM+CORAL", "SAM+HMOE-DN"}
    assert {config.algorithm for config in table} == algorithms | {"ERM"}
    assert len({config.run_id for config in search}) == len(search) == 7 * 4 * 4
    assert len({config.run_id for config in table}) == len(table) == 8 * 4 * 6
    assert {c.trial_seed for c in search}.isdisjoint(c.trial_seed for c in table)
    assert {c.steps for c in (*search, *table)} == {c.steps for c in first} == {701}
    of_erm = {c.run_id for c in first if c.algorithm == "ERM"}
    shared = {c.run_id for c in table if c.algorithm == "ERM" and c.trial_seed < 3}
    assert shared == of_erm
