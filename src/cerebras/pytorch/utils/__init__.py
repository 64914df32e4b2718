"""Utilities of the API. Submodules are imported when first used."""

import importlib

_SUBMODULES = {
    "benchmark", "call_once", "cs_config", "data", "nest", "profiler", "step_closures", "tensorboard", "tracker", "utils",
}  # fmt: skip
_NAMES = {
    "CSConfig": "cs_config",
    "DataExecutor": "data",
    "DataLoader": "data",
    "RestartableDataLoader": "data",
    "SyntheticDataset": "data",
}


def __getattr__(name):
    if name in _NAMES:
        return getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_NAMES, *_SUBMODULES])
