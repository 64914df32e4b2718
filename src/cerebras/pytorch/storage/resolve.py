"""How `save` obtains tensors that do not hold their values themselves, such as those of the device type csx."""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from .deferred import DeferredFill, DeferredFullTensor, DeferredTensor


class _Resolver(NamedTuple):
    resolve: Callable[[torch.Tensor], "torch.Tensor | DeferredFill | None"]
    identity: Callable[[torch.Tensor], Hashable | None] | None
    owns: Callable[[torch.Tensor], bool] | None


_resolvers: list[_Resolver] = []


def register_tensor_resolver(resolve, identity=None, owns=None) -> Callable[[], None]:
    """Registers a function that gives `save` the values of tensors it owns. The latest registered is asked first.

    Args:
        resolve: takes a tensor; returns a plain CPU tensor, a `DeferredFill`, or None where the tensor is not its own.
            Called once for each stored tensor, just before its bytes are written.
        identity: takes a tensor; returns a hashable that is equal for tensors with the same memory, or None. It lets
            `save` store such tensors once without fetching them. By default only the same object is the same.
        owns: takes a tensor; tells whether it may be one of the resolver's own, so that others are checked before
            anything is written. By default any may be.

    Returns:
        A function that undoes the registration.
    """
    entry = _Resolver(resolve, identity, owns)
    _resolvers.append(entry)
    return lambda: _resolvers.remove(entry) if entry in _resolvers else None


def resolve_tensor(tensor: torch.Tensor) -> torch.Tensor | DeferredFill:
    """The values of `tensor` as a plain CPU tensor, or the constant that it is."""
    for entry in reversed(_resolvers):
        out = entry.resolve(tensor)
        if out is not None:
            return out
    if isinstance(tensor, DeferredFullTensor) and tensor.is_deferred:
        return DeferredFill(tensor.shape, tensor.dtype, tensor.fill_value)
    if isinstance(tensor, DeferredTensor):
        return tensor.detach()._materialize()
    return tensor.detach().cpu()


def identity_of(tensor: torch.Tensor) -> Hashable | None:
    """A key that tensors with the same memory have in common, None where only the object itself is known."""
    for entry in reversed(_resolvers):
        out = entry.identity(tensor) if entry.identity is not None else None
        if out is not None:
            return out
    if isinstance(tensor, DeferredTensor):
        return id(tensor._cell)
    return None


def may_be_resolved(tensor: torch.Tensor) -> bool:
    """Whether a registered resolver may own the tensor."""
    return any(entry.owns is None or entry.owns(tensor) for entry in _resolvers)
