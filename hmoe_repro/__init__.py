"""Domain generalization: train image classifiers for domains that they have never seen.

- `compare(["ERM", "HMOE-DN", Mine], data, seeds=3)` trains algorithms on the same splits, holds out
  each domain in turn, and returns their differences with intervals.
- `load(run)` returns the model of a finished run, or of a folder that `hmoe export` wrote, to
  predict for images.

The command line is `hmoe`, or `python -m hmoe_repro`.
"""

__version__ = "0.1.0"
__all__ = ["compare", "load"]
_LAZY = {"compare": "apps.compare", "load": "apps.predict"}  # imported when first asked for


def __getattr__(name: str):
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
