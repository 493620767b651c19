"""GMoE and its dense twin: settings by data set, the default network, what
`domainbed_compat` means, and the auxiliary loss's gradient under every algorithm that the paper
combines with GMoE."""

import functools

import pytest
import torch
import torch.nn.functional as F
from trees import folder_tree

from hmoe_repro.algorithms import algorithm_names, get_algorithm, meta
from hmoe_repro.algorithms.base import SHARED_HPARAMS
from hmoe_repro.algorithms.conformance import check_algorithm, random_batches, small_network
from hmoe_repro.algorithms.hparams import merge_hparams, search_distributions
from hmoe_repro.apps.predict import load, predict_folder
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seeds import seed_everything
from hmoe_repro.data.base import as_input
from hmoe_repro.data.registry import load_dataset
from hmoe_repro.method.sparse_moe import balance_loss, choose, product_loss
from hmoe_repro.networks.backbones import LARGE
from hmoe_repro.networks.registry import NETWORKS, network_options
from hmoe_repro.networks.search_space import HParam
from hmoe_repro.networks.sparse_vit import SPARSE, add_experts, expert_layers
from hmoe_repro.studies.studies import check_study, count_runs, read_study, study_configs
from hmoe_repro.training.model import build_dataset, load_model, load_weights, save_model
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore
from hmoe_repro.training.trainer import Trainer

SHAPE = ((3, 16, 16), 4, 3)
PAPER = {  # protocol.md 4.3: learning rate, weight decay
    "VLCS": (3e-5, 1e-6),
    "PACS": (3e-5, 1e-6),
    "OfficeHome": (1e-5, 1e-6),
    "TerraIncognita": (5e-5, 1e-4),
    "DomainNet": (5e-5, 0.0),
    "SVIRO": (3e-5, 0.0),
}


def made(name, **hparams):
    seed_everything(0)
    cls = get_algorithm(name)
    algorithm = cls(*SHAPE, {"network": "gmoe_small", "lr": 1e-3} | hparams).train()
    algorithm.total_steps = 20
    return algorithm


def batches(seed=0):
    return random_batches(3, (3, 16, 16), 4, seed)


# Settings


@pytest.mark.parametrize("name", ["GMoE", "ERM-ViT"])
@pytest.mark.parametrize("dataset", PAPER)
def test_settings_are_the_papers_on_every_data_set(name, dataset):
    declared = get_algorithm(name).HPARAMS
    h = merge_hparams(declared, {}, 224, dataset)
    assert (h["lr"], h["weight_decay"]) == PAPER[dataset]
    assert h["batch_size"] == 32
    assert h["drop_path"] == 0.1
    assert h["network"] == {"GMoE": "gmoe_s16", "ERM-ViT": "deit_small"}[name]
    drawn = {n: str(s) for n, s in search_distributions(declared, 224, dataset).items()}
    own = dataset != "SVIRO"
    assert drawn["lr"] == ("10^U(-4.5, -2.5)" if own else "10^U(-5, -3.5)")
    assert drawn["weight_decay"] == ("one of 0" if own else "10^U(-6, -2)")


def test_experts_have_the_papers_defaults_and_exist_with_experts_only():
    h = merge_hparams(SHARED_HPARAMS, {"network": "gmoe_s16"})
    expected = {
        "moe_placement": "last-two",
        "moe_experts": 6,
        "moe_k": 1,
        "moe_router": "cosine",
        "moe_capacity": 1.5,
        "moe_evaluation": "dropless",
        "moe_noise": 1.0,
        "moe_dropout": 0.1,
        "moe_loss": "balance",
        "moe_weight": 0.01,
        "moe_backend": "torch",
    }
    assert {n: v for n, v in h.items() if n.startswith("moe_")} == expected
    assert h["drop_path"] == 0.1
    assert "freeze_bn" not in h
    assert "resnet_dropout" not in h
    for network in [*LARGE, "small_vit", "small_cnn", "mnist_cnn", "timm:vit_small_patch16_384"]:
        others = merge_hparams(SHARED_HPARAMS, {"network": network})
        assert not {n for n in others if n.startswith("moe_")}
        assert ("drop_path" in others) == network.startswith("timm:")
    with pytest.raises(HmoeError, match="moe_k exists only if network is gmoe_ti16 or .*<name in"):
        merge_hparams(SHARED_HPARAMS, {"network": "deit_small", "moe_k": 2})


def test_a_spec_of_an_older_network_has_no_new_setting():
    old = {
        "small_cnn": {"lr", "batch_size", "weight_decay", "nonlinear_classifier"},
        "deit_tiny": {"freeze_bn", "resnet_dropout"},
    }
    old["deit_tiny"] |= old["small_cnn"]
    for network, names in old.items():
        given = {"weights": "random"} if network in LARGE else {}
        config = make_config("ERM", "DigitDomainsTiny", ["photo"], network=network, hparams=given)
        assert set(config.hparams) == names


def test_defaults_by_data_set_and_parity():
    declared = {
        "a": HParam(1.0, "one", large_image_default=2.0, default_in=(("There", 3.0),)),
        "b": HParam(0.0, "two", follows="a"),
        "c": HParam("x", "three", domainbed_default="y"),
    }
    merged = lambda *where: tuple(merge_hparams(declared, {}, *where).values())
    assert merged(28) == (1.0, 1.0, "x")
    assert merged(224, "Here") == (2.0, 2.0, "x")
    assert merged(224, "There") == (3.0, 3.0, "x")
    assert merged(28, None, True) == (1.0, 1.0, "y")
    given = merge_hparams(declared, {"a": 5.0, "c": "z"}, 28, "There", True)
    assert given == {"a": 5.0, "b": 5.0, "c": "z"}


# From a request to a run


@pytest.mark.parametrize(
    "name, network", [("GMoE", "gmoe_small"), ("ERM-ViT", "small_vit"), ("ERM", "mnist_cnn")]
)
def test_the_network_needs_no_naming(name, network):
    config = make_config(name, "DigitDomainsTiny", ["photo"])
    assert config.network == network
    assert config.weights == (None if name == "ERM" else "random")


def test_photographs_get_the_papers_network(tmp_path, own_names):
    folder = tmp_path / "mine"
    folder_tree(folder, ["a", "b", "c"], ["x", "y"], per_class=6)
    for name, network in (("GMoE", "gmoe_s16"), ("ERM-ViT", "deit_small"), ("ERM", "resnet50")):
        config = make_config(name, str(folder), ["a"], hparams={"weights": "random"}, resolution=32)
        assert config.network == network
        with pytest.raises(HmoeError, match=f"{network}' can start from several weights"):
            make_config(name, str(folder), ["a"], resolution=32)


@pytest.mark.parametrize(
    "name, settings, said",
    [
        (
            "GMoE",
            {"network": "deit_small"},
            "GMoE does not train the network 'deit_small'. Fix: use one",
        ),
        ("GMoE", {"network": "small_cnn"}, "or the algorithm ERM-ViT (transformers) or ERM"),
        ("SWAD-GMoE", {"network": "small_cnn"}, "GMoE does not train the network 'small_cnn'"),
        ("ERM-ViT", {"network": "gmoe_small"}, "or the algorithm GMoE (networks with experts)"),
        ("GMoE", {"hparams": {"moe_k": 7}}, "cannot go to 7 of 6 experts"),
        ("IRM", {"network": "gmoe_small", "hparams": {"moe_k": 7}}, "cannot go to 7 of 6 experts"),
        (
            "GMoE",
            {"hparams": {"moe_experts": 1}},
            "there is only one. Fix: use at least two experts",
        ),
        ("GMoE", {"hparams": {"moe_capacity": -1.0}}, "moe_capacity must be at least 0"),
        (
            "GMoE",
            {"hparams": {"moe_capacity": 0.0, "moe_noise": 0.0}},
            "for the balance loss, above 0, got 0.0",
        ),
        ("GMoE", {"hparams": {"moe_placement": "all"}}, "unknown moe_placement 'all'"),
        ("GMoE", {"hparams": {"moe_backend": "jax"}}, "unknown moe_backend 'jax'"),
        ("GMoE", {"network": "gmoe:vit_smal"}, "timm has no network 'vit_smal'. Fix: for example"),
        ("ERM", {"network": "small_vit", "hparams": {"drop_path": 0.1}}, "drop_path exists only"),
    ],
)
def test_what_cannot_be_trained_is_refused_when_it_is_planned(name, settings, said):
    with pytest.raises(HmoeError) as refused:
        make_config(name, "DigitDomainsTiny", ["photo"], **settings)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_parity_evaluates_as_released_and_says_so_in_the_run():
    plan = functools.partial(
        make_config, "IRM", "DigitDomainsTiny", ["photo"], network="gmoe_small"
    )
    assert plan().hparams["moe_evaluation"] == "dropless"
    assert plan(domainbed_compat=True).hparams["moe_evaluation"] == "capacity"
    given = {"moe_evaluation": "dropless"}
    assert plan(domainbed_compat=True, hparams=given).hparams["moe_evaluation"] == "dropless"
    old = make_config(
        "IRM", "DigitDomainsTiny", ["photo"], network="small_cnn", domainbed_compat=True
    )
    assert "moe_evaluation" not in old.hparams


def test_a_prediction_does_not_depend_on_its_batch_but_with_parity():
    x = as_input(load_dataset("DigitDomains").images[1][:60])
    moved = {}
    for domainbed_compat in (False, True):
        config = make_config("GMoE", "DigitDomains", ["photo"], domainbed_compat=domainbed_compat)
        algorithm = made("GMoE", **config.hparams)
        for _ in range(3):
            algorithm.update(batches())
        with torch.no_grad():
            for layer in expert_layers(algorithm):  # a router with preferences
                layer.router.directions.add_(0.03 * torch.randn(6))
            algorithm.eval()
            moved[domainbed_compat] = (
                (algorithm.predict(x)[:1] - algorithm.predict(x[:1])).abs().max()
            )
    assert moved[False] < 1e-5
    assert moved[True] > 1e-4


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    store = RunStore(tmp_path_factory.mktemp("runs"))
    hparams = {"batch_size": 8, "lr": 1e-3}
    config = make_config(
        "GMoE", "DigitDomainsTiny", ["photo"], steps=4, checkpoint_frequency=2, hparams=hparams
    )
    return store, config, run(config, store)


def test_a_run_is_trained_kept_and_read_again(trained):
    store, config, record = trained
    assert record["status"] == "complete", record["reason"]
    assert {"loss", "auxiliary"} <= set(record["checkpoints"][-1]["losses"])
    algorithm, _ = load_model(config.run_id, store=store)
    assert len(expert_layers(algorithm)) == 2
    assert not algorithm.training
    x = as_input(load_dataset("DigitDomainsTiny").images[0][:5])
    with torch.no_grad():
        assert algorithm.predict(x).shape == (5, 10)


def test_a_run_goes_on_to_the_bit(trained):
    _, config, _ = trained

    def trainer(updates, state=None):
        trainer = Trainer(config, build_dataset(config), torch.device("cpu"))
        if state:
            trainer.load(state)
        for _ in range(updates):
            trainer.update()
        return trainer

    rest, whole = trainer(2, trainer(2).state()), trainer(4)
    for a, b in zip(whole.algorithm.state_dict().values(), rest.algorithm.state_dict().values()):
        assert torch.equal(a, b)


def test_a_folder_of_pictures_is_predicted_and_weights_survive_a_file(trained, tmp_path):
    store, config, _ = trained
    folder_tree(tmp_path / "pictures", ["d"], ["c"], per_class=3)
    model = load(config.run_id, store=store)
    rows, unreadable = predict_folder(model, tmp_path / "pictures")
    assert len(rows) == 3
    assert not unreadable
    algorithm, other = (load_model(config.run_id, store=store)[0] for _ in range(2))
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    save_model(tmp_path / "kept.safetensors", algorithm)
    load_weights(tmp_path / "kept.safetensors", other)
    for a, b in zip(algorithm.parameters(), other.parameters()):
        assert torch.equal(a, b)


# Studies


def test_the_quick_study_is_equal_updates_and_settings_known_from_others():
    configs, digits = study_configs("quick-gmoe"), study_configs("quick-digits")
    assert len(configs) == count_runs("quick-gmoe") == 4 * 4 * 3
    assert {s.steps for s in configs} == {301}
    assert {s.hparams["batch_size"] for s in configs} == {16}
    assert {s.determinism for s in configs} == {"portable"}
    networks = {s.algorithm: s.network for s in configs}
    assert networks == {
        "ERM": "small_cnn",
        "HMOE-DN": "small_cnn",
        "ERM-ViT": "small_vit8",
        "GMoE": "gmoe_small8",
    }
    for ours in configs[:24]:
        (theirs,) = [s for s in digits if str(s) == str(ours)]
        assert ours.replace(steps=701, checkpoint_frequency=70, measure="") == theirs
    vit, gmoe = (next(s for s in configs if s.algorithm == n).hparams for n in ("ERM-ViT", "GMoE"))
    assert {n: v for n, v in gmoe.items() if not n.startswith("moe_")} == vit


def test_the_papers_studies_hold_the_papers_settings():
    counts = {
        "paper-gmoe": 2 * 3 * 22,
        "paper-gmoe-placement": 5 * 3 * 22,
        "paper-gmoe-losses": 10 * 3 * 16,
        "paper-gmoe-wilds": 3 * 3 * 21,
        "paper-gmoe-single": 3 * 3,
        "paper-gmoe-v2": 2 * 3 * 22,
    }
    assert {name: count_runs(name) for name in counts} == counts
    for name in counts:
        check_study(name)
        for runs in read_study(name).runs:
            long = "DomainNet" in runs.datasets
            assert runs.steps == (15_001 if long else 5_001)
            assert len(runs.seeds) == 3
    (single,) = {runs.test_domains for runs in read_study("paper-gmoe-single").runs}
    assert single == (("clipart", "infograph", "quickdraw", "real", "sketch"),)


def test_the_smoke_study_trains(tmp_path):
    configs = {config.algorithm: config for config in study_configs("smoke-gmoe")}
    assert set(configs) == {"ERM", "HMOE-DN", "ERM-ViT", "GMoE"}
    for name in ("ERM-ViT", "GMoE"):
        record = run(configs[name], RunStore(tmp_path))
        assert record["status"] == "complete", record["reason"]


# The algorithms


@pytest.mark.parametrize(
    "hparams",
    [
        {"moe_k": 2, "moe_router": "linear"},
        {"moe_placement": "every-two", "moe_loss": "product", "moe_noise": 0.0},
        {"moe_capacity": 0.0, "moe_experts": 3},
    ],
    ids=str,
)
def test_gmoe_conforms_with_other_settings(hparams):
    check_algorithm(get_algorithm("GMoE"), hparams=hparams)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["IRM", "HMOE-DN", "SWAD", "MIRO", "Fish", "DANN"])
def test_others_conform_on_a_sparse_network(name):
    check_algorithm(get_algorithm(name), hparams={"network": "gmoe_small"})


def test_the_twins_differ_in_their_experts_alone():
    gmoe, vit = made("GMoE"), made("ERM-ViT", network="small_vit")
    rest = {n: t.shape for n, t in gmoe.state_dict().items() if ".mlp." not in n}
    assert rest == {n: t.shape for n, t in vit.state_dict().items() if ".mlp." not in n}
    for algorithm in (gmoe, vit):
        weight = algorithm.classifier.weight.detach()
        assert 0.015 < weight.std() < 0.025
        assert not algorithm.classifier.bias.any()
        blocks = algorithm.featurizer.body.blocks
        assert [getattr(b.drop_path1, "drop_prob", 0.0) for b in blocks] == pytest.approx(
            [0.02 * i for i in range(6)]
        )
    assert small_network(get_algorithm("GMoE")) == "gmoe_small"
    assert small_network(get_algorithm("IRM")) == "small_cnn"
    assert {"GMoE", "ERM-ViT"} <= set(algorithm_names())
    assert set(SPARSE) < set(NETWORKS)


def test_it_reports_its_auxiliary_loss():
    algorithm = made("GMoE")
    reported = algorithm.update(batches())
    total = sum(float(layer.auxiliary_loss) for layer in expert_layers(algorithm))
    assert reported["auxiliary"] == pytest.approx(total)
    assert total > 0
    assert set(made("ERM-ViT", network="small_vit").update(batches())) == {"loss"}


# The auxiliary loss under other algorithms


def by_hand(algorithm):
    """Let the layers of an algorithm carry nothing, and collect their losses, with gradients."""
    collected = []
    for layer in expert_layers(getattr(algorithm, "current", algorithm)):
        draw = layer._noisy

        def noisy(logits, layer=layer, draw=draw):
            drawn = draw(logits)
            if not layer.training:  # an oracle
                return drawn
            choice = choose(drawn, layer.k)
            if layer.loss == "product":
                collected.append(product_loss(drawn, choice))
            else:
                collected.append(balance_loss(logits, choice, layer.gate_noise))
            return drawn

        layer._noisy, layer.auxiliary_weight = noisy, 0.0
    return collected


def plus(loss, collected, passes=1):
    "A loss plus 0.01 times the auxiliary losses of two blocks, which then are forgotten."
    assert len(collected) == 2 * passes
    total = loss + 0.01 * sum(collected)
    collected.clear()
    return total


def add_by_hand(algorithm, name, monkeypatch):
    "From now on an algorithm adds the auxiliary losses itself, wherever it differentiates."
    collected = by_hand(algorithm)
    if name == "Fish":
        step_on = meta.step_on
        added = lambda optimizer, loss, p: step_on(optimizer, plus(loss, collected), p)
        monkeypatch.setattr(meta, "step_on", added)
        return
    inner = getattr(algorithm, "current", algorithm)
    loss = inner.loss

    def with_auxiliary(minibatches):
        losses = loss(minibatches)
        return losses | {"loss": plus(losses["loss"], collected)}

    monkeypatch.setattr(inner, "loss", with_auxiliary)


COMBINED = {
    "GMoE": {},
    "IRM": {"irm_penalty_anneal_iters": 0},
    "CORAL": {},
    "MMD": {},
    "DANN": {"grad_penalty": 0.1},
    "Fish": {},
    "Fishr": {"penalty_anneal_iters": 0},
    "Mixup": {},
    "SWAD": {},
    "SWAD-ERM": {},
    "MIRO": {},
    "HMOE-DN": {},
    "GroupDRO": {},
    "RSC": {},
}


def routers(algorithm):
    inner = getattr(algorithm, "current", algorithm)
    parameters = [p for layer in expert_layers(inner) for p in layer.router.parameters()]
    return [p for p in parameters if p.requires_grad]  # without an oracle's


@pytest.mark.parametrize("name", COMBINED)
@pytest.mark.parametrize("kind", [{}, {"moe_loss": "product", "moe_k": 2}], ids=["", "product"])
def test_the_auxiliary_loss_reaches_the_router_once_and_whole(name, kind, monkeypatch):
    """Two updates: the gradients that arrive, and the weights after them, are those of the loss
    plus 0.01 times the sum of the auxiliary losses, added by hand. By plain gradient descent:
    Adam's first step has one length however small a gradient is, and rounding decides its sign."""
    if name == "MIRO" and kind:
        pytest.skip("one is enough")
    hparams = COMBINED[name] | kind
    carried, added = made(name, **hparams), made(name, **hparams)
    without = made(name, **hparams, moe_weight=0.0)
    gradients = {}
    for algorithm in (carried, without, added):
        if algorithm is added:
            add_by_hand(algorithm, name, monkeypatch)
        inner = getattr(algorithm, "current", algorithm)
        inner.optimizer = torch.optim.SGD(inner.parameters(), lr=0.01)
        seed_everything(1)
        for step in range(2):
            algorithm.update(batches(step))
        gradients[algorithm] = torch.cat([p.grad.flatten() for p in routers(algorithm)])
    torch.testing.assert_close(gradients[carried], gradients[added], rtol=1e-3, atol=1e-6)
    assert (gradients[carried] - gradients[without]).norm() > 1e-4
    for (n, a), b in zip(carried.named_parameters(), added.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=n)


def test_a_step_of_the_adversary_alone_moves_no_router():
    algorithm = made("DANN", domainbed_compat=True, d_steps_per_g_step=1)
    values, moved = [], []
    for step in range(3):
        values.append(torch.cat([p.detach().flatten() for p in routers(algorithm)]))
        moved.append(algorithm.schedule()[0] == algorithm.network_parameters())
        algorithm.update(batches(step))
    assert [not torch.equal(a, b) for a, b in zip(values, values[1:])] == moved[:2]
    assert sorted(moved[:2]) == [False, True]


def test_two_ways_back_carry_it_twice():
    "SagNet: the step of the content and that of the adversary."
    algorithm = made("SagNet")
    calls = []
    for layer in expert_layers(algorithm):
        layer.register_full_backward_hook(lambda *_: calls.append(1))
    algorithm.update(batches())
    assert len(calls) == 2 * 2


@pytest.mark.parametrize("beta", [1.0, 0.25])
def test_mldg_carries_it_in_both_gradients_of_a_pair(beta, monkeypatch):
    """Three pairs of three domains, each gradient divided by three: with meta-train and meta-test
    that is twice, and beta, which multiplies the loss on meta-test, leaves the weight 0.01. Added
    by hand to all that is differentiated. Without a virtual step, whose signs rounding decides."""
    hparams = {"mldg_beta": beta, "lr": 0.0}
    carried, added = made("MLDG", **hparams), made("MLDG", **hparams)
    without, collected, seen = made("MLDG", **hparams, moe_weight=0.0), by_hand(added), []

    def weighted_gradients(batch, weight):
        loss = weight * F.cross_entropy(added.predict(batch[0]), batch[1])
        seen.append(
            (weight, torch.autograd.grad(sum(collected), routers(added), retain_graph=True))
        )
        return loss, torch.autograd.grad(plus(loss, collected), list(added.parameters()))

    monkeypatch.setattr(added, "weighted_gradients", weighted_gradients)
    for algorithm in (carried, added, without):
        seed_everything(1)
        algorithm.update(batches())
    arrived, by_sum, bare = (
        torch.cat([p.grad.flatten() for p in routers(algorithm)])
        for algorithm in (carried, added, without)
    )
    torch.testing.assert_close(arrived, by_sum, rtol=1e-3, atol=1e-6)
    assert [weight for weight, _ in seen] == [1.0, beta] * 3
    auxiliary = sum(torch.cat([g.flatten() for g in gradients]) for _, gradients in seen)
    torch.testing.assert_close(arrived - bare, 0.01 * auxiliary / 3, rtol=1e-2, atol=1e-5)
    assert (arrived - bare).norm() > 1e-3


def test_no_gradient_without_training():
    algorithm = made("GMoE").eval()
    (algorithm.predict(torch.rand(8, 3, 16, 16)) * 0).sum().backward()
    assert not any(p.grad.any() for p in routers(algorithm))


def test_options_reach_the_layer():
    given = {"moe_k": 2, "moe_weight": 0.5, "moe_dropout": 0.3, "moe_noise": 2.0}
    layer = expert_layers(made("ERM", **given))[0]
    assert (layer.k, layer.auxiliary_weight, layer.gate_noise) == (2, 0.5, 2.0)
    assert layer.experts.dropout.p == 0.3
    assert network_options({"network": "small_cnn"}) == {}
    body = made("ERM-ViT", network="small_vit").featurizer.body
    add_experts(body, copy=True, auxiliary_weight=0.5)
    assert all(layer.auxiliary_weight == 0.5 for layer in expert_layers(body))
