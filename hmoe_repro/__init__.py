"""Domain generalization: train image classifiers for domains that they have never seen.

    import hmoe_repro as hm

    hm.list_algorithms("HMOE*"), hm.list_networks("*vit*"), hm.list_datasets("*Digits")
    compared = hm.compare(["ERM", "HMOE-DN", Mine], "path/to/my_images", seeds=3)
    config = hm.make_config("ERM", "DigitDomains", test_domains=["sketch"], steps=300)
    record = hm.run(config)
    frame = hm.results("quick-digits")
    evaluated = hm.evaluate(config.run_id)
    model = hm.load(config.run_id)

Compare algorithms: `compare`. Group one's own images: `discover`. Predict: `load`.
Build: `get_algorithm`, `Algorithm`, `register`, `load_dataset`, `list_*`.
Train: `make_config`, `RunConfig`, `find_lr`, `run`, `sweep`.
Read records: `results`, `checkpoints`.
Measure predictions: `evaluate`, `predictions`, `confusion_matrix`.
A name is imported when it is first used. The command line is `hmoe`, or `python -m hmoe_repro`.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors and type checkers
    from .algorithms import get_algorithm, list_algorithms
    from .algorithms.base import Algorithm, register
    from .analysis.results import checkpoints, results
    from .apps.compare import compare
    from .analysis.measures import confusion_matrix
    from .apps.discover import discover
    from .apps.evaluate import evaluate, predictions
    from .apps.find_lr import find_lr
    from .apps.predict import load
    from .data.registry import list_datasets, load_dataset
    from .networks.registry import list_networks
    from .studies.sweep import sweep
    from .training.planning import make_config
    from .training.run import run
    from .training.run_config import RunConfig

__version__ = "0.1.0"
__all__ = [
    "Algorithm",
    "RunConfig",
    "checkpoints",
    "compare",
    "confusion_matrix",
    "discover",
    "evaluate",
    "find_lr",
    "get_algorithm",
    "list_algorithms",
    "list_datasets",
    "list_networks",
    "load",
    "load_dataset",
    "make_config",
    "predictions",
    "register",
    "results",
    "run",
    "sweep",
]
_MODULES = {  # public name -> the module that defines it
    "Algorithm": "algorithms.base",
    "RunConfig": "training.run_config",
    "checkpoints": "analysis.results",
    "compare": "apps.compare",
    "confusion_matrix": "analysis.measures",
    "discover": "apps.discover",
    "evaluate": "apps.evaluate",
    "find_lr": "apps.find_lr",
    "get_algorithm": "algorithms",
    "list_algorithms": "algorithms",
    "list_datasets": "data.registry",
    "list_networks": "networks.registry",
    "load": "apps.predict",
    "load_dataset": "data.registry",
    "make_config": "training.planning",
    "predictions": "apps.evaluate",
    "register": "algorithms.base",
    "results": "analysis.results",
    "run": "training.run",
    "sweep": "studies.sweep",
}


def __getattr__(name: str):
    """Import a public name from its module when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
