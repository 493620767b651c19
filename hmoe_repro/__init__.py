__version__ = "0.1.0"
_LAZY = {"compare": "apps.compare", "load": "apps.predict"}  # imported when first asked for


def __getattr__(name: str):
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
