"""Creation functions for constant tensors, which hold no memory where the backend defers them.

Reference: `seeds/2`, "Creation Ops". On the CPU and GPU backends they give ordinary tensors.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch

from .deferred import DeferredFullTensor

_lazy: Callable[[], bool] | None = None
_factory: Callable[[torch.Size, Any, torch.dtype, torch.device | None], torch.Tensor | None] | None = None


def set_full_factory(factory) -> None:
    """Sets the function that makes constant tensors; None: `torch.full` makes them.

    Args:
        factory: takes shape, value (a number that fits the dtype), dtype, and the device of the tensor that a `_like`
            function was given, else None; returns a tensor, or None where this one is not for it to make.
    """
    global _factory
    _factory = factory


def set_lazy_creation(predicate: Callable[[], bool] | None) -> None:
    """Sets the function that tells at each call whether to make a `DeferredFullTensor`; asked after the factory."""
    global _lazy
    _lazy = predicate


def _shape(shape) -> torch.Size:
    try:
        dims = (operator.index(shape),)
    except TypeError:
        dims = tuple(operator.index(dim) for dim in shape)
    for dim in dims:
        if dim < 0:
            raise ValueError(f"shape {dims} has a negative dimension")
    return torch.Size(dims)


def _checked(value: Any, dtype: torch.dtype | None) -> tuple[Any, torch.dtype]:
    """The fill as a Python number of the dtype's kind, and the dtype (torch.full's inference where none is given)."""
    if isinstance(value, torch.Tensor) or hasattr(value, "dtype"):
        value = value.item()
    if not isinstance(value, (bool, int, float, complex)):
        raise TypeError(f"the fill value must be a number, not {type(value).__name__} ({value!r})")
    if dtype is None:
        dtype = torch.full((), value, device="cpu").dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, not {dtype!r}")
    if isinstance(value, complex) and not dtype.is_complex:
        raise ValueError(f"the complex fill value {value!r} does not fit {dtype}")
    if not dtype.is_floating_point and not dtype.is_complex:
        if dtype == torch.bool:
            value = bool(value)
        elif isinstance(value, float):
            if not value.is_integer():
                raise ValueError(f"the fill value {value!r} does not fit {dtype}")
            value = int(value)
        if dtype != torch.bool:
            info = torch.iinfo(dtype)
            if not info.min <= value <= info.max:
                raise ValueError(f"the fill value {value!r} does not fit {dtype} ({info.min} to {info.max})")
    return value, dtype


def _full(shape, value, dtype, device=None) -> torch.Tensor:
    shape = _shape(shape)
    value, dtype = _checked(value, dtype)
    if _factory is not None:
        made = _factory(shape, value, dtype, device)
        if made is not None:
            return made
    if _lazy is not None and _lazy():
        return DeferredFullTensor(shape, dtype, value)
    return torch.full(shape, value, dtype=dtype, device=device)


def full(shape, value, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of `shape` filled with `value`.

    Args:
        shape: an int, or a sequence of ints.
        value: a number.
        dtype: by default inferred from the value, as `torch.full` does.

    Raises:
        ValueError: a negative dimension, or a value that the dtype cannot hold.
        TypeError: the value is not a number.
    """
    return _full(shape, value, dtype)


def full_like(other: torch.Tensor, value, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of `other`'s shape, and of its dtype unless one is given, filled with `value`."""
    return _full(other.shape, value, dtype or other.dtype, other.device)


def ones(shape, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of `shape` filled with ones, of the default dtype unless one is given."""
    return _full(shape, 1, dtype or torch.get_default_dtype())


def ones_like(other: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of `other`'s shape, and of its dtype unless one is given, filled with ones."""
    return full_like(other, 1, dtype)


def zeros(shape, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of `shape` filled with zeros, of the default dtype unless one is given."""
    return _full(shape, 0, dtype or torch.get_default_dtype())


def zeros_like(other: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of `other`'s shape, and of its dtype unless one is given, filled with zeros."""
    return full_like(other, 0, dtype)
