"""Defaults and random trials in DomainBed's form, with its traps: numpy's types, a default of 1
whose trials are fractions, settings that only its loader and its networks read."""

import numpy as np

from domainbed.lib import misc


def _hparams(algorithm, dataset, random_seed):
    small, found = dataset in ("RotatedMNIST", "ColoredMNIST"), {}

    def add(name, default, draw):
        rng = np.random.RandomState(misc.seed_hash(random_seed, name))
        found[name] = (default, draw(rng))

    add("data_augmentation", True, lambda r: True)
    add("class_balanced", False, lambda r: False)
    add("resnet18", False, lambda r: False)
    add("nonlinear_classifier", False, lambda r: bool(r.choice([False, False])))
    add("lr", 1e-3 if small else 5e-5, lambda r: 10 ** r.uniform(-4.5, -2.5))
    add("weight_decay", 0.0, lambda r: 0.0 if small else 10 ** r.uniform(-6, -2))
    exponent = 5 if dataset == "DomainNet" else 5.5
    add("batch_size", 64 if small else 32, lambda r: int(2 ** r.uniform(3, exponent)))
    if algorithm == "Adversarial":
        add("lambda", 1, lambda r: r.uniform(0.5, 1.0))
        add("every", 2, lambda r: r.choice([2, 3]))
    return found


def default_hparams(algorithm, dataset):
    return {name: default for name, (default, _) in _hparams(algorithm, dataset, 0).items()}


def random_hparams(algorithm, dataset, seed):
    return {name: drawn for name, (_, drawn) in _hparams(algorithm, dataset, seed).items()}
