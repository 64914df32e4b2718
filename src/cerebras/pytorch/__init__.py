"""cstorch: an independent implementation of the cerebras.pytorch programming model.

Names are imported when they are first used, so that `import cerebras.pytorch` costs little beyond `import torch`.
"""

import importlib

from ._version import __version__

_NAMES = {
    "backend": ("backend", None),
    "backends": ("backends", None),
    "amp": ("amp", None),
    "core": ("core", None),
    "distributed": ("distributed", None),
    "optim": ("optim", None),
    "storage": ("storage", None),
    "utils": ("utils", None),
    "current_backend": ("backend", "current_backend"),
    "current_torch_device": ("backend", "current_torch_device"),
    "device": ("backend", "device"),
    "use_cs": ("backend", "use_cs"),
    "compile": ("core.compile", "compile"),
    "trace": ("core.compile", "trace"),
    "step_closure": ("core.closures", "step_closure"),
    "checkpoint_closure": ("core.closures", "checkpoint_closure"),
    "current_executor": ("utils.data", "current_executor"),
    "from_numpy": ("utils.data.utils", "from_numpy"),
    "to_numpy": ("utils.data.utils", "to_numpy"),
    "full": ("storage", "full"),
    "full_like": ("storage", "full_like"),
    "load": ("storage", "load"),
    "ones": ("storage", "ones"),
    "ones_like": ("storage", "ones_like"),
    "save": ("storage", "save"),
    "summarize_scalar": ("utils.summaries", "summarize_scalar"),
    "summarize_tensor": ("utils.summaries", "summarize_tensor"),
    "zeros": ("storage", "zeros"),
    "zeros_like": ("storage", "zeros_like"),
}

__all__ = ["__version__", *_NAMES]


def __getattr__(name):
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _NAMES[name]
    value = importlib.import_module(f".{module}", __name__)
    if attribute is not None:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
