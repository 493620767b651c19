__version__ = "0.1.0"


def __getattr__(name: str):
    """`hmoe_repro.compare`, imported when it is first asked for: it needs PyTorch."""
    if name != "compare":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hmoe_repro.apps.compare import compare

    return compare
