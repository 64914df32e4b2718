"""`compile` and `trace`: what users wrap their model and their step with."""

import functools
import logging
from collections.abc import Callable

import torch

from ..backend import backend as make_backend
from ..backend import current_backend_impl

logger = logging.getLogger("cerebras.pytorch")


class CompiledModule:
    """What `compile` returns: call it like the module. Public attributes are the module's."""

    __slots__ = ("_module", "_forward", "__weakref__")

    def __init__(self, module: torch.nn.Module, forward: Callable):
        self._module = module
        self._forward = forward

    def __call__(self, *args, **kwargs):
        return self._forward(*args, **kwargs)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(
                f"A compiled module has no private attribute {name!r}; use the original module, which shares its state."
            )
        return getattr(self._module, name)

    def __repr__(self):
        return f"CompiledModule({self._module!r})"


def compile(model: torch.nn.Module, backend=None) -> CompiledModule:
    """Prepares a module for tracing: moves its parameters and buffers to the backend's device.

    The original module stays usable: the parameters are the same objects, so an optimizer may be made before or after.

    Args:
        model: the module; initialise it before.
        backend: a backend, its name ("CSX", "CPU", "GPU"), or None for the current one (CPU where there is none).

    Returns:
        A callable like the module. API reference: cerebras.pytorch.compile.

    Raises:
        TypeError: `model` is no module, `backend` no backend.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"compile() takes a torch.nn.Module, not {type(model).__name__}: {model!r}")
    backend = _resolve(backend)
    forward = backend.setup_model(model)
    if not isinstance(getattr(type(model), "device", None), property):
        model.device = backend.torch_device
    return CompiledModule(model, forward)


def _resolve(backend):
    from ..backend.base import Backend

    if backend is None:
        return current_backend_impl(raise_exception=False) or make_backend("CPU")
    if isinstance(backend, str):
        current = current_backend_impl(raise_exception=False)
        if current is not None and current.backend_type.name == backend.upper():
            return current
        return make_backend(backend)
    if not isinstance(backend, Backend):
        raise TypeError(
            f"compile(backend=...) takes a backend or one of 'CSX', 'CPU', 'GPU', not {type(backend).__name__}"
        )
    return backend


def trace(step_fn: Callable) -> Callable:
    """Marks a function as a step: on CSX its body runs once and becomes a program; on CPU and GPU it runs each time.

    Inside, no tensor may be read (print, item, if, numpy): errors name the line. Works on functions and methods.
    API reference: cerebras.pytorch.trace.
    """
    if not callable(step_fn):
        raise TypeError(f"trace() decorates a function, not {type(step_fn).__name__}")

    @functools.wraps(step_fn)
    def wrapper(*args, **kwargs):
        backend = current_backend_impl()
        if backend.is_csx:
            return backend.run_step(wrapper, step_fn, args, kwargs)
        return step_fn(*args, **kwargs)

    return wrapper
