"""Backends and the current one. This module can be called: `cstorch.backend("CSX", ...)` is `backend("CSX", ...)`."""

import inspect
import sys
import types
import warnings

import torch

from .base import Backend, BackendDevice, BackendType

_current: Backend | None = None


def _implementation(kind: BackendType) -> type[Backend]:
    if kind.is_cpu:
        from .cpu import CPUBackend

        return CPUBackend
    if kind.is_gpu:
        from .gpu import GPUBackend

        return GPUBackend
    from .csx import CSXBackend

    return CSXBackend


def backend(backend_type: str | None = None, *args, **kwargs) -> Backend:
    """Makes a backend and makes it the current one; without arguments, returns the current one.

    A second call replaces the current backend, unless a DataExecutor is running. Models and tensors of the earlier
    backend stay valid, but a traced step takes those of the current one only.

    Args:
        backend_type: "CSX", "CPU" or "GPU" (case does not matter), or None.
        *args, **kwargs: for the backend; see `CSXBackend`, `CPUBackend`, `GPUBackend`.

    Raises:
        ValueError: unknown backend, or a value out of range.
        TypeError: a wrong type, or an argument that this backend does not have.
        RuntimeError: no current backend; no CUDA; an executor is running.
        API reference: cerebras.pytorch.backend.
    """
    global _current
    if backend_type is None:
        if args or kwargs:
            raise TypeError("backend() takes arguments only together with a backend type: backend('CSX', ...)")
        return current_backend_impl()
    kind = backend_type if isinstance(backend_type, BackendType) else BackendType.from_str(backend_type)
    if _current is not None and _current.executor is not None:
        raise RuntimeError(
            f"A DataExecutor of the {_current.backend_type.name} backend is running.\n"
            "  Instead: make the new backend after its loop has ended"
        )
    cls = _implementation(kind)
    try:
        inspect.signature(cls).bind(*args, **kwargs)
    except TypeError as e:
        allowed = ", ".join(inspect.signature(cls).parameters)
        raise TypeError(f"backend({kind.name!r}): {e}. It takes: {allowed}") from None
    _current = cls(*args, **kwargs)
    return _current


def current_backend_impl(raise_exception: bool = True) -> Backend | None:
    """The current backend.

    Raises:
        RuntimeError: there is none and `raise_exception` is True.
    """
    if _current is None and raise_exception:
        raise RuntimeError(
            "There is no backend yet.\n  Instead: call cstorch.backend('CSX'), 'CPU' or 'GPU' at the start of the script"
        )
    return _current


def current_backend(raise_exception: bool = True, raise_warning: bool = True) -> Backend | None:
    """DEPRECATED, use `backend()`. API reference: cerebras.pytorch.current_backend."""
    if raise_warning:
        warnings.warn("current_backend() is deprecated: use cstorch.backend()", DeprecationWarning, stacklevel=2)
    return current_backend_impl(raise_exception)


def current_torch_device() -> torch.device:
    """The torch device of the current backend; the CPU where there is none."""
    return _current.torch_device if _current is not None else torch.device("cpu")


def use_cs() -> bool:
    """True where the current backend is CSX."""
    return _current is not None and _current.is_csx


def device(backend_type: str, *args, **kwargs) -> BackendDevice:
    """Makes a backend and returns its device: `with cstorch.device("CSX"): ...`."""
    return backend(backend_type, *args, **kwargs).device


def get_backend_args(backend_type) -> dict[str, inspect.Parameter]:
    """The constructor arguments of a backend, by name."""
    kind = backend_type if isinstance(backend_type, BackendType) else BackendType.from_str(backend_type)
    return dict(inspect.signature(_implementation(kind)).parameters)


class _CallableModule(types.ModuleType):
    def __call__(self, *args, **kwargs):
        return backend(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule

__all__ = [
    "Backend",
    "BackendDevice",
    "BackendType",
    "backend",
    "current_backend",
    "current_backend_impl",
    "current_torch_device",
    "device",
    "get_backend_args",
    "use_cs",
]
